"""Times of alternatives, taken in turns, so that whatever else the machine does hits all of them alike."""

import math
import os
import random
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

PATIENCE = 5.0
"""For how many seconds engines are compared where calls take seconds each; more would tell little more."""


def interleaved(
    candidates: Mapping[str, Callable[[], object]],
    *,
    seconds: float = 0.5,
    least: int = 3,
    most: int = 200,
    limit: float = math.inf,
    first: Mapping[str, float] | None = None,
) -> dict[str, float]:
    """Return the median seconds of each candidate, measured round by round for about ``seconds`` in all.

    There are at least ``least`` rounds, but none is begun after ``limit`` seconds. A first call of each
    candidate does not count, unless it took more than half of the limit: then it is not repeated. ``first``
    has the seconds of the first calls, where they have been made already.

    >>> times = interleaved({"a": lambda: None, "b": lambda: time.sleep(0.01)}, seconds=0.05)
    >>> times["a"] < times["b"]
    True
    """
    times = in_turns(candidates, seconds=seconds, least=least, most=most, limit=limit, first=first)
    return {name: statistics.median(each) for name, each in times.items()}


def in_turns(
    candidates: Mapping[str, Callable[[], object]],
    *,
    seconds: float,
    least: int,
    most: int,
    limit: float = math.inf,
    first: Mapping[str, float] | None = None,
) -> dict[str, list[float]]:
    """Return all times that :func:`interleaved` takes the medians of."""
    # what is done once is no part of the time of a call
    first = {name: timed(function) for name, function in candidates.items()} if first is None else first
    taken: dict[str, list[float]] = {name: [] for name in candidates}
    taken |= {name: [time] for name, time in first.items() if time > limit / 2}
    repeated = [name for name in candidates if not taken[name]]
    order = random.Random(0)
    begin = time.perf_counter()
    for done in range(most):
        elapsed = time.perf_counter() - begin
        if (done >= least and elapsed > seconds) or (done and elapsed > limit):
            break
        for name in order.sample(repeated, len(repeated)):  # what ran before matters to caches
            taken[name].append(timed(candidates[name]))
    return taken


def timed(function: Callable[[], object]) -> float:
    """Return the seconds that a call of a function takes."""
    start = _now()
    function()
    return _now() - start


def _now() -> float:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()  # the current device, which candidates run on
    return time.perf_counter()


class CpuContention:
    """How much CPU time other programs use from now on, where the system tells."""

    def __init__(self) -> None:
        self.start = self._now()

    def is_high(self) -> bool:
        """Whether they have used more than half a core, and left less than one idle."""
        if self.start is None or (now := self._now()) is None:
            return False
        wall, used, idle = (after - before for after, before in zip(now, self.start, strict=True))
        return used > 0.5 * wall and idle < wall

    @staticmethod
    def _now() -> tuple[float, float, float] | None:
        """Seconds: of the clock; of all cores, used by others; of all cores, idle."""
        try:
            lines = Path("/proc/stat").read_text().splitlines()
            tick = os.sysconf("SC_CLK_TCK")
            # user, nice, system, idle, iowait, irq, softirq, steal
            spent = [int(number) / tick for number in lines[0].split()[1:9]]
        except (OSError, ValueError, IndexError, AttributeError):
            return None
        idle = spent[3] + spent[4]
        return time.monotonic(), sum(spent) - idle - sum(os.times()[:4]), idle
