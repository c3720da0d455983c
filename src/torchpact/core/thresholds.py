"""Thresholds: what halting logits must exceed, by block or head of a network, and those of a single run."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from numbers import Real
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from torchpact.checks import check_number

Bound = float | tuple[float, ...]
"""A logit for all heads of a block, or one for each."""

_RUN: ContextVar[Mapping[object, tuple[float, ...]] | None] = ContextVar("bounds of a run", default=None)
"""The bounds of blocks in a run of a network, which they see wherever they are called from in this thread."""


@dataclass(frozen=True, init=False, eq=False)
class Thresholds:
    """What the *logits* of halting heads must exceed for a halt, in :class:`~torchpact.Thresholded` mode.

    Numbers in here are logits, where ``thresholds=0.3`` of a call is a probability: 0.0 is a half.

    An argument of the run: blocks and deployed networks take it as ``thresholds=``, and
    :class:`~torchpact.use_thresholds` sets it on a network. Logits rather than probabilities, so that the two
    ends are numbers, too: +∞ (:attr:`NEVER`) is exceeded by nothing, −∞ (:attr:`ALWAYS`) by everything, even
    by a logit of −∞.

    Args:
        logits: One number for all blocks; a sequence with an entry for each block, in the order of
            ``named_modules``; or a mapping from names of blocks to entries. An entry is a number,
            ``"never"``, ``"always"``, or a sequence of these, one for each head (of L steps, L − 1).

    Raises:
        TypeError: An entry is neither a number nor one of the two words.
        ValueError: An entry is NaN.

    Example:
        >>> Thresholds([0.0, ["never", 1.5]]).for_block(1, "second", heads=2)
        (inf, 1.5)
        >>> Thresholds.at(0.5).for_block(0, "", heads=3)
        (0.0, 0.0, 0.0)

    """

    NEVER = math.inf
    ALWAYS = -math.inf

    logits: Bound | tuple[Bound, ...] | Mapping[str, Bound]

    def __init__(self, logits: Any) -> None:
        entries: Any
        if isinstance(logits, Mapping):
            entries = MappingProxyType({str(name): _entry(each) for name, each in logits.items()})
        elif isinstance(logits, Sequence) and not isinstance(logits, str):
            entries = tuple(_entry(each) for each in logits)
        else:
            entries = _number(logits)
        object.__setattr__(self, "logits", entries)

    def __reduce__(self) -> tuple[Any, ...]:
        given = self.logits
        return Thresholds, (dict(given) if isinstance(given, Mapping) else given,)

    def __hash__(self) -> int:
        given = self.logits
        return hash(tuple(sorted(given.items())) if isinstance(given, Mapping) else given)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Thresholds) and self.logits == other.logits

    @classmethod
    def at(cls, probability: float) -> "Thresholds":
        """Return what :class:`~torchpact.Thresholded` of this probability compares with, for all blocks.

        Args:
            probability: In (0, 1), as ``Thresholded(threshold=probability)`` takes it.

        Raises:
            ValueError: The number is not in (0, 1).

        """
        if probability in (0, 1):
            way_out = 'Thresholds("always") and Thresholds("never") are the ends'
            raise ValueError(f"expected threshold in (0, 1), got {probability}; {way_out}")
        check_number("threshold", probability, 0, 1, open_low=True, open_high=True)
        return cls(logit_of(probability))

    def for_block(self, index: int, name: str, heads: int) -> tuple[float, ...]:
        """Return the bounds of a block's heads.

        Args:
            index: The number of the block among those of the network, from 0.
            name: Its name in the network.
            heads: How many heads decide: L − 1.

        Raises:
            ValueError: There is no entry for the block, or one with another number of heads.

        """
        entry: Bound
        if isinstance(self.logits, Mapping):
            if name not in self.logits:
                known = ", ".join(map(repr, self.logits)) or "none"
                raise ValueError(f"expected thresholds for the block {name!r}, got some for {known}")
            entry = self.logits[name]
        elif isinstance(self.logits, tuple):
            if index >= len(self.logits):
                raise ValueError(f"expected thresholds for block {index + 1}, got {len(self.logits)}")
            entry = self.logits[index]
        else:
            entry = self.logits
        if not isinstance(entry, tuple):
            return (entry,) * heads
        if len(entry) != heads:
            raise ValueError(f"expected {heads} thresholds for as many heads of {name!r}, got {len(entry)}")
        return entry

    def for_blocks(self, heads: Mapping[str, int]) -> dict[str, tuple[float, ...]]:
        """Return the bounds of all blocks of a network, by name.

        Args:
            heads: How many heads decide in each block, in the order of the network.

        Raises:
            ValueError: The entries are not those of these blocks.

        """
        given = self.logits
        if isinstance(given, tuple) and len(given) != len(heads):
            blocks = f"{len(heads)} block" + ("s" if len(heads) != 1 else "")
            raise ValueError(f"expected thresholds for {blocks}, got {len(given)}")
        unknown = [name for name in given if name not in heads] if isinstance(given, Mapping) else []
        if unknown:
            raise ValueError(
                f"expected thresholds for blocks among {', '.join(map(repr, heads))}; got {unknown[0]!r}"
            )
        return {name: self.for_block(i, name, count) for i, (name, count) in enumerate(heads.items())}


def as_thresholds(value: Any) -> Thresholds:
    """Return thresholds given as such, or as the probability that :class:`~torchpact.Thresholded` takes.

    >>> as_thresholds(0.5)
    Thresholds(logits=0.0)
    """
    if isinstance(value, Thresholds):
        return value
    if isinstance(value, Real) and not isinstance(value, bool):
        return Thresholds.at(float(value))
    raise TypeError(
        f"expected thresholds as a number in (0, 1), or Thresholds of logits, got {type(value).__name__}"
    )


def logit_of(probability: float) -> float:
    """Return σ⁻¹ of a probability.

    >>> logit_of(0.5)
    0.0
    """
    return math.log(probability) - math.log1p(-probability)


def spelled(bounds: Iterable[float]) -> list[float | str]:
    """Return bounds with words for the two ends, which JSON has no numbers for.

    >>> spelled([0.5, float("inf")])
    [0.5, 'never']
    """
    words = {Thresholds.NEVER: "never", Thresholds.ALWAYS: "always"}
    return [words.get(bound, bound) for bound in bounds]


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


def _entry(value: Any) -> Bound:
    if isinstance(value, Iterable) and not isinstance(value, str | Tensor):
        return tuple(_number(each) for each in value)
    return _number(value)


def _number(value: Any) -> float:
    words = {"never": Thresholds.NEVER, "always": Thresholds.ALWAYS}
    if isinstance(value, str) and value in words:
        return words[value]
    if isinstance(value, bool) or not isinstance(value, Real):
        given = " ".join(f"{value!r}".split())
        raise TypeError(f"expected a threshold as a logit, 'never' or 'always', got {given:.80}")
    number = float(value)
    if math.isnan(number):
        raise ValueError("expected a threshold as a logit, got NaN")
    return number
