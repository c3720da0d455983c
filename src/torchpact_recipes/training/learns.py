"""What the training loop asks of a learner, and what a learner says of its iterations."""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class Metrics:
    """Means over the iterations since the last reading."""

    loss: float
    nll: float
    accuracy: float
    expected_steps: list[float]
    iterations: int


class RunConfig(Protocol):
    """What the loop must know of a configuration; each kind of run has its own."""

    @property
    def method(self) -> str: ...  # noqa: D102 (as in TrainConfig)
    @property
    def modes(self) -> tuple[str, ...]: ...  # noqa: D102
    @property
    def seed(self) -> int: ...  # noqa: D102
    @property
    def iterations(self) -> int: ...  # noqa: D102
    @property
    def log_every(self) -> int: ...  # noqa: D102
    @property
    def validate_every(self) -> int: ...  # noqa: D102
    @property
    def checkpoint_every(self) -> int: ...  # noqa: D102

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, such as JSON holds."""

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "RunConfig":
        """Build a configuration from what :meth:`to_dict` gave."""


class Learns(Protocol):
    """Something that learns by iterations, such as a Learner or a SequenceLearner."""

    device: torch.device
    iteration: int

    @property
    def config(self) -> RunConfig:
        """What is trained, and how."""

    @property
    def pace(self) -> tuple[str, int]:
        """What it reads, as "images", and how many of them in an iteration."""

    @property
    def together(self) -> int:
        """How many networks the same kernels train, this one included."""

    def advance(self) -> None:
        """Train for one iteration."""

    def wait(self) -> None:
        """Wait until the device has done all that was asked of it."""

    def metrics(self) -> Metrics:
        """Read the means since the last call."""

    def state(self) -> dict[str, Tensor]:
        """All tensors that make up the state of training, by name."""

    def load_state(self, tensors: dict[str, Tensor], iteration: int) -> None:
        """Continue from a state."""
