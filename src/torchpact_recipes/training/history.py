"""The history of a run: one event a line, written as training goes on."""

import json
import math
from pathlib import Path

from torchpact.checks import MALFORMED
from torchpact.files import write_whole
from torchpact_recipes.training.run_files import Event


class History:
    """The file of that name; each line of it is JSON by itself."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def clear(self) -> None:
        """Begin anew."""
        write_whole(self.path, b"")

    def append(self, event: Event) -> None:
        r"""Add an event; raises ValueError, and writes nothing, if it holds NaN or infinity, as no JSON may.

        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     history = History(Path(folder) / "history.jsonl")
        ...     history.append({"kind": "train", "iteration": 1})
        ...     history.append({"kind": "train", "iteration": 2})
        ...     history.cut(1)
        ...     history.path.read_text()
        '{"kind": "train", "iteration": 1}\n'
        """
        line = json.dumps(event, allow_nan=False) + "\n"
        try:
            with self.path.open("a") as file:
                file.write(line)
        except OSError as error:
            # A full disk does not say by itself which file it was
            raise OSError(error.errno, error.strerror, str(self.path)) from error

    def cut(self, iteration: int) -> None:
        """Forget what was logged after an iteration: it will be logged again."""
        text = self.path.read_text(encoding="utf-8", errors="replace") if self.path.exists() else ""
        lines = text.splitlines()
        kept = [line for line in lines if _iteration(line) <= iteration]
        write_whole(self.path, "".join(f"{line}\n" for line in kept).encode())


def _iteration(line: str) -> float:
    """The iteration of an event; past all of them where a line was cut short."""
    try:
        return float(json.loads(line)["iteration"])
    except MALFORMED:
        return math.inf
