"""The adaptive parts of somebody's network, and what they were called with in a run."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchpact.core.block import AdaptiveBlock
from torchpact.core.modes import Mode
from torchpact.core.ponder import Ponder
from torchpact.core.state import parts
from torchpact.nn.rnn import AdaptiveRNN

Inputs = tuple[Any, ...]
"""What a block, or a step, is called with."""
Part = AdaptiveBlock | AdaptiveRNN


class Never(Mode):
    """Nobody halts, whatever heads say: every step runs, and every head is asked."""

    hard = True

    def halt(self, remaining: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Leave all that remains."""
        return torch.zeros_like(remaining), remaining


class Given(NamedTuple):
    """What a network is called with."""

    inputs: Inputs
    named: dict[str, Any]

    @property
    def values(self) -> list[Any]:
        """All of it, without names."""
        return [*self.inputs, *self.named.values()]

    def to(self, net: Callable[..., Any]) -> Any:
        """Call it."""
        return net(*self.inputs, **self.named)


class Call(NamedTuple):
    """A block, or a recurrent layer, was called."""

    inputs: Inputs
    options: Mapping[str, Any]
    """Keywords that were not None."""
    output: Any
    ponder: Ponder


def adaptive_parts(net: nn.Module) -> dict[str, Part]:
    """Return the adaptive blocks and recurrent layers of a network, by name.

    >>> [*adaptive_parts(nn.Sequential(nn.Tanh(), tp.AdaptiveRNN(nn.GRUCell(9, 16), max_steps=3)))]
    ['1']
    """
    found = {name: module for name, module in net.named_modules() if isinstance(module, Part)}
    own = [module.block for module in found.values() if isinstance(module, AdaptiveRNN)]
    return {name: module for name, module in found.items() if not any(module is block for block in own)}


def title(name: str) -> str:
    """Return what a block of this name is called in a sentence."""
    return f"the block {name!r}" if name else "the block"


def arguments(inputs: Any, kwargs: Mapping[str, Any] | None = None) -> Given:
    """Return what a network is called with: a tuple is several arguments, all else a single one.

    >>> arguments(torch.ones(1))
    Given(inputs=(tensor([1.]),), named={})
    """
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise TypeError(f"expected kwargs to be a dictionary, got {type(kwargs).__name__}")
    return Given(inputs if type(inputs) is tuple else (inputs,), dict(kwargs or {}))


def leading(given: Given) -> Tensor:
    """Return the first tensor, which tells the batch and the device; it may lie within tuples and the like.

    >>> leading(arguments(({"x": torch.ones(2)}, torch.zeros(3))))
    tensor([1., 1.])
    """
    first = next(tensors_in(given), None)
    if first is None:
        kinds = ", ".join(type(x).__name__ for x in given.values) or "nothing"
        raise TypeError(f"expected tensors whose first dimension is the batch, got {kinds}")
    if not first.dim():
        raise TypeError("expected tensors whose first dimension is the batch, got one without dimensions")
    return first


def batch_of(net: nn.Module, given: Given) -> int:
    """Return how many examples there are."""
    return leading(given).size(1 if isinstance(net, AdaptiveRNN) and not net.batch_first else 0)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of a value, be they in containers."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list | dict):
        for part in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(part)


def one_for_none(inputs: Any) -> Any:
    """Return an example of zeros in the place of none at all.

    >>> one_for_none((torch.zeros(0, 2), [torch.zeros(0)], "as it is"))
    (tensor([[0., 0.]]), [tensor([0.])], 'as it is')
    """
    if isinstance(inputs, Tensor) and inputs.dim() and not len(inputs):
        return inputs.new_zeros(1, *inputs.shape[1:])
    if isinstance(inputs, dict):
        return {key: one_for_none(value) for key, value in inputs.items()}
    if isinstance(inputs, tuple | list):
        made = [one_for_none(value) for value in inputs]
        return inputs._make(made) if hasattr(inputs, "_make") else type(inputs)(made)
    return inputs


@contextmanager
def recorded(found: Mapping[str, Part], keep: bool = False) -> Iterator[dict[str, list[Call]]]:
    """Record the calls of blocks and layers within; of outputs only the shapes, unless all is to be kept."""
    calls: dict[str, list[Call]] = {name: [] for name in found}
    handles = []
    for name, part in found.items():

        def note(
            part: nn.Module, inputs: Inputs, options: dict[str, Any], output: Any, name: str = name
        ) -> None:
            made = output if keep else torch.empty_like(parts(output[0])[0], device="meta")
            told = {key: value for key, value in options.items() if value is not None}
            calls[name].append(Call(inputs if keep else (), told, made, output[-1]))

        handles.append(part.register_forward_hook(note, with_kwargs=True))
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()
