"""Making the runs that are still missing, several at once."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from torchpact.data import Images
from torchpact.experiments.archive import Archive
from torchpact.experiments.runs import Run, batches, with_warm
from torchpact.training import Trainer, TrainingError, train_together
from torchpact.training.config import Precision


def missing(runs: Iterable[Run], archive: Archive) -> list[Run]:
    """The runs that are not finished, and those whose weights they start from, which come first."""
    everything = with_warm(runs)
    needed = {run.name for run in everything if archive.record(run) is None}
    for run in everything:
        if run.name in needed and run.warm is not None and archive.weights(run.warm) is None:
            needed.add(run.warm.name)
    return [run for run in everything if run.name in needed]


def make(
    runs: Iterable[Run],
    archive: Archive,
    train: Images,
    test: Images,
    *,
    together: int = 10,
    train_all: Callable[[list[Trainer]], None] = train_together,
) -> list[str]:
    """Train all runs that are missing; return what went wrong, a line for each run that failed.

    What was begun goes on from its last checkpoint. A run that fails, or cannot start since another one
    has, does not keep the others from being made.
    """
    problems: list[str] = []
    precision: Precision = "bf16" if train.images.device.type == "cuda" else "fp32"
    failed: set[str] = set()
    for part in batches(missing(runs, archive), together):
        trainers: dict[str, tuple[Run, Trainer]] = {}
        for run in part:
            if run.warm is not None and run.warm.name in failed:
                problems.append(f"{run.name}: has nothing to start from")
                continue
            archive.restart(run)
            trainer = Trainer(
                replace(run.config, precision=precision),
                archive.files(run).folder,
                train,
                test,
                resume=True,
                initial=_source(run, archive),
            )
            trainers[run.name] = run, trainer
        try:
            train_all([trainer for _, trainer in trainers.values()])
        except TrainingError as error:
            problems.append(str(error))
        for run, trainer in trainers.values():
            if trainer.done:
                archive.finish(run)
            else:
                failed.add(run.name)
    return problems


def _source(run: Run, archive: Archive) -> Path | None:
    return None if run.warm is None else archive.weights(run.warm)
