"""What learners have in common: iterations that the seed decides, captured on a GPU, and their means."""

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from torchpact.training import distributed
from torchpact.training.capturing import Captured
from torchpact.training.config import TrainConfig
from torchpact.training.learns import Metrics
from torchpact.training.sequence_config import SequenceTrainConfig
from torchpact.training.state import derived_seed


class Iterations(ABC):
    """Iterations of training, each a function of the seed and of its number.

    Those that build on it set the attributes, and say what an iteration is and what it needs beforehand.
    """

    config: TrainConfig | SequenceTrainConfig
    iteration: int
    optimizer: torch.optim.Optimizer
    captured: Captured | None
    """An iteration, to replay; None where it is run step by step."""
    lr: float | Tensor
    """On the device if iterations are captured."""
    _rate: float
    """What the learning rate is now, as the host knows it."""
    _sums: Tensor
    """Of loss, log-likelihood, accuracy and the expected steps of each block, since they were read."""
    _since: int

    def advance(self) -> None:
        """Train for one iteration; on a GPU the work may still be under way on return."""
        with self._on_stream():
            self._prepare()
            self._turn_to_batch()
            self._set_learning_rate()
            self._set_price()
            torch.manual_seed(derived_seed(self.config.seed, "iteration", self.iteration))
            if self.captured is not None:
                self.captured.replay()
            else:
                self._iterate()
        self.iteration += 1
        self._since += 1

    @abstractmethod
    def _prepare(self) -> None:
        """Capture the iteration, if it is to be and has not been; leave everything else as it was."""

    @abstractmethod
    def _turn_to_batch(self) -> None:
        """See to it that the device knows which batch is next."""

    @abstractmethod
    def _set_price(self) -> None:
        """Let a step cost what it does in this iteration."""

    @abstractmethod
    def _iterate(self) -> None:
        """An iteration, all of it on the device."""

    def _set_learning_rate(self) -> None:
        rate = self.config.learning_rate(self.iteration)
        if rate == self._rate:
            return
        self._rate = rate
        if isinstance(self.lr, Tensor):
            self.lr.fill_(rate)
        else:
            for group in self.optimizer.param_groups:
                group["lr"] = rate

    def metrics(self) -> Metrics:
        """Read the means since the last call; waits for the device."""
        with self._on_stream():
            sums = distributed.mean(self._sums / max(self._since, 1)).tolist()
            self._sums.zero_()
        count, self._since = self._since, 0
        return Metrics(sums[0], sums[1], sums[2], sums[3:], count)

    def _on_stream(self) -> AbstractContextManager[None]:
        return nullcontext() if self.captured is None else self.captured.on_stream()
