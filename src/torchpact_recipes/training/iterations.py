"""What learners have in common: iterations that the seed decides, captured on a GPU, and their means."""

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from torchpact_recipes.training import distributed
from torchpact_recipes.training.config import TrainConfig
from torchpact_recipes.training.cuda_graph import CapturedStep
from torchpact_recipes.training.learns import Metrics
from torchpact_recipes.training.sequence_config import SequenceTrainConfig
from torchpact_recipes.training.state import copies, derived_seed, put_back


class Iterations(ABC):
    """Iterations of training, each a function of the seed and of its number.

    Those that build on it set the attributes, and say what an iteration is and what it needs beforehand.
    """

    config: TrainConfig | SequenceTrainConfig
    device: torch.device
    iteration: int
    optimizer: torch.optim.Optimizer
    capture: bool
    """Whether iterations are captured, rather than run step by step."""
    captured: CapturedStep | None
    """An iteration, to replay; None where they are not."""
    ensemble: "Iterations | None" = None
    """The ensemble that trains it, with others, by the same kernels."""
    _rate: float
    """What the learning rate is now, as the host knows it."""
    _sums: Tensor
    """Of loss, log-likelihood, accuracy and the expected steps of each block, since they were read."""
    _since: int

    @property
    def together(self) -> int:
        """How many networks the same kernels train, this one included."""
        return 1 if self.ensemble is None else self.ensemble.together

    def advance(self) -> None:
        """Train for one iteration, and those joined with it; a GPU may still be at work on return."""
        if self.ensemble is not None:
            self.ensemble.advance()
            return
        with self.on_stream():
            self._prepare()
            self.turn_to_batch()
            self.set_learning_rate()
            self._set_price()
            torch.manual_seed(derived_seed(self.config.seed, "iteration", self.iteration))
            if self.captured is not None:
                self.captured.replay()
            else:
                self._iterate()
        self.iteration += 1
        self._since += 1

    @torch.enable_grad()
    def _prepare(self) -> None:
        """Capture the iteration, if it is to be and has not been; leave everything else as it was."""
        if self.captured is None or self.captured.recorded:
            return
        torch.cuda.synchronize(self.device)  # weights may still be on their way, from another stream
        before, sums = copies(self.state()), self._sums.clone()
        self._record(self.captured)
        put_back(self.state(), before)
        self._sums.copy_(sums)

    @abstractmethod
    def _record(self, captured: CapturedStep) -> None:
        """Warm up and record the iteration; what that does to state and sums is undone."""

    @abstractmethod
    def state(self) -> dict[str, Tensor]:
        """All tensors that make up the state of training, by name; not copies."""

    @abstractmethod
    def turn_to_batch(self) -> None:
        """See to it that the device knows which batch is next."""

    @abstractmethod
    def _set_price(self) -> None:
        """Let a step cost what it does in this iteration."""

    @abstractmethod
    def _iterate(self) -> None:
        """An iteration, all of it on the device."""

    def first_rate(self) -> float | Tensor:
        """The learning rate to make an optimizer with: on the device if iterations are captured."""
        return torch.tensor(self.config.lr, device=self.device) if self.capture else self.config.lr

    def set_learning_rate(self) -> None:
        """Give the optimizer the rate of this iteration."""
        rate = self.config.learning_rate(self.iteration)
        if rate == self._rate:
            return
        self._rate = rate
        for group in self.optimizer.param_groups:
            own = rate * group.get("times", 1.0)
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(own)
            else:
                group["lr"] = own

    def metrics(self) -> Metrics:
        """Read the means since the last call; waits for the device."""
        with self.on_stream():
            sums = distributed.mean(self._sums / max(self._since, 1)).tolist()
            self._sums.zero_()
        count, self._since = self._since, 0
        return Metrics(sums[0], sums[1], sums[2], sums[3:], count)

    def on_stream(self) -> AbstractContextManager[None]:
        """Return the context in which iterations are run: the stream of the CUDA graph, if there is one."""
        return nullcontext() if self.captured is None else self.captured.on_stream()
