"""The files of a run: run.json, the history with an event a line, and checkpoints, all in one folder."""

import hashlib
import json
import math
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

import torchpact
from torchpact.checks import MALFORMED
from torchpact.files import remove_leftovers, write_whole
from torchpact.plugins import CommandError
from torchpact_recipes.training.checkpoint import UNREADABLE

Event = dict[str, Any]
"""A line of the history: kind "train" or "validate", the iteration, and what was measured."""


class TrainingError(CommandError, RuntimeError):
    """Training that cannot go on; the message is one line and says what is left."""


@dataclass
class RunFiles:
    """The files of a run, all in one folder."""

    folder: Path

    def check(self) -> None:
        """Refuse a folder that is not that of a run."""
        if not self.run.is_file():
            got = "one without run.json" if self.folder.is_dir() else "no folder"
            raise ValueError(f"{self.folder}: expected the folder of a run, got {got}")

    @property
    def run(self) -> Path:
        """Configuration, versions and results."""
        return self.folder / "run.json"

    @property
    def history(self) -> Path:
        """One event a line."""
        return self.folder / "history.jsonl"

    @property
    def last(self) -> Path:
        """The newest checkpoint."""
        return self.folder / "last.safetensors"

    @property
    def previous(self) -> Path:
        """The one before it."""
        return self.folder / "previous.safetensors"

    @property
    def refused(self) -> Path:
        """One that was the newest and could not be used when the run was resumed."""
        return self.folder / "refused.safetensors"

    @property
    def best(self) -> Path:
        """The one that did best in validation."""
        return self.folder / "best.safetensors"

    @property
    def tensorboard(self) -> Path:
        """What TensorBoard shows, where that was asked for."""
        return self.folder / "tensorboard"

    def record(self) -> dict[str, Any]:
        """Read run.json; nothing where there is none that can be read."""
        try:
            found = json.loads(self.run.read_text(encoding="utf-8"))
        except UNREADABLE:
            return {}
        return found if isinstance(found, dict) else {}

    def write_record(self, record: dict[str, Any]) -> None:
        """Write run.json."""
        write_whole(self.run, (json.dumps(record, indent=2) + "\n").encode())

    def make_folder(self) -> None:
        """Make the folder, or remove from it what writers that were killed left behind."""
        self.folder.mkdir(parents=True, exist_ok=True)
        remove_leftovers(self.folder)

    def append(self, event: Event) -> None:
        r"""Add an event to the history; raises ValueError, and writes nothing, if it holds NaN or infinity.

        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     files = RunFiles(Path(folder))
        ...     files.append({"kind": "train", "iteration": 1})
        ...     files.append({"kind": "train", "iteration": 2})
        ...     files.cut_history(1)
        ...     files.history.read_text()
        '{"kind": "train", "iteration": 1}\n'
        """
        line = json.dumps(event, allow_nan=False) + "\n"
        try:
            with self.history.open("a") as file:
                file.write(line)
        except OSError as error:
            # A full disk does not say by itself which file it was
            raise OSError(error.errno, error.strerror, str(self.history)) from error

    def cut_history(self, iteration: int) -> None:
        """Remove what was logged after an iteration: it will be logged again."""
        text = self.history.read_text(encoding="utf-8", errors="replace") if self.history.exists() else ""
        kept = [line for line in text.splitlines() if _iteration(line) <= iteration]
        write_whole(self.history, "".join(f"{line}\n" for line in kept).encode())


def _iteration(line: str) -> float:
    """The iteration of an event; past all of them where a line was cut short."""
    try:
        return float(json.loads(line)["iteration"])
    except MALFORMED:
        return math.inf


def versions(device: torch.device) -> dict[str, str]:
    """What a run is made with."""
    processor = platform.processor() or platform.machine()
    return {
        "torchpact": torchpact.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else processor,
    }


_described: "WeakKeyDictionary[Any, dict[str, Any]]" = WeakKeyDictionary()


def describe(data: Any, kind: str, *tensors: Tensor) -> dict[str, Any]:
    """How much of a kind a data set has, and a digest of its tensors, the same on any device.

    All of CIFAR-10 takes a tenth of a second, and that once for all runs on it.

    >>> from torchpact_recipes.data import Images
    >>> data = Images(torch.zeros(2, 3, 32, 32, dtype=torch.uint8), torch.tensor([1, 0]))
    >>> describe(data, "images", data.images, data.labels)
    {'images': 2, 'digest': '9c6a4f162e106bcb'}
    """
    if data not in _described:
        sha = hashlib.sha256(repr(tuple(tensors[0].shape)).encode())
        for tensor in tensors:
            sha.update(tensor.cpu().contiguous().numpy().data)
        _described[data] = {kind: len(tensors[0]), "digest": sha.hexdigest()[:16]}
    return _described[data]
