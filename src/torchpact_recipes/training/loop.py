"""The training loop.

train_together    every run takes an iteration in turn; then it logs, validates and saves what is due (run.py)
BaseLearner       an iteration: the next batch, learning rate, price of a step, loss, gradient, update

``images.py`` and ``sequences.py`` define the model, the batch and its loss. Everything random is a function
of the seed and the iteration: a run resumes at any iteration to the same bits. Plugged in from the side are
CUDA graphs (``cuda_graph.py``), models that the same kernels train (``ensemble/``) and process groups
(``distributed.py``).
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from torchpact_recipes.training import distributed
from torchpact_recipes.training.cuda_graph import CapturedStep, record_step
from torchpact_recipes.training.run_files import TrainingError
from torchpact_recipes.training.sequence_config import RunConfig
from torchpact_recipes.training.state import check_same_tensors, collect, derived_seed, make_room
from torchpact_recipes.training.stopping import Stopped, on_signals

if TYPE_CHECKING:
    from torchpact_recipes.training.run import TrainingRun


def train_together(runs: "Sequence[TrainingRun[Any]]") -> None:
    """Train several models at once on one device, one iteration each in turn.

    On a GPU each has its own stream, so that the small kernels of one run beside those of the others. A run
    that fails does not keep the others from finishing; its error is raised when they have. Ctrl-C and SIGTERM
    stop after the iteration, with checkpoints of all.
    """
    failed: list[str] = []
    active = [run for run in runs if not run.done]
    with on_signals() as stop:
        while active and not stop.asked:
            before = [run.learner.iteration for run in active]
            for run, iteration in zip(active, before, strict=True):
                if run.learner.iteration == iteration:  # else its ensemble has advanced it
                    run.learner.advance()
            for run in list(active):
                try:
                    run.after_iteration()
                except TrainingError as error:
                    if len(runs) == 1:
                        raise
                    failed.append(f"{run.files.folder.name}: {error}")
                    active.remove(run)
            active = [run for run in active if not run.done]
        if stop.number is not None:
            raise Stopped("; ".join(["stopped", *_keep(active), *failed]), stop.number)
    if failed:
        raise TrainingError("; ".join(failed))


def _keep(runs: "Sequence[TrainingRun[Any]]") -> list[str]:
    """Save where all are; say what was kept."""
    kept, lost = [], []
    for run in runs:
        name = run.files.folder.name
        try:
            run.keep()
            kept.append(f"{name} at iteration {run.learner.iteration}")
        except (TrainingError, OSError) as error:
            lost.append(f"{name} ({error})")
    if not runs:
        return ["all had finished"]
    lists = ("kept: ", kept), ("not kept: ", lost)
    return [start + ", ".join(names) for start, names in lists if names]


@dataclass(frozen=True)
class Metrics:
    """Means over the iterations since the last reading."""

    loss: float
    nll: float
    accuracy: float
    expected_steps: list[float]
    iterations: int


class BaseLearner(ABC):
    """A model, its optimizer and their state; :meth:`advance` is one iteration of training.

    Subclasses create the attributes and define the batch and its loss.
    """

    config: RunConfig
    device: torch.device
    model: nn.Module
    baseline: nn.Module
    """REINFORCE's mean of rewards."""
    optimizer: torch.optim.Optimizer
    rate: float
    """The learning rate of this iteration."""
    price: float
    """The price of a step in this iteration."""
    tau: float | Tensor
    """The same, for the loss; on the device where iterations are captured."""
    sums: Tensor
    """Of loss, negative log-likelihood, accuracy and expected steps, over ``since`` iterations."""
    iteration: int = 0
    since: int = 0
    capture: bool
    """Whether iterations are replayed from a CUDA graph."""
    captured: CapturedStep | None
    ensemble: "BaseLearner | None" = None
    """Trains this model, with others, by the same kernels."""

    def advance(self) -> None:
        """Train for one iteration, with the ensemble if there is one; a GPU may still be busy on return."""
        if self.ensemble is not None:
            self.ensemble.advance()
            return
        with self.on_stream():
            if self.captured is not None and not self.captured.recorded:
                record_step(self, self.captured)
            self.next_batch()
            self.set_learning_rate()
            self.set_price()
            torch.manual_seed(derived_seed(self.config.seed, "iteration", self.iteration))
            if self.captured is not None:
                self.captured.replay()
            else:
                self.step()
        self.iteration += 1
        self.since += 1

    def step(self) -> None:
        """Follow the gradient of the batch at hand; all of it runs on the device."""
        loss, report = self.loss()
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.clip_gradients()
        self.optimizer.step()
        self.finish_step()
        self.sums += report

    @abstractmethod
    def next_batch(self) -> None:
        """Make the batch of this iteration known to the device."""

    @abstractmethod
    def loss(self) -> tuple[Tensor, Tensor]:
        """Return the loss of the batch, and what is added to ``sums``."""

    def clip_gradients(self) -> None:  # noqa: B027 (not every kind needs it)
        """Limit the norm of the gradients, where the configuration asks for it."""

    def finish_step(self) -> None:  # noqa: B027 (as above)
        """Move on whatever the next batch depends on."""

    def record(self, captured: CapturedStep) -> None:
        """Warm up and record a step; what that does to state and sums is undone."""
        captured.record(self.step, self.optimizer.zero_grad)

    def set_learning_rate(self) -> None:
        """Give the optimizer the rate of this iteration, on the device if it lives there."""
        rate = self.config.learning_rate(self.iteration)
        if rate == self.rate:
            return
        self.rate = rate
        for group in self.optimizer.param_groups:
            of_group = rate * group.get("times", 1.0)
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(of_group)
            else:
                group["lr"] = of_group

    def set_price(self) -> None:
        """Set τ, the price of a step, to that of this iteration."""
        price = self.config.price(self.iteration)
        if price == self.price:
            return
        self.price = price
        if isinstance(self.tau, Tensor):
            self.tau.fill_(price)
        else:
            self.tau = price

    def metrics(self) -> Metrics:
        """Read the means since the last call; waits for the device."""
        with self.on_stream():
            sums = distributed.mean(self.sums / max(self.since, 1)).tolist()
            self.sums.zero_()
        count, self.since = self.since, 0
        return Metrics(sums[0], sums[1], sums[2], sums[3:], count)

    def state(self) -> dict[str, Tensor]:
        """Return all tensors that a checkpoint holds, by name; not copies."""
        return collect(self.model, self.baseline, self.optimizer)

    @torch.no_grad()
    def load_state(self, tensors: dict[str, Tensor], iteration: int) -> None:
        """Continue from a state that :meth:`state` returned, at that iteration."""
        with self.on_stream():
            make_room(self.model, self.optimizer, tensors, self.capture)
            current = self.state()
            check_same_tensors(current, tensors)
            for name, value in current.items():
                value.copy_(tensors[name])
            self.sums.zero_()
        self.iteration, self.since = iteration, 0

    @property
    @abstractmethod
    def pace(self) -> tuple[str, int]:
        """What is read, as "images", and how many of them in an iteration."""

    @property
    def together(self) -> int:
        """How many models the same kernels train, this one included."""
        return 1 if self.ensemble is None else self.ensemble.together

    def wait(self) -> None:
        """Wait until the device has finished."""
        if self.captured is not None:
            self.captured.stream.synchronize()
        elif self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def on_stream(self) -> AbstractContextManager[None]:
        """Return the context to run iterations in: the stream of the CUDA graph, if there is one."""
        return nullcontext() if self.captured is None else self.captured.on_stream()
