"""What a block does to its state, be it a tensor or a tuple of them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

State = Tensor | tuple[Tensor, ...]
"""What a block iterates on: a tensor, or a tuple of them, such as the (h, c) of an LSTM."""


def parts(state: State) -> tuple[Tensor, ...]:
    """Return the tensors of a state."""
    return (state,) if isinstance(state, Tensor) else state


def check_state(state: Any) -> None:
    """Refuse what is no state.

    Raises:
        TypeError: It is neither a tensor nor a tuple of tensors.

    """
    if isinstance(state, Tensor):
        return
    if not isinstance(state, tuple) or not state or not all(isinstance(part, Tensor) for part in state):
        of = ", ".join(type(part).__name__ for part in state) if isinstance(state, tuple) else ""
        got = f"a {type(state).__name__}" + (f" of {of or 'nothing'}" if isinstance(state, tuple) else "")
        raise TypeError(f"expected a state, which is a tensor or a tuple of tensors, got {got}")


def shape_of(state: Any) -> Any:
    """Return the shapes of a state, or the type of what is none."""
    if isinstance(state, Tensor):
        return tuple(state.shape)
    return tuple(shape_of(s) for s in state) if isinstance(state, tuple) else type(state).__name__


def per_example(u: Tensor) -> tuple[int, ...]:
    """Return the shape of one position an example."""
    return (*u.shape[:1], *(1 for _ in u.shape[1:]))


def broadcasts(small: Tensor, large: Tensor) -> bool:
    """Whether ``small`` broadcasts to ``large`` dimension by dimension."""
    return small.dim() == large.dim() and all(
        s in (1, n) for s, n in zip(small.shape, large.shape, strict=True)
    )


def versions(state: State) -> list[int] | None:
    """Return counts of in-place changes, by which to notice one; None where torch keeps none."""
    if torch.compiler.is_compiling() or any(part.is_inference() for part in parts(state)):
        return None
    return [part._version for part in parts(state)]


def map_state(function: Callable[..., Tensor], *states: Any) -> State:
    """Apply a function to corresponding tensors; named tuples stay what they are."""
    first = states[0]
    if isinstance(first, Tensor):
        return function(*states)
    results = [function(*each) for each in zip(*states, strict=True)]
    return first._make(results) if hasattr(first, "_make") else tuple(results)


def where(mask: Tensor, yes: State, no: State) -> State:
    """Pick from one of two states at each position."""
    return map_state(lambda a, b: torch.where(mask, a, b), yes, no)


def rows_of(state: State, index: Tensor) -> State:
    """Return some rows of a state."""
    return map_state(lambda part: part.index_select(0, index), state)


def accumulate(output: State | None, u: State, weight: Tensor, hard: bool) -> State:
    """Add weight·u to the output; with one-hot weights pick u where the weight is."""
    if hard:
        return u if output is None else where(weight > 0, u, output)
    if output is None:
        return map_state(lambda a: weight * a, u)
    return map_state(lambda a, total: total + weight * a, u, output)


def like(output: State, u: State) -> State:
    """Return the output in the state's precision; the sum was taken in that of the weights."""
    return map_state(lambda a, b: b.to(a.dtype), u, output)
