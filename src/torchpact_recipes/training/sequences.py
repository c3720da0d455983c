"""Training on sequences: the network, fresh examples of a task or windows of a text, validation.

On a GPU the iteration is captured in a CUDA graph; LSTMs that read a text are trained by the kernels of
``ensemble/``, a single one too. The states that a text leaves behind are part of the state of training.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from torchpact import EMABaseline
from torchpact.core import state as _state
from torchpact.core.state import State
from torchpact.models import SequenceNet
from torchpact_recipes.training import distributed
from torchpact_recipes.training.cuda_graph import CapturedStep
from torchpact_recipes.training.ensemble.sequences import SequenceEnsemble, can_form_sequence_ensemble
from torchpact_recipes.training.loop import BaseLearner
from torchpact_recipes.training.run import TrainingRun, accuracy
from torchpact_recipes.training.run_files import Event, describe
from torchpact_recipes.training.sequence_config import SequenceTrainConfig, check_modes, make_task
from torchpact_recipes.training.sequence_evaluate import evaluate_on_task
from torchpact_recipes.training.sequence_loss import lengths_of, sequence_loss
from torchpact_recipes.training.state import derived_seed, make_adam, seeded
from torchpact_recipes.training.text import Streams, evaluate_on_text

Batch = tuple[Tensor, Tensor, Tensor | None]
"""Inputs, targets, and the lengths of sequences where they differ."""


class SequenceLearner(BaseLearner):
    """A network for sequences that learns; ``text`` is what to read, where the task is a text.

    >>> from torchpact_recipes.training.sequence_presets import sequence_preset
    >>> learner = SequenceLearner(sequence_preset("parity", "tiny", hidden=8))
    >>> learner.advance()
    >>> learner.metrics().iterations
    1
    """

    config: SequenceTrainConfig
    model: SequenceNet

    def __init__(
        self,
        config: SequenceTrainConfig,
        device: torch.device | str = "cpu",
        text: Tensor | None = None,
        *,
        capture: bool | None = None,
    ) -> None:
        self.config, self.device = config, torch.device(device)
        self.capture = self.device.type == "cuda" if capture is None else capture
        with seeded(derived_seed(config.seed, "weights"), torch.device("cpu")):
            model = SequenceNet(config.network, config.training_mode())
        self.model = model.to(self.device).train()
        self.baseline = EMABaseline(config.baseline_decay).to(self.device)
        on_device = self.capture  # what a CUDA graph reads: numbers would be those of its recording
        rate = torch.tensor(config.lr, device=self.device) if on_device else config.lr
        self.optimizer = make_adam(self.model.parameters(), rate)
        self.rate, self.price = config.lr, config.tau
        self.tau = torch.tensor(config.tau, device=self.device) if on_device else config.tau
        self.sums = torch.zeros(3 + config.network.layers, dtype=torch.double, device=self.device)
        self.streams: Streams | None = None
        self.states: list[State] = []
        if config.is_text:
            if text is None:
                raise ValueError(f"expected a text to learn {config.task} from, got none")
            self.streams = Streams(text.to(self.device), config.batch, config.window)
            self.states = self.model.zero_states(config.batch)
        else:
            self.task = make_task(config.task, config.sizes)
        self.batch: Batch | None = None
        self._after: list[State] | None = None
        self.captured = CapturedStep(self.device) if self.capture else None
        self.use_kernels = self.capture
        """Whether the kernels of ensembles train it, where they know its kind."""

    def advance(self) -> None:
        """Train for one iteration, with the ensemble if there is one; a GPU may still be busy on return."""
        if self.use_kernels and self.ensemble is None and can_form_sequence_ensemble([self]):
            SequenceEnsemble([self])
        super().advance()

    # ---- the batch ----

    def next_batch(self) -> None:
        """Draw the next examples, or read the next window, to where a captured step looks for them."""
        batch = self._draw() if self.streams is None else self._read(self.streams)
        if self.batch is None or not self.capture:
            self.batch = batch
            return
        for here, new in zip(self.batch, batch, strict=True):
            if here is not None and new is not None:
                here.copy_(new)

    def _draw(self) -> Batch:
        """Fresh examples."""
        seed = derived_seed(self.config.seed, "examples", self.iteration)
        batch = self.task.sample(self.config.batch, torch.Generator(self.device).manual_seed(seed))
        return batch.inputs, batch.targets, lengths_of(batch)

    def _read(self, streams: Streams) -> Batch:
        """The next window, which begins with the states after the last; the first one with none."""
        number = self.iteration % len(streams)
        if number == 0:
            for state in self.states:
                for part in _state.parts(state):
                    part.zero_()
        inputs, targets = streams[number]
        return inputs, targets.unsqueeze(2), None

    # ---- its loss ----

    def loss(self) -> tuple[Tensor, Tensor]:
        """Return the loss of the batch, and what is added to ``sums``."""
        assert self.batch is not None
        inputs, targets, lengths = self.batch
        outcome = sequence_loss(
            self.model,
            inputs,
            targets,
            self.config,
            states=self.states or None,
            lengths=lengths,
            baseline=self.baseline,
            tau=self.tau,
            packed=not self.capture,
        )
        self._after = outcome.states
        return outcome.loss, outcome.report

    def clip_gradients(self) -> None:
        """Limit the norm of the gradients."""
        clip_grad_norm_(self.model.parameters(), self.config.clip_norm)

    def finish_step(self) -> None:
        """Keep the states that the next window begins with."""
        if self.states:
            assert self._after is not None
            for kept, after in zip(self.states, self._after, strict=True):
                for mine, new in zip(_state.parts(kept), _state.parts(after), strict=True):
                    mine.copy_(new.detach())
        self._after = None

    def record(self, captured: CapturedStep) -> None:
        """Warm up and record a step."""
        self.next_batch()
        super().record(captured)

    def state(self) -> dict[str, Tensor]:
        """Return all tensors that a checkpoint holds, by name; not copies."""
        tensors = super().state()
        for layer, state in enumerate(self.states):
            for number, part in enumerate(_state.parts(state)):
                tensors[f"states.{layer}.{number}"] = part
        return tensors

    @property
    def pace(self) -> tuple[str, int]:
        """Characters or sequences, and how many of them in an iteration."""
        config = self.config
        return ("characters", config.batch * config.window) if config.is_text else ("sequences", config.batch)


@dataclass(frozen=True, eq=False)
class Texts:
    """A text to learn from, and another to see what was learned."""

    train: Tensor
    valid: Tensor


class SequenceTrainer(TrainingRun[SequenceLearner]):
    """Trains one network on sequences; several can share a device, see :func:`train_together`.

    Those on enwik8 need ``texts``. The best checkpoint is that of the highest accuracy, or of the fewest
    bits a character.
    """

    def __init__(
        self,
        config: SequenceTrainConfig,
        folder: str | os.PathLike[str],
        device: torch.device | str = "cpu",
        texts: Texts | None = None,
        *,
        resume: bool = False,
        report: Callable[[Event], None] = lambda event: None,
        tensorboard: bool = False,
    ) -> None:
        if distributed.world() > 1:
            raise ValueError(f"expected a single process for sequences, got {distributed.world()}")
        learner = SequenceLearner(config, device, None if texts is None else texts.train)
        held_out = None if texts is None else texts.valid
        super().__init__(
            learner,
            folder,
            lambda: {"modes": evaluate_sequences(learner.model, config, held_out)},
            score=_fewest_bits if config.is_text else accuracy,
            about={"data": describe(texts, "characters", texts.train)} if texts and config.is_text else None,
            resume=resume,
            report=report,
            tensorboard=tensorboard,
        )


def evaluate_sequences(
    model: SequenceNet,
    config: SequenceTrainConfig,
    text: Tensor | None = None,
    *,
    modes: tuple[str, ...] | None = None,
    examples: int | None = None,
    seed: int | None = None,
) -> dict[str, dict[str, Any]]:
    """Evaluate in each of the modes; a network without any under the name of its method.

    That is on so many fresh examples of its task, or on so many characters of ``text``.

    >>> from torchpact_recipes.training.sequence_presets import sequence_preset
    >>> config = sequence_preset("parity", "tiny", method="repeat", examples=100)
    >>> evaluate_sequences(SequenceNet(config.network), config)["repeat"]["steps"]
    10.0
    """
    names = config.modes if modes is None or not config.modes else modes
    check_modes(names)
    seed = derived_seed(config.seed, "validation") if seed is None else seed
    examples = examples or config.examples
    found: dict[str, dict[str, Any]] = {}
    pairs: list[tuple[str, str | None]] = [(name, name) for name in names]
    for name, mode in pairs or [(config.method, None)]:
        if config.is_text:
            if text is None:
                raise ValueError(f"expected a text to evaluate {config.task} on, got none")
            found[name] = evaluate_on_text(model, text[: examples + 1], mode, seed=seed).to_dict()
            continue
        found[name] = evaluate_on_task(
            model, make_task(config.task, config.sizes), mode, count=examples, seed=seed
        ).to_dict()
        if config.transfer:
            other = make_task(config.task, config.transfer)
            transferred = evaluate_on_task(model, other, mode, count=examples, seed=seed)
            found[name]["transfer"] = transferred.to_dict()
    return found


def _fewest_bits(measured: dict[str, Any]) -> float:
    bits: float = next(iter(measured.values()))["bits_per_character"]
    return -bits
