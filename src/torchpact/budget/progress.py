"""Progress of long calls: a callback, or lines on a terminal."""

import sys
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

_SECONDS = 2.0
"""How often a line is written."""


class Progress(NamedTuple):
    """How far a long call is.

    >>> print(Progress("exits", 20, 800, {"loss": 0.25}))
    exits 20/800  loss 0.25
    """

    stage: str
    done: int
    total: int
    values: Mapping[str, float]
    """What was measured last, by name."""

    def __str__(self) -> str:
        shown = "".join(f"  {name} {value:.4g}" for name, value in self.values.items())
        return f"{self.stage} {self.done}/{self.total}{shown}"


Report = Callable[[Progress], None]


def reporter(progress: Report | bool | None) -> Report:
    """Return what is told of progress.

    Args:
        progress: A function that takes a :class:`Progress`; True writes lines to standard error, False is
            quiet, and None writes lines if standard error is a terminal.

    """
    if callable(progress):
        return progress
    if progress is False or (progress is None and not sys.stderr.isatty()):
        return lambda _: None
    return _Lines()


class _Lines:
    """Writes a line every two seconds, and at the end of each stage."""

    def __init__(self) -> None:
        self.latest = 0.0

    def __call__(self, progress: Progress) -> None:
        now = time.monotonic()
        if progress.done >= progress.total or now - self.latest > _SECONDS:
            self.latest = now
            print(progress, file=sys.stderr, flush=True)
