"""The inputs of a stream: taken one by one, checked, and handed out in groups as rows become free."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchpact.core.call_args import CallArgs, call_args, tensors_in
from torchpact.core.ponder import Ponder
from torchpact.core.refill import Finished
from torchpact.engines.generic.per_example import combined, is_tensor

Limit = Callable[[Any], int | Tensor]
_OF_THE_RUN = ("mode", "thresholds", "max_steps", "exits")
_PLAIN = (int, float, bool, str, type(None))


@dataclass(eq=False)
class Unit:
    """An input, an example or a batch of them, and what has become of it."""

    index: int
    size: int
    call: CallArgs
    limits: list[int]
    batch: bool
    entered: int = 0
    """How many of its examples have been handed out."""
    finished: int = 0
    groups: list[Finished] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    """Which of its examples the groups are, in their order."""
    output: Any = None
    ponder: Ponder | None = None

    @property
    def complete(self) -> bool:
        """Whether all examples are finished."""
        return self.finished == self.size


class Group(NamedTuple):
    """Examples of one or several inputs, as one batch."""

    call: CallArgs
    limits: list[int]
    owners: list[tuple[Any, int]]


class Intake:
    """Takes inputs from an iterator.

    Args:
        source: The iterator.
        batches: Whether inputs are batches.
        limit: Tells the most steps of an input.
        max_steps: The most steps of any.
        per_example: Of a batch, which parts have an entry for each example, if not all tensors do.

    """

    def __init__(
        self,
        source: Iterator[Any],
        batches: bool,
        limit: Limit | None,
        max_steps: int,
        per_example: CallArgs | None = None,
    ) -> None:
        self.source, self.batches, self.limit, self.max_steps = source, batches, limit, max_steps
        self.per_example, self.kind = per_example, None
        self.count, self.ended = 0, False
        self.error: Exception | None = None
        """What ended the inputs, if they did not end by themselves."""
        self.present: Unit | None = None
        """A batch of which some examples have not been handed out."""

    def group(self, most: int) -> tuple[Group | None, list[Unit]]:
        """Take up to so many examples.

        Args:
            most: How many, at least 1.

        Returns:
            The examples, None where there are none now, and the inputs that they are the first examples of.

        """
        pieces: list[CallArgs] = []
        limits: list[int] = []
        owners: list[tuple[Any, int]] = []
        units: list[Unit] = []
        while len(owners) < most:
            unit = self.present
            if unit is None:
                unit = self._next()
                if unit is None:
                    break
                units.append(unit)
            begin, end = unit.entered, min(unit.size, unit.entered + most - len(owners))
            whole = begin == 0 and end == unit.size
            if end > begin or not unit.batch:
                pieces.append(unit.call if whole else self._sliced(unit.call, begin, end))
            limits += unit.limits[begin:end]
            owners += [(unit, row) for row in range(begin, end)]
            unit.entered = end
            self.present = unit if end < unit.size else None
            if self.present is None and unit.size:
                unit.call = CallArgs()  # its tensors may go
        if not owners:
            return None, units
        join: Callable[[list[Tensor]], Tensor] = torch.cat if self.batches else torch.stack
        if self.batches and len(pieces) == 1:
            return Group(pieces[0], limits, owners), units
        found = combined([_plain(piece) for piece in pieces], _plain(self._each(pieces[0])), join)
        return Group(CallArgs(*found), limits, owners), units

    def _next(self) -> Unit | None:
        if self.ended:
            return None
        try:
            item = next(self.source)
            return None if item is None else self._unit(item)
        except StopIteration:
            self.ended = True
        except Exception as error:  # raised once all results before it are out
            self.ended, self.error = True, error
        return None

    def _unit(self, item: Any) -> Unit:
        call = item if isinstance(item, CallArgs) else call_args(item)
        given = [name for name in call.kwargs if name in _OF_THE_RUN]
        if given:
            raise ValueError(f"expected {given[0]} as an argument of the stream, got it with an input")
        size = 1
        if self.batches:
            first = next(tensors_in(call.values), None)
            if first is None or not first.dim():
                raise ValueError("expected batches, tensors whose first dimension is the batch")
            size = len(first)
            others = (
                [] if self.per_example else [x for x in tensors_in(call.values) if x.shape[:1] != (size,)]
            )
            if others:
                raise ValueError(
                    f"expected tensors of {size} examples in a batch, got one of {tuple(others[0].shape)}"
                )
        kind = _kind(_plain(call), int(self.batches))
        if self.kind is None:
            self.kind = kind
        elif kind != self.kind:
            wanted, got = (" ".join(str(each).split()) for each in (self.kind, kind))
            raise ValueError(f"expected all inputs to be like the first, {wanted}, got {got}")
        limits = self._limits(item, size)
        unit = Unit(self.count, size, call, limits, self.batches)
        self.count += 1
        return unit

    def _limits(self, item: Any, size: int) -> list[int]:
        if self.limit is None:
            return [self.max_steps] * size
        found = self.limit(item)
        each = found.flatten().tolist() if isinstance(found, Tensor) else [found] * size
        if len(each) != size or not all(
            isinstance(n, int) and not isinstance(n, bool) and 1 <= n <= self.max_steps for n in each
        ):
            raise ValueError(
                f"expected a limit of 1 to {self.max_steps} steps for each of {size} examples, got {each}"
            )
        return each

    def _each(self, call: CallArgs) -> CallArgs:
        """Return which parts of a call have an entry for each example."""
        return call.map(is_tensor) if self.per_example is None else self.per_example

    def _sliced(self, call: CallArgs, begin: int, end: int) -> CallArgs:
        found = combined([_plain(call)], _plain(self._each(call)), lambda one: one[0][begin:end])
        return CallArgs(*found)


def _plain(call: CallArgs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return call.args, dict(call.kwargs)


def _kind(value: Any, dimension: int) -> Any:
    """Return what inputs have in common: shapes and types of tensors, and all else as it is."""
    if isinstance(value, Tensor):
        return value.shape[dimension:], value.dtype
    if isinstance(value, dict):
        return {key: _kind(part, dimension) for key, part in value.items()}
    if isinstance(value, tuple | list):
        return [_kind(part, dimension) for part in value]
    return value if isinstance(value, _PLAIN) else id(value)
