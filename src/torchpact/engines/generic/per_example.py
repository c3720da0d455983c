"""Values with an entry for each example, or for each position: which they are, and some of their rows."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torchpact.core import state
from torchpact.core.state import State


def example_shape(u: State, positions: bool) -> torch.Size:
    """Return the dimensions of examples: the batch or, where positions halt, all but the features."""
    return state.parts(u)[0].shape[: -1 if positions else 1]


def is_per_example(value: Any, shape: torch.Size) -> Any:
    """Return whether a value begins with the dimensions of the examples; of containers, for every part."""
    if isinstance(value, dict):
        return {key: is_per_example(part, shape) for key, part in value.items()}
    if isinstance(value, tuple | list):
        found = [is_per_example(part, shape) for part in value]
        return found if isinstance(value, list) else tuple(found)
    ours = isinstance(value, Tensor) and not isinstance(value, nn.Parameter)  # those are for all
    return ours and value.shape[: len(shape)] == shape


def is_tensor(value: Any) -> Any:
    """Return whether a value is a tensor; of containers, for every part."""
    if isinstance(value, dict):
        return {key: is_tensor(part) for key, part in value.items()}
    if isinstance(value, tuple | list):
        found = [is_tensor(part) for part in value]
        return found if isinstance(value, list) else tuple(found)
    return isinstance(value, Tensor)


def map_per_example(value: Any, per_example: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Return what a function makes of the parts of a value that have an entry for each example."""
    if isinstance(per_example, dict):
        return {key: map_per_example(part, per_example[key], function) for key, part in value.items()}
    if isinstance(per_example, tuple | list):
        pairs = zip(value, per_example, strict=True)
        parts = [map_per_example(part, own, function) for part, own in pairs]
        return value._make(parts) if hasattr(value, "_make") else type(value)(parts)
    return function(value) if per_example else value


def rows(value: Any, per_example: Any, keep: Tensor) -> Any:
    """Return the entries to keep, of what has one for each example."""
    return map_per_example(value, per_example, lambda part: part.index_select(0, keep))


def combined(values: Sequence[Any], per_example: Any, function: Callable[[list[Tensor]], Tensor]) -> Any:
    """Return several values as one: what examples have by a function of all, what they share of the first."""
    first = values[0]
    if isinstance(per_example, dict):
        return {key: combined([v[key] for v in values], own, function) for key, own in per_example.items()}
    if isinstance(per_example, tuple | list):
        parts = [combined(each, own, function) for *each, own in zip(*values, per_example, strict=True)]
        return first._make(parts) if hasattr(first, "_make") else type(first)(parts)
    return function([*values]) if per_example else first


def flat(value: Any, per_example: Any, dimensions: int) -> Any:
    """Return what has an entry for each position with these in one dimension."""
    return map_per_example(value, per_example, lambda part: part.flatten(0, dimensions - 1))


@dataclass(frozen=True)
class _Shared:
    """A tensor of this shape, which all examples share."""

    shape: torch.Size


def layout_of(value: Any, shape: torch.Size) -> Any:
    """Return what a value is: an example's (True), shared, or of some type; of containers, every part."""
    if isinstance(value, dict):
        return {key: layout_of(part, shape) for key, part in value.items()}
    if isinstance(value, tuple | list):
        return [layout_of(part, shape) for part in value]
    if not isinstance(value, Tensor):
        return type(value)
    return True if is_per_example(value, shape) else _Shared(value.shape)


def has_layout(layout: Any, value: Any, shape: torch.Size) -> bool:
    """Whether a value is of a layout, with any number of examples."""
    if isinstance(layout, dict):
        fits = isinstance(value, dict) and value.keys() == layout.keys()
        return fits and all(has_layout(part, value[key], shape) for key, part in layout.items())
    if isinstance(layout, list):
        fits = isinstance(value, tuple | list) and len(value) == len(layout)
        return fits and all(has_layout(*pair, shape) for pair in zip(layout, value, strict=True))
    if layout is True:
        return isinstance(value, Tensor) and value.shape[: len(shape)] == shape
    if isinstance(layout, _Shared):
        return isinstance(value, Tensor) and value.shape == layout.shape
    return type(value) is layout
