"""A run of training: what is logged, validated and saved after an iteration, and where it resumes."""

import math
import os
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Generic, TypeVar

from torchpact.files import write_whole
from torchpact_recipes.training import distributed
from torchpact_recipes.training.checkpoint import Checkpoint, save_checkpoint
from torchpact_recipes.training.loop import BaseLearner, Metrics, train_together
from torchpact_recipes.training.resuming import find_checkpoint
from torchpact_recipes.training.run_files import Event, RunFiles, TrainingError, versions
from torchpact_recipes.training.tensorboard import summary_writer, write_scalars

L = TypeVar("L", bound=BaseLearner)


def accuracy(results: dict[str, Any]) -> float:
    """The accuracy in the first of the modes, by which the best checkpoint is chosen."""
    value: float = next(iter(results.values()))["accuracy"]
    return value


class TrainingRun(Generic[L]):
    """Trains one model and keeps its files; several can share a device, see :func:`train_together`.

    ``validate`` returns what to log of a validation, with the results of each mode as "modes"; ``score`` says
    how good those are. ``start`` is called where a run begins rather than resumes. ``about`` goes into
    run.json and has to be the same on resuming. In a process group every process has a loop, and the first
    one validates and writes the files for all.
    """

    def __init__(
        self,
        learner: L,
        folder: str | os.PathLike[str],
        validate: Callable[[], dict[str, Any]],
        *,
        score: Callable[[dict[str, Any]], float] = accuracy,
        start: Callable[[], None] | None = None,
        about: dict[str, Any] | None = None,
        resume: bool = False,
        report: Callable[[Event], None] = lambda event: None,
        tensorboard: bool = False,
    ) -> None:
        self.learner, self.config = learner, learner.config
        self.validate, self.score, self.report = validate, score, report
        self.files = RunFiles(Path(folder))
        self.best = -math.inf
        self.results: dict[str, Any] = {}
        self._seconds, self._clock = 0.0, time.monotonic()
        self._saved = 0  # the iteration of the last checkpoint
        self._board: Any = None
        if tensorboard:
            summary_writer()  # where it is not installed, nothing is written yet
        opened = distributed.on_first(lambda: self._open(about or {}, resume))
        self.about, checkpoint, self.notes = opened
        if checkpoint is not None:
            self._load(checkpoint)
        elif start is not None:
            start()
        distributed.on_first(lambda: self._begin(checkpoint, tensorboard))

    def _open(
        self, about: dict[str, Any], resume: bool
    ) -> tuple[dict[str, Any], Checkpoint | None, list[str]]:
        """Check that the folder is free, or find in it the checkpoint to resume from."""
        if resume:
            return find_checkpoint(self.files, self.config, about, self.learner.state())
        if self.files.run.exists():
            raise TrainingError(
                f"{self.files.folder}: holds a run already; resume it (--resume) or choose another folder"
            )
        return about, None, []

    @property
    def done(self) -> bool:
        """Whether all iterations are behind."""
        return self.learner.iteration >= self.config.iterations

    def run(self) -> dict[str, Any]:
        """Train to the end; return the results."""
        train_together([self])
        return self.results

    def after_iteration(self) -> bool:
        """Log, validate and save what is due after an iteration; return whether anything was."""
        config, now = self.config, self.learner.iteration
        log, validate, save = (
            self.done or now % every == 0
            for every in (config.log_every, config.validate_every, config.checkpoint_every)
        )
        if log or validate or save:
            metrics = self.learner.metrics() if log else None
            self.best, self.results = distributed.on_first(lambda: self._finish(metrics, validate, save))
        return log or validate or save

    def _finish(self, metrics: Metrics | None, validate: bool, save: bool) -> tuple[float, dict[str, Any]]:
        if metrics is not None:
            self._log(metrics)
        if validate or save:
            self._check_finite()
        if validate:
            self._validate()
        if save:
            self._save()
        if self.done:
            self._write_run("finished")
            if self._board is not None:
                self._board.close()
        return self.best, self.results

    def _log(self, metrics: Metrics) -> None:
        elapsed = self._count_time()
        if not math.isfinite(metrics.loss):
            raise self._failed(f"loss is {metrics.loss}")
        what, count = self.learner.pace
        rate = metrics.iterations * count / max(elapsed, 1e-9)
        self._emit("train", **{f"{what}_per_second": rate}, **asdict(metrics))

    def _validate(self) -> None:
        started = time.monotonic()
        found = self.validate()
        self._emit("validate", **found)
        self.results = found["modes"]
        self._clock += time.monotonic() - started  # validation is not training time
        score = self.score(self.results)
        if score > self.best:
            self.best = score
            save_checkpoint(self.files.best, self.learner.state(), self._info())

    def _save(self) -> None:
        save_checkpoint(self.files.last, self.learner.state(), self._info(), keep=self.files.previous)
        self._saved = self.learner.iteration

    def keep(self) -> None:
        """Save where training is, between the checkpoints that are due."""
        if not self.done and self.learner.iteration != self._saved:
            self._count_time()
            self._check_finite()
            self._save()

    def _count_time(self) -> float:
        """Add the time since the last call to that of the training; return it."""
        now = time.monotonic()
        elapsed, self._clock = now - self._clock, now
        self._seconds += elapsed
        return elapsed

    def _check_finite(self) -> None:
        """Refuse to validate or save a network that is not finite."""
        self.learner.wait()
        for name, value in self.learner.state().items():
            if value.is_floating_point() and not value.isfinite().all():
                raise self._failed(f"{name} is not finite")

    def _failed(self, why: str) -> TrainingError:
        there = [path for path in (self.files.last, self.files.previous) if path.exists()]
        left = f"the last good checkpoint is {there[0]}" if there else "no checkpoint yet"
        return TrainingError(f"{why} at iteration {self.learner.iteration}; {left}")

    def _emit(self, kind: str, **measured: Any) -> None:
        event = {"kind": kind, "iteration": self.learner.iteration, "seconds": self._seconds, **measured}
        try:
            self.files.append(event)
        except ValueError:
            raise self._failed(f"what was found ({kind}) is not finite") from None
        if self._board is not None:
            write_scalars(self._board, event)
        self.report(event)

    def _info(self) -> dict[str, Any]:
        """What a checkpoint holds beside the state."""
        return {
            "config": self.config.to_dict(),
            "iteration": self.learner.iteration,
            "best": self.best if math.isfinite(self.best) else None,
            "results": self.results,
            "seconds": self._seconds,
            "data": self.about.get("data"),
        }

    def _load(self, checkpoint: Checkpoint) -> None:
        info = checkpoint.info
        self.learner.load_state(checkpoint.tensors, info["iteration"])
        self._saved = info["iteration"]
        self.best = -math.inf if info["best"] is None else info["best"]
        self.results, self._seconds = info["results"], info["seconds"]

    def _begin(self, checkpoint: Checkpoint | None, tensorboard: bool) -> None:
        """Bring the files to where the learner is; nothing is written before all else was found in order."""
        finished = self.files.record().get("status") == "finished"
        self.files.make_folder()
        if self.notes and self.files.last.exists():
            # or the next one saved would keep it, and not the good one, as the one before
            self.files.last.replace(self.files.refused)
        if checkpoint is None:
            write_whole(self.files.history, b"")
            self._write_run("started")
        elif not (finished and self.done):
            self.files.cut_history(checkpoint.info["iteration"])
            if finished or self.done:  # its end is to be written, or was lost with a checkpoint
                self._write_run("finished" if self.done else "started")
        if tensorboard and not self.done:
            after = self.learner.iteration + 1
            self._board = summary_writer()(str(self.files.tensorboard), purge_step=after)

    def _write_run(self, status: str) -> None:
        self.files.write_record(
            {
                "status": status,
                "config": self.config.to_dict(),
                **self.about,
                "iteration": self.learner.iteration,
                "processes": distributed.world(),
                "joint": self.learner.together,
                "training_seconds": self._seconds,
                "results": self.results,
                "versions": versions(self.learner.device),
            }
        )
