"""Making the runs that are still missing, several at once."""

import gc
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from torchpact_recipes.data import Images
from torchpact_recipes.experiments.archive import Archive
from torchpact_recipes.experiments.rnn_runs import SequenceRun
from torchpact_recipes.experiments.runs import AnyRun, Run, batches, with_needed
from torchpact_recipes.training import (
    Learner,
    SequenceTrainer,
    Texts,
    Trainer,
    TrainingError,
    TrainingRun,
    train_together,
)
from torchpact_recipes.training.config import Precision
from torchpact_recipes.training.ensemble.images import form_ensembles
from torchpact_recipes.training.ensemble.sequences import form_sequence_ensembles
from torchpact_recipes.training.sequences import SequenceLearner


def missing(runs: Iterable[AnyRun], archive: Archive) -> list[AnyRun]:
    """The runs that are not finished, and those whose weights they start from, which come first."""
    everything = with_needed(runs)
    needed = {run.name for run in everything if archive.record(run) is None}
    for run in reversed(everything):
        if run.name in needed:
            needed |= {other.name for other in run.needs if archive.weights(other) is None}
    return [run for run in everything if run.name in needed]


def make(
    groups: Sequence[Sequence[AnyRun]],
    archive: Archive,
    train: Images | None = None,
    test: Images | None = None,
    *,
    texts: Texts | None = None,
    device: torch.device | None = None,
    together: int = 10,
    train_all: Callable[[list[TrainingRun[Any]]], None] = train_together,
) -> list[str]:
    """Train all runs that are missing, one group after the other; return what went wrong, in lines.

    Those on images need ``train`` and ``test``, those on text ``texts``; with neither, ``device`` says
    where. On a GPU those of one kind are trained by the same kernels, if begun together, so that what they
    draw depends on each other. What was begun goes on from its last checkpoint. A run that fails, or cannot
    start since another one has, does not keep the others from being made.
    """
    everything = {run.name: run for run in with_needed(run for group in groups for run in group)}
    archive.recover(everything.values())
    problems: list[str] = []
    place = device or (torch.device("cpu") if train is None else train.images.device)
    failed: set[str] = set()

    def trainer_of(run: AnyRun) -> TrainingRun[Any]:
        if any(other.name in failed for other in run.needs):
            raise TrainingError("has nothing to start or learn from")
        return _trainer(run, archive, train, test, texts, place)

    for group in groups:
        # as often looked at as the group wants that does so most
        left = [everything[run.name] for run in missing(group, archive) if run.name not in failed]
        for part in batches(left, together):
            problems += _make_part(part, archive, trainer_of, train_all, joint=place.type == "cuda")
            failed |= {run.name for run in part if archive.weights(run) is None}
            gc.collect()  # learners refer to themselves, and what they hold of a GPU is wanted by the next
    return problems


def _make_part(
    runs: Sequence[AnyRun],
    archive: Archive,
    trainer_of: Callable[[AnyRun], TrainingRun[Any]],
    train_all: Callable[[list[TrainingRun[Any]]], None],
    *,
    joint: bool,
) -> list[str]:
    """Train these at once; return what went wrong."""
    problems: list[str] = []
    trainers: dict[str, TrainingRun[Any]] = {}
    for run in runs:
        try:
            trainers[run.name] = trainer_of(run)
        except (TrainingError, ValueError, OSError) as error:
            problems.append(f"{run.name}: {error}")
    if joint:
        _join(trainers.values())
    try:
        train_all([*trainers.values()])
    except TrainingError as error:
        # of several it says which it was
        problems.append(str(error) if len(trainers) > 1 else f"{next(iter(trainers))}: {error}")
    finally:  # also if stopped
        for run in runs:
            # by its files: one that failed may have come to the end, with those that it had joined
            if run.name in trainers and archive.weights(run) is not None:
                archive.finish(run)
    return problems


def _join(trainers: Iterable[TrainingRun[Any]]) -> None:
    """Have those of one kind be trained by the same kernels."""
    learners = [trainer.learner for trainer in trainers]
    form_ensembles([one for one in learners if isinstance(one, Learner)])
    form_sequence_ensembles([one for one in learners if isinstance(one, SequenceLearner)])


def _trainer(
    run: AnyRun,
    archive: Archive,
    train: Images | None,
    test: Images | None,
    texts: Texts | None,
    device: torch.device,
) -> TrainingRun[Any]:
    folder, begun = archive.files(run).folder, archive.begun(run)
    if isinstance(run, SequenceRun):
        return SequenceTrainer(begun or run.config, folder, device, texts, resume=True)
    assert isinstance(run, Run)
    if train is None or test is None:
        raise ValueError("expected images to train on, got none")
    precision: Precision = "bf16" if device.type == "cuda" else "fp32"
    config = begun or replace(run.config, precision=precision)
    initial, teacher = (
        None if other is None else archive.weights(other) for other in (run.warm, run.teacher)
    )
    return Trainer(config, folder, train, test, resume=True, initial=initial, teacher=teacher)
