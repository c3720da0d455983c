"""Sizes of tasks, texts and trainers for ``torchpact train text`` and ``sequence``."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchpact_recipes.data import load_enwik8, load_sample_text
from torchpact_recipes.training import SequenceTrainConfig, SequenceTrainer, Texts
from torchpact_recipes.training.ensemble.sequences import form_sequence_ensembles
from torchpact_recipes.training.sequence_config import check_sizes


def sizes(task: str, given: Sequence[str]) -> dict[str, int]:
    """Read sizes of a task, written as name=number.

    >>> sizes("addition", ["max_digits=3"])
    {'max_digits': 3}
    """
    found = {}
    for text in given:
        name, _, number = text.partition("=")
        if not (number.isascii() and number.isdecimal() and len(number) < 10):
            raise ValueError(f"expected a size as name=number, got {text!r:.80}")
        found[name] = int(number)
    check_sizes(task, found)  # or the name of some other setting would change that
    return found


def load_texts(root: Path | None, device: torch.device) -> Texts:
    """Return what to learn from and what to validate on; 'sample' is for a small text at hand."""
    if root == Path("sample"):
        return Texts(load_sample_text("train", device), load_sample_text("valid", device))
    return Texts(load_enwik8(root, "train", device), load_enwik8(root, "valid", device, verify=False))


def load_test_text(root: Path | None, device: torch.device) -> Tensor:
    """Return the text that nothing was ever chosen by."""
    return load_sample_text("valid", device) if root == Path("sample") else load_enwik8(root, "test", device)


def sequence_trainers(
    configs: list[SequenceTrainConfig],
    folders: list[Path],
    device: torch.device,
    data: Path | None,
    **options: Any,
) -> list[SequenceTrainer]:
    """Return a trainer for each configuration; on a GPU those of one kind are trained by the same kernels."""
    texts = load_texts(data, device) if configs[0].is_text else None
    trainers = [
        SequenceTrainer(config, folder, device, texts, **options)
        for config, folder in zip(configs, folders, strict=True)
    ]
    if device.type == "cuda":
        form_sequence_ensembles([trainer.learner for trainer in trainers])
    return trainers
