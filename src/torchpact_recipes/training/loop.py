"""The loop around anything that learns: what is logged, validated and saved, and when."""

import json
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Generic, TypeVar

from torchpact.files import remove_leftovers, write_whole
from torchpact_recipes.training import distributed
from torchpact_recipes.training.checkpoint import Checkpoint, load_latest, save_checkpoint
from torchpact_recipes.training.history import History
from torchpact_recipes.training.learns import Learns, Metrics
from torchpact_recipes.training.resuming import check_fits, recorded, same_config, same_origin
from torchpact_recipes.training.run_files import (
    Event,
    RunFiles,
    TrainingError,
    scalars,
    summary_writer,
    versions,
)
from torchpact_recipes.training.stopping import Stop, Stopped, on_signals

L = TypeVar("L", bound=Learns)


def accuracy(measured: dict[str, Any]) -> float:
    """The accuracy in the first of the modes: by it the best checkpoint is chosen."""
    value: float = next(iter(measured.values()))["accuracy"]
    return value


class TrainingLoop(Generic[L]):
    """Trains one network; several can take turns on one device, see :func:`train_together`.

    ``validate`` returns what to put down of a validation, with the results in each mode as "modes", and
    ``score`` how good those are. ``start`` is called where a run begins rather than goes on, and ``about``
    goes into run.json, and has to be the same where it goes on. With ``tensorboard`` the history is also
    written for TensorBoard.

    In a process group every process has one, and the first validates and writes the files for all.
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
        self.learner = learner
        self.config = learner.config
        self.files = RunFiles(Path(folder))
        self.history = History(self.files.history)
        self.validate, self.score = validate, score
        self.about = about or {}
        self.report = report
        self.notes: list[str] = []
        self.best = -math.inf
        self.results: dict[str, Any] = {}
        self._clock = time.monotonic()
        self._seconds = 0.0
        self._board: Any = None
        self._saved = 0
        checkpoint = distributed.on_first(lambda: self._open(resume, tensorboard))
        if checkpoint is not None:
            self._load(checkpoint)
        elif start is not None:
            start()
        distributed.on_first(lambda: self._begin(checkpoint, tensorboard))

    @property
    def done(self) -> bool:
        """Whether all iterations are behind."""
        return self.learner.iteration >= self.config.iterations

    def run(self) -> dict[str, Any]:
        """Train to the end; return the results."""
        train_together([self])
        return self.results

    def burst(self) -> None:
        """Train until there is something to log, validate or save, and do that."""
        stop = self.next_stop()
        while self.learner.iteration < stop:
            self.learner.advance()
        self.finish_burst()

    def next_stop(self) -> int:
        """The iteration at which this trainer will next have something to do."""
        config, now = self.config, self.learner.iteration
        intervals = (config.log_every, config.validate_every, config.checkpoint_every)
        return min(config.iterations, *((now // every + 1) * every for every in intervals))

    def finish_burst(self) -> None:
        """Log, validate and save what is due."""
        due = self.learner.iteration % self.config.log_every == 0 or self.done
        metrics = self.learner.metrics() if due else None
        self.best, self.results = distributed.on_first(lambda: self._finish_burst(metrics))

    def _finish_burst(self, metrics: Metrics | None) -> tuple[float, dict[str, Any]]:
        config, now = self.config, self.learner.iteration
        validate = now % config.validate_every == 0 or self.done
        save = now % config.checkpoint_every == 0 or self.done
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
        elapsed = time.monotonic() - self._clock
        self._seconds += elapsed
        self._clock = time.monotonic()
        if not math.isfinite(metrics.loss):
            raise self._failed(f"loss is {metrics.loss}")
        what, count = self.learner.pace
        rate = metrics.iterations * count / max(elapsed, 1e-9)
        self._emit("train", **{f"{what}_per_second": rate}, **asdict(metrics))

    def _failed(self, why: str) -> TrainingError:
        there = [path for path in (self.files.last, self.files.previous) if path.exists()]
        left = f"the last good checkpoint is {there[0]}" if there else "no checkpoint yet"
        return TrainingError(f"{why} at iteration {self.learner.iteration}; {left}")

    def _check_finite(self) -> None:
        """See that the network is worth validating and saving."""
        self.learner.wait()
        for name, value in self.learner.state().items():
            if value.is_floating_point() and not value.isfinite().all():
                raise self._failed(f"{name} is not finite")

    def _validate(self) -> None:
        started = time.monotonic()
        found = self.validate()
        self._emit("validate", **found)
        self.results = found["modes"]
        # validation is not training time
        self._clock += time.monotonic() - started
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
            self._seconds += time.monotonic() - self._clock
            self._clock = time.monotonic()
            self._check_finite()
            self._save()

    def _info(self) -> dict[str, Any]:
        return {
            "config": self.config.to_dict(),
            "iteration": self.learner.iteration,
            "best": self.best if math.isfinite(self.best) else None,
            "results": self.results,
            "seconds": self._seconds,
            "data": self.about.get("data"),
        }

    def _open(self, resume: bool, tensorboard: bool) -> Checkpoint | None:
        """See that the folder is free, or find in it the checkpoint to continue from."""
        if tensorboard:
            summary_writer()  # before anything is written
        files = self.files
        if files.run.exists() and not resume:
            raise TrainingError(
                f"{files.folder}: holds a run already; resume it (--resume) or choose another folder"
            )
        checkpoint = None
        if resume:
            same_config(files, self.config)
            if files.last.exists() or files.previous.exists():
                checkpoint, problems = load_latest(files.folder, self._check_fits)
                self.notes += [f"{problem}; went back to the checkpoint before" for problem in problems]
            self.about = same_origin(files, self.about, checkpoint)
        return checkpoint

    def _check_fits(self, path: Path, checkpoint: Checkpoint) -> None:
        check_fits(path, checkpoint, self.config, self.learner.state())

    def _load(self, checkpoint: Checkpoint) -> None:
        info = checkpoint.info
        self.learner.load_state(checkpoint.tensors, info["iteration"])
        self._saved = info["iteration"]
        self.best = -math.inf if info["best"] is None else info["best"]
        self.results, self._seconds = info["results"], info["seconds"]

    def _begin(self, checkpoint: Checkpoint | None, tensorboard: bool) -> None:
        """Bring the files to where the learner is; nothing is made before all else was found in order."""
        self.files.folder.mkdir(parents=True, exist_ok=True)
        remove_leftovers(self.files.folder)
        finished = recorded(self.files).get("status") == "finished"
        if self.notes and self.files.last.exists():
            # or the next one saved would keep it, and not the good one, as the one before
            self.files.last.replace(self.files.refused)
        if checkpoint is None:
            self.history.clear()
            self._write_run("started")
        elif not (finished and self.done):
            self.history.cut(checkpoint.info["iteration"])
            if finished or self.done:  # its end is to be written, or was lost with a checkpoint
                self._write_run("finished" if self.done else "started")
        if tensorboard and not self.done:
            after = self.learner.iteration + 1
            self._board = summary_writer()(str(self.files.tensorboard), purge_step=after)

    def _emit(self, kind: str, **measured: Any) -> None:
        event = {"kind": kind, "iteration": self.learner.iteration, "seconds": self._seconds, **measured}
        try:
            self.history.append(event)
        except ValueError:
            raise self._failed(f"what was found ({kind}) is not finite") from None
        if self._board is not None:
            for name, value in scalars(event).items():
                self._board.add_scalar(name, value, event["iteration"])
            self._board.flush()
        self.report(event)

    def _write_run(self, status: str) -> None:
        record = {
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
        write_whole(self.files.run, (json.dumps(record, indent=2) + "\n").encode())


def train_together(trainers: Sequence[TrainingLoop[Any]]) -> None:
    """Train several networks at once on one device, in turns too short to notice.

    On a GPU each has its own stream, so that the small kernels of one run beside those of the others. One
    that fails does not keep the others from finishing; what it failed of is raised when they have. Ctrl-C and
    SIGTERM stop after the iteration, with checkpoints of all.
    """
    failed: list[str] = []
    busy = [trainer for trainer in trainers if not trainer.done]
    with on_signals() as stop:
        while busy:
            ends = [trainer.next_stop() for trainer in busy]
            _advance(busy, ends, stop)
            for trainer, end in zip(list(busy), ends, strict=True):
                if trainer.learner.iteration < end:
                    continue  # stopped on the way
                try:
                    trainer.finish_burst()
                except TrainingError as error:
                    if len(trainers) == 1:
                        raise
                    failed.append(f"{trainer.files.folder.name}: {error}")
                    busy.remove(trainer)
            busy = [trainer for trainer in busy if not trainer.done]
            if stop.number is not None:
                raise Stopped("; ".join(["stopped", *_keep(busy), *failed]), stop.number)
    if failed:
        raise TrainingError("; ".join(failed))


def _advance(trainers: Sequence[TrainingLoop[Any]], ends: Sequence[int], stop: Stop) -> None:
    """Advance all, in turns; or stop on the way."""
    while not stop.asked:
        learners = [trainer.learner for trainer in trainers]
        behind = [
            (learner, learner.iteration)
            for learner, end in zip(learners, ends, strict=True)
            if learner.iteration < end
        ]
        if not behind:
            return
        for learner, before in behind:
            if learner.iteration == before:  # it is ahead where others have joined it, and had it advance
                learner.advance()


def _keep(trainers: Sequence[TrainingLoop[Any]]) -> list[str]:
    """Save where all are; say what is left."""
    kept, lost = [], []
    for trainer in trainers:
        name = trainer.files.folder.name
        try:
            trainer.keep()
            kept.append(f"{name} at iteration {trainer.learner.iteration}")
        except (TrainingError, OSError) as error:
            lost.append(f"{name} ({error})")
    if not trainers:
        return ["all had finished"]
    lists = ("kept: ", kept), ("not kept: ", lost)
    return [start + ", ".join(names) for start, names in lists if names]
