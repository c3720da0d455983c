"""What steps of one's own cost, where that is not their share of the cost of all positions."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

from torch import Tensor, nn

from torchpact.core.callables import unwrapped

Price = Callable[[Any, Tensor, Sequence[int]], Tensor]
"""Which positions of a state of some shape run the step → the FLOPs of every example."""
F = TypeVar("F", bound=Price)
_PRICES: dict[Any, Price] = {}


def register_price(kind: Any) -> Callable[[F], F]:
    """Register what steps of a class cost; used as a decorator of ``function(step, active, shape)``.

    Without, a step is charged its FLOPs on the whole state, times the share of an example's positions that
    run it. Register a price where that is wrong: attention needs keys and values of halted tokens, too. The
    function is given the step, booleans ``active`` of the shape of the decisions, and the shape of the state;
    it returns the FLOPs of every example, integers of shape (batch,).

    Args:
        kind: A class of modules, or a function that is a step itself. It holds for exactly this class: what a
            subclass changes may change its price.

    Returns:
        The decorator, which returns the function as it is.

    Example:
        >>> class Mean(nn.Module):
        ...     gated = True
        ...     def forward(self, u, gate):
        ...         return u + gate * (u.mean(1, keepdim=True) - u)
        >>> @register_price(Mean)
        ... def mean_flops(step, active, shape):
        ...     return active.any(1).flatten() * shape[1] * shape[2]
        >>> active = torch.tensor([[True, False], [False, False]]).unsqueeze(2)
        >>> price_of(Mean())(active, (2, 2, 8))
        tensor([16,  0])

    """

    def register(function: F) -> F:
        _PRICES[kind] = function
        return function

    return register


def price_of(step: nn.Module) -> Callable[[Tensor, Sequence[int]], Tensor] | None:
    """Return the function that prices a step by its active positions and the shape of the state, if any.

    Args:
        step: The step; one with a ``forward`` of its own is not what its class is.

    Returns:
        A function ``(active, shape) -> Tensor``, or None.

    """
    held = unwrapped(step)
    function = _PRICES.get(type(held))
    if isinstance(held, Hashable) and not isinstance(held, nn.Module):
        function = _PRICES.get(held, function)
    if function is None or "forward" in vars(step):
        return None

    def price(active: Tensor, shape: Sequence[int]) -> Tensor:
        return function(held, active, shape)

    return price
