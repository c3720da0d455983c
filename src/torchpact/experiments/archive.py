"""Where the runs of a reproduction are kept: their numbers for good, their weights while they are needed."""

import json
import shutil
from dataclasses import fields
from pathlib import Path
from typing import Any

from torchpact._files import write_whole
from torchpact.experiments.runs import Run
from torchpact.training import TrainConfig
from torchpact.training.run_files import RunFiles

# how often a run looks at itself, and with how many bits it computes, do not make it another run
_UNIMPORTANT = {
    "log_every", "validate_every", "checkpoint_every", "validate_modes", "variance_samples",
    "precision", "deterministic",
}  # fmt: skip


class Archive:
    """The runs of one scale: ``results`` has run.json and history.jsonl of those finished, ``work`` all else.

    A run that is in ``results`` is not made again, unless another one starts from its weights and ``work``
    does not have them any more.
    """

    def __init__(self, results: Path, work: Path) -> None:
        self.results, self.work = results, work

    def files(self, run: Run) -> RunFiles:
        """The files of a run at work."""
        return RunFiles(self.work / run.name)

    def record(self, run: Run) -> dict[str, Any] | None:
        """What run.json says of a run that is finished; None of one that is not."""
        for folder in (self.results, self.work):
            path = folder / run.name / "run.json"
            if path.is_file():
                found: dict[str, Any] = json.loads(path.read_text())
                if found["status"] == "finished":
                    _check_same(path, run.config, TrainConfig.from_dict(found["config"]))
                    return found
        return None

    def history(self, run: Run) -> list[dict[str, Any]]:
        """All events of a finished run."""
        path = self.results / run.name / "history.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()]

    def weights(self, run: Run) -> Path | None:
        """The weights of a finished run, where they are still there."""
        if self.record(run) is None:
            return None
        path = self.files(run).last
        return path if path.is_file() else None

    def finish(self, run: Run) -> None:
        """Keep the numbers of a run that has come to its end."""
        for path in (self.files(run).history, self.files(run).run):
            target = self.results / run.name / path.name
            target.parent.mkdir(parents=True, exist_ok=True)
            write_whole(target, path.read_bytes())

    def restart(self, run: Run) -> None:
        """Clear the way for a run that is finished but whose weights are gone."""
        if self.record(run) is not None and self.weights(run) is None:
            shutil.rmtree(self.work / run.name, ignore_errors=True)


def _check_same(path: Path, wanted: TrainConfig, found: TrainConfig) -> None:
    for name in (f.name for f in fields(TrainConfig)):
        one, two = getattr(wanted, name), getattr(found, name)
        if name not in _UNIMPORTANT and one != two:
            raise ValueError(f"{path}: expected {name} to be {one}, got {two}; move the folder away")
