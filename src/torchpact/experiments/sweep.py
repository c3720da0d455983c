"""Making the runs that are still missing, several at once."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch

from torchpact.data import Images
from torchpact.experiments.archive import Archive
from torchpact.experiments.rnn_runs import SequenceRun
from torchpact.experiments.runs import AnyRun, Run, batches, with_needed
from torchpact.training import (
    Learner,
    SequenceTrainer,
    Texts,
    Trainer,
    TrainingError,
    TrainingLoop,
    train_together,
)
from torchpact.training.config import Precision
from torchpact.training.joint import join
from torchpact.training.sequence_joint import join_sequences
from torchpact.training.sequence_learner import SequenceLearner


def missing(runs: Iterable[AnyRun], archive: Archive) -> list[AnyRun]:
    """The runs that are not finished, and those whose weights they start from, which come first."""
    everything = with_needed(runs)
    needed = {run.name for run in everything if archive.record(run) is None}
    for run in reversed(everything):
        if run.name in needed:
            needed |= {other.name for other in run.needs if archive.weights(other) is None}
    return [run for run in everything if run.name in needed]


def make(
    runs: Iterable[AnyRun],
    archive: Archive,
    train: Images | None = None,
    test: Images | None = None,
    *,
    texts: Texts | None = None,
    device: torch.device | None = None,
    together: int = 10,
    train_all: Callable[[list[TrainingLoop[Any]]], None] = train_together,
) -> list[str]:
    """Train all runs that are missing; return what went wrong, in lines.

    Those on images need ``train`` and ``test``, those on text ``texts``; with neither, ``device`` says
    where. On a GPU those of one kind are trained by the same kernels, if begun together, so that what they
    draw depends on each other. What was begun goes on from its last checkpoint. A run that fails, or cannot
    start since another one has, does not keep the others from being made.
    """
    runs = with_needed(runs)
    archive.recover(runs)
    problems: list[str] = []
    place = device or (torch.device("cpu") if train is None else train.images.device)
    failed: set[str] = set()
    for part in batches(missing(runs, archive), together):
        trainers: dict[str, tuple[AnyRun, TrainingLoop[Any]]] = {}
        for run in part:
            if any(other.name in failed for other in run.needs):
                problems.append(f"{run.name}: has nothing to start or learn from")
                failed.add(run.name)
                continue
            try:
                trainer = _trainer(run, archive, train, test, texts, place)
            except (TrainingError, ValueError, OSError) as error:
                problems.append(f"{run.name}: {error}")
                failed.add(run.name)
                continue
            trainers[run.name] = run, trainer
        if place.type == "cuda":
            _join([trainer for _, trainer in trainers.values()])
        try:
            train_all([trainer for _, trainer in trainers.values()])
        except TrainingError as error:
            # of several it says which it was
            problems.append(str(error) if len(trainers) > 1 else f"{next(iter(trainers))}: {error}")
        finally:  # also if stopped
            for run, trainer in trainers.values():
                if trainer.done:
                    archive.finish(run)
                else:
                    failed.add(run.name)
    return problems


def _join(trainers: Iterable[TrainingLoop[Any]]) -> None:
    """Have those of one kind be trained by the same kernels."""
    learners = [trainer.learner for trainer in trainers]
    join([one for one in learners if isinstance(one, Learner)])
    join_sequences([one for one in learners if isinstance(one, SequenceLearner)])


def _trainer(
    run: AnyRun,
    archive: Archive,
    train: Images | None,
    test: Images | None,
    texts: Texts | None,
    device: torch.device,
) -> TrainingLoop[Any]:
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
