"""What a network, a block or a step is called with."""

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

_NOTHING: Mapping[str, Any] = MappingProxyType({})


class CallArgs(NamedTuple):
    """The arguments of a call.

    >>> CallArgs((2,), {"exp": 3}).call(pow)
    8
    """

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = _NOTHING

    @property
    def values(self) -> list[Any]:
        """All of them, without names."""
        return [*self.args, *self.kwargs.values()]

    def call(self, function: Callable[..., Any]) -> Any:
        """Call a function with them."""
        return function(*self.args, **self.kwargs)

    def map(self, function: Callable[[Any], Any]) -> "CallArgs":
        """Return them with each changed by a function."""
        return CallArgs(
            tuple(function(x) for x in self.args), {name: function(x) for name, x in self.kwargs.items()}
        )


def call_args(inputs: Any, kwargs: Mapping[str, Any] | None = None) -> CallArgs:
    """Return the arguments that inputs stand for: a mapping by name, a tuple by position, else a single one.

    Args:
        inputs: A mapping of keyword arguments, a tuple of positional ones, or the only argument.
        kwargs: Keyword arguments besides.

    Returns:
        The arguments.

    Raises:
        TypeError: ``kwargs`` is no mapping, or names an argument a second time.

    Example:
        >>> call_args({"x": 1}), call_args((1, 2)).args, call_args(3).args
        (CallArgs(args=(), kwargs={'x': 1}), (1, 2), (3,))

    """
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise TypeError(f"expected kwargs to be a dictionary, got {type(kwargs).__name__}")
    named = dict(kwargs or {})
    if isinstance(inputs, Mapping):
        twice = [name for name in inputs if name in named]
        if twice:
            raise TypeError(f"expected each argument once, got {twice[0]!r} in the example and in kwargs")
        return CallArgs((), {**inputs, **named})
    return CallArgs(inputs if type(inputs) is tuple else (inputs,), named)


def first_tensor(call: CallArgs) -> Tensor:
    """Return the first tensor, which tells the batch and the device; it may lie within tuples and the like.

    >>> first_tensor(call_args(({"x": torch.ones(2)}, torch.zeros(3))))
    tensor([1., 1.])
    """
    first = next(tensors_in(call.values), None)
    if first is None:
        kinds = ", ".join(type(x).__name__ for x in call.values) or "nothing"
        raise TypeError(f"expected tensors whose first dimension is the batch, got {kinds}")
    if not first.dim():
        raise TypeError("expected tensors whose first dimension is the batch, got one without dimensions")
    return first


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of a value, be they in containers.

    >>> len([*tensors_in(([torch.ones(1)], {"a": torch.ones(1)}, 3))])
    2
    """
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list | Mapping):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_in(part)


def with_one_example(value: Any) -> Any:
    """Return an example of zeros in the place of none at all.

    >>> with_one_example((torch.zeros(0, 2), [torch.zeros(0)], "as it is"))
    (tensor([[0., 0.]]), [tensor([0.])], 'as it is')
    """
    if isinstance(value, Tensor) and value.dim() and not len(value):
        return value.new_zeros(1, *value.shape[1:])
    if isinstance(value, dict):
        return {key: with_one_example(part) for key, part in value.items()}
    if isinstance(value, tuple | list):
        made = [with_one_example(part) for part in value]
        return value._make(made) if hasattr(value, "_make") else type(value)(made)
    return value


def channels_last(x: Any) -> Any:
    """Return maps with their channels last in memory, and all else as it is."""
    is_map = isinstance(x, Tensor) and x.dim() == 4
    return x.contiguous(memory_format=torch.channels_last) if is_map else x
