"""Calling f, with a clear word when it does not keep to its side."""

from collections.abc import Callable

from torch import Tensor


def evaluate(f: Callable[[Tensor], Tensor], z: Tensor) -> Tensor:
    """Return f(z), checked to be one value a sample."""
    values = f(z)
    if not isinstance(values, Tensor) or values.shape != z.shape[:1]:
        given = f"shape {tuple(values.shape)}" if isinstance(values, Tensor) else repr(values)
        raise ValueError(f"expected f to give {len(z)} values for {len(z)} samples, got {given}")
    return values
