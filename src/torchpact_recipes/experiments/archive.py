"""Where the runs of a reproduction are kept: their numbers for good, their weights while they are needed."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torchpact.checks import MALFORMED, one_line
from torchpact.files import write_whole
from torchpact_recipes import zoo
from torchpact_recipes.experiments.runs import AnyRun, RunConfig
from torchpact_recipes.training.run_files import RunFiles

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

    def beside(self, scale: str) -> "Archive":
        """That of another scale, which lies beside this one."""
        return Archive(self.results.parent / scale, self.work.parent / scale)

    def files(self, run: AnyRun) -> RunFiles:
        """The files of a run at work."""
        return RunFiles(self.work / run.name)

    def record(self, run: AnyRun) -> dict[str, Any] | None:
        """What run.json says of a run that is finished; None of one that is not."""
        return _finished(self.results, run) or _finished(self.work, run)

    def history(self, run: AnyRun) -> list[dict[str, Any]]:
        """All events of a finished run."""
        folder = self.results if _finished(self.results, run) else self.work
        path = folder / run.name / "history.jsonl"
        try:
            return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        except MALFORMED as error:
            raise ValueError(f"{path}: expected JSON in every line, got {one_line(error)}") from None

    def everything(self) -> dict[str, dict[str, Any]]:
        """What run.json says of all finished runs on images, whatever experiment they belong to, by name."""
        found = {path.parent.name: _read(path) for path in sorted(self.results.glob("*/run.json"))}
        return {
            name: record
            for name, record in found.items()
            if record["status"] == "finished" and "task" not in record["config"]
        }

    def weights(self, run: AnyRun) -> Path | None:
        """The weights of a finished run, where they are still there."""
        path = self.files(run).last
        # not by the results: the run may be at work again, and its newest checkpoint not the last
        return path if _finished(self.work, run) and path.is_file() else None

    def pretrained(self, run: AnyRun) -> Path | None:
        """The same, or the weights that the zoo has of a run with this configuration."""
        found = self.weights(run)
        if found is not None:
            return found
        configs = ((entry.path, type(run.config).from_dict(entry.config)) for entry in zoo.entries())
        return next((path for path, config in configs if not _differs(run, config)), None)

    def begun(self, run: AnyRun) -> Any:
        """The configuration of a run at work, which is to go on as it was begun; None if it is not."""
        path = self.files(run).run
        return _config(path, run) if path.is_file() else None

    def finish(self, run: AnyRun) -> None:
        """Keep the numbers of a run that has come to its end."""
        for path in (self.files(run).history, self.files(run).run):
            target = self.results / run.name / path.name
            target.parent.mkdir(parents=True, exist_ok=True)
            write_whole(target, path.read_bytes())

    def recover(self, runs: Iterable[AnyRun]) -> None:
        """Keep the numbers of runs that came to their end in a sweep that did not."""
        for run in runs:
            if not _finished(self.results, run) and _finished(self.work, run):
                self.finish(run)


def _finished(folder: Path, run: AnyRun) -> dict[str, Any] | None:
    path = folder / run.name / "run.json"
    if not path.is_file():
        return None
    found = _read(path)
    if found["status"] != "finished":
        return None
    _config(path, run)
    return found


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except MALFORMED as error:
        raise ValueError(f"{path}: expected JSON, got {one_line(error)}") from None
    if not (isinstance(found, dict) and isinstance(found.get("config"), dict) and "status" in found):
        raise ValueError(f"{path}: expected the record of a run, got another")
    return found


def _config(path: Path, run: AnyRun) -> RunConfig:
    """The configuration at ``path``, after seeing that it is that of ``run``."""
    try:
        found = type(run.config).from_dict(_read(path)["config"])
    except MALFORMED as error:
        raise ValueError(f"{path}: {one_line(error)}") from None
    problem = _differs(run, found)
    if problem:
        raise ValueError(f"{path}: {problem}; move the folder away")
    return found


def _differs(run: AnyRun, config: RunConfig) -> str:
    """In what a configuration is not that of a run; nothing if in nothing that matters."""
    given = config.to_dict()
    for name, one in run.config.to_dict().items():
        if name not in _UNIMPORTANT and one != given[name]:
            return f"expected {name} to be {one}, got {given[name]}"
    return ""
