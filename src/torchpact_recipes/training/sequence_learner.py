"""One network learning from sequences: fresh examples of a task, or a text read window by window.

As for images, everything random is a function of the seed and the iteration, and on a GPU the iteration is
captured in a CUDA graph. The states that a text leaves behind are part of the state of training. Where there
are kernels for several networks at once, one that is alone on a GPU is trained by them too.
"""

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from torchpact import EMABaseline
from torchpact.core import state as _state
from torchpact.core.state import State
from torchpact.models import SequenceNet
from torchpact_recipes.training.cuda_graph import CapturedStep
from torchpact_recipes.training.ensemble.sequences import (
    SequenceEnsemble,
    can_form_sequence_ensemble,
    make_adam,
)
from torchpact_recipes.training.iterations import Iterations
from torchpact_recipes.training.sequence import lengths_of, sequence_loss
from torchpact_recipes.training.sequence_config import SequenceTrainConfig, make_task
from torchpact_recipes.training.state import check_same_tensors, collect, derived_seed, make_room, seeded
from torchpact_recipes.training.text import Streams

Batch = tuple[Tensor, Tensor, Tensor | None]
"""Inputs, targets, and the lengths of sequences where they differ."""


class SequenceLearner(Iterations):
    """A network and its optimizer on one device; ``text`` is what to read, for those that read.

    >>> from torchpact_recipes.training.sequence_presets import sequence_preset
    >>> learner = SequenceLearner(sequence_preset("parity", "tiny", hidden=8))
    >>> learner.advance()
    >>> learner.metrics().iterations
    1
    """

    config: SequenceTrainConfig

    def __init__(
        self,
        config: SequenceTrainConfig,
        device: torch.device | str = "cpu",
        text: Tensor | None = None,
        *,
        capture: bool | None = None,
    ) -> None:
        self.config = config
        self.device = torch.device(device)
        self.capture = self.device.type == "cuda" if capture is None else capture
        self.iteration = 0
        with seeded(derived_seed(config.seed, "weights"), torch.device("cpu")):
            model = SequenceNet(config.network, config.training_mode())
        self.model = model.to(self.device).train()
        self.baseline = EMABaseline(config.baseline_decay).to(self.device)
        self.optimizer = make_adam(self.model.parameters(), self.first_rate())
        self.streams: Streams | None = None
        self._states: list[State] = []
        if config.is_text:
            if text is None:
                raise ValueError(f"expected a text to learn {config.task} from, got none")
            self.streams = Streams(text.to(self.device), config.batch, config.window)
            self._states = self.model.zero_states(config.batch)
        else:
            self.task = make_task(config.task, config.sizes)
        self._batch: Batch | None = None
        self._tau: float | Tensor = (
            torch.tensor(config.tau, device=self.device) if self.capture else config.tau
        )
        self._sums = torch.zeros(3 + config.network.layers, dtype=torch.double, device=self.device)
        self._since = 0
        self._rate = config.lr
        self.captured = CapturedStep(self.device) if self.capture else None
        self.use_kernels = self.capture
        """Whether it is trained by those for several networks, where they are for its kind."""

    def advance(self) -> None:
        """Train for one iteration, and those joined with it; a GPU may still be at work on return."""
        if self.use_kernels and self.ensemble is None and can_form_sequence_ensemble([self]):
            SequenceEnsemble([self])
        super().advance()

    @property
    def pace(self) -> tuple[str, int]:
        """Characters or sequences, and how many of them in an iteration."""
        config = self.config
        return ("characters", config.batch * config.window) if config.is_text else ("sequences", config.batch)

    def _iterate(self) -> None:
        """An iteration on the batch at hand, all of it on the device."""
        assert self._batch is not None
        inputs, targets, lengths = self._batch
        outcome = sequence_loss(
            self.model,
            inputs,
            targets,
            self.config,
            states=self._states or None,
            lengths=lengths,
            baseline=self.baseline,
            tau=self._tau,
            packed=not self.capture,
        )
        self.optimizer.zero_grad(set_to_none=True)
        outcome.loss.backward()
        clip_grad_norm_(self.model.parameters(), self.config.clip_norm)
        self.optimizer.step()
        self._sums += outcome.report
        if self._states:
            assert outcome.states is not None
            for kept, after in zip(self._states, outcome.states, strict=True):
                for mine, new in zip(_state.parts(kept), _state.parts(after), strict=True):
                    mine.copy_(new.detach())

    def turn_to_batch(self) -> None:
        """Have the next examples, or the next window, where the iteration looks for them."""
        batch = self._read() if self.streams is not None else self._draw()
        if self._batch is None or not self.capture:
            self._batch = batch
            return
        for here, new in zip(self._batch, batch, strict=True):
            if here is not None and new is not None:
                here.copy_(new)

    def _draw(self) -> Batch:
        """Fresh examples."""
        seed = derived_seed(self.config.seed, "examples", self.iteration)
        batch = self.task.sample(self.config.batch, torch.Generator(self.device).manual_seed(seed))
        return batch.inputs, batch.targets, lengths_of(batch)

    def _read(self) -> Batch:
        """The next window, which begins with the states after the last; the first one with none."""
        assert self.streams is not None
        number = self.iteration % len(self.streams)
        if number == 0:
            for state in self._states:
                for part in _state.parts(state):
                    part.zero_()
        inputs, targets = self.streams[number]
        return inputs, targets.unsqueeze(2), None

    def _set_price(self) -> None:
        price = self.config.price(self.iteration)
        if isinstance(self._tau, Tensor):
            self._tau.fill_(price)
        else:
            self._tau = price

    def _record(self, captured: CapturedStep) -> None:
        self.turn_to_batch()
        captured.record(self._iterate, self.optimizer.zero_grad)

    def wait(self) -> None:
        """Wait until the device has done all that was asked of it."""
        if self.captured is not None:
            self.captured.stream.synchronize()
        elif self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def state(self) -> dict[str, Tensor]:
        """All tensors that make up the state of training, by name; not copies."""
        tensors = collect(self.model, self.baseline, self.optimizer)
        for layer, state in enumerate(self._states):
            for number, part in enumerate(_state.parts(state)):
                tensors[f"states.{layer}.{number}"] = part
        return tensors

    @torch.no_grad()
    def load_state(self, tensors: dict[str, Tensor], iteration: int) -> None:
        """Continue from a state that :meth:`state` gave, at that iteration."""
        with self.on_stream():
            make_room(self.model, self.optimizer, tensors, self.capture)
            own = self.state()
            check_same_tensors(own, tensors)
            for name, value in own.items():
                value.copy_(tensors[name])
            self.iteration, self._since = iteration, 0
            self._sums.zero_()
