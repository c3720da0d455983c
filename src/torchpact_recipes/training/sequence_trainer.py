"""Training on sequences: a learner, the loop around it, and validation."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchpact.models import SequenceNet
from torchpact_recipes.training import distributed
from torchpact_recipes.training.loop import TrainingLoop, accuracy
from torchpact_recipes.training.resuming import describe
from torchpact_recipes.training.run_files import Event
from torchpact_recipes.training.sequence_config import SequenceTrainConfig, check_modes, make_task
from torchpact_recipes.training.sequence_evaluate import evaluate_on_task
from torchpact_recipes.training.sequence_learner import SequenceLearner
from torchpact_recipes.training.state import derived_seed
from torchpact_recipes.training.text import evaluate_on_text


@dataclass(frozen=True, eq=False)
class Texts:
    """A text to learn from, and another to see what was learned."""

    train: Tensor
    valid: Tensor


class SequenceTrainer(TrainingLoop[SequenceLearner]):
    """Trains one network on sequences; several can take turns, see :func:`train_together`.

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
