"""Thresholds of one run of a network, seen by its blocks wherever they are called from, in this thread."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

import torch

_RUN: ContextVar[Mapping[object, tuple[float, ...]] | None] = ContextVar("bounds of a run", default=None)


@contextmanager
def run_bounds(bounds: Mapping[object, tuple[float, ...]]) -> Iterator[None]:
    """Use these bounds, by block, in the calls that this thread makes within.

    Args:
        bounds: What the logits of each block's heads must exceed; other blocks keep their own.

    """
    token = _RUN.set(bounds)
    try:
        yield
    finally:
        _RUN.reset(token)


def run_bounds_of(block: object) -> tuple[float, ...] | None:
    """Return the bounds of this run for a block, or None where it has none."""
    if torch.compiler.is_compiling():  # which does not trace context variables
        return None
    bounds = _RUN.get()
    return None if bounds is None else bounds.get(block)
