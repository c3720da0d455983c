"""Times of work on a GPU, by its own clock."""

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from torchpact_recipes.training import BaseLearner
from torchpact_recipes.training.algorithms import fastest_algorithms

SKIPPED, LEAST, MOST = 3, 7, 33
"""Of so many times, at least and at most, the first few do not count."""


@torch.no_grad()
def microseconds(work: Callable[[], object], *, times: int = 1, quick: bool = False) -> float:
    """The median time of the work, of which a CUDA graph holds so many ``times``.

    cuDNN takes its fastest algorithms. What is ``quick`` is replayed for a hundredth of a second only.
    """
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), fastest_algorithms():
        for _ in range(1 if quick else 3):
            work()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with _bare_capture(graph) if quick else torch.cuda.graph(graph, stream=stream):
            for _ in range(times):
                work()
        return called(graph.replay, seconds=0.01 if quick else math.inf) / times


def called(work: Callable[[], object], *, seconds: float = math.inf) -> float:
    """The median time, in microseconds, of work that is started by the host; for about ``seconds``."""
    taken: list[float] = []
    while len(taken) < LEAST or (len(taken) < MOST and sum(taken) < 1e6 * seconds):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        end.record()
        end.synchronize()
        taken.append(start.elapsed_time(end) * 1e3)
    return statistics.median(taken[SKIPPED:])


def iterations_per_second(learners: Sequence[BaseLearner], iterations: int, warm_up: int) -> float:
    """How often all of them advance in a second, in turns."""
    for _ in range(warm_up):
        for learner in learners:
            learner.advance()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(iterations):
        for learner in learners:
            learner.advance()
    torch.cuda.synchronize()
    return iterations / (time.perf_counter() - start)


@contextmanager
def _bare_capture(graph: torch.cuda.CUDAGraph) -> Iterator[None]:
    """As torch.cuda.graph, which also empties caches: that takes longer than all the rest."""
    graph.capture_begin()
    try:
        yield
    finally:
        graph.capture_end()
