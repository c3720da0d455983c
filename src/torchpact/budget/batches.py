"""Batches as users hand them in."""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor


def listed(batches: Iterable[Any]) -> list[Any]:
    """Return batches as a list.

    Args:
        batches: What a network is called with, each a mapping by name, a tuple by position, or the only
            argument.

    Raises:
        TypeError: It is a single batch, whose parts would be taken for batches, or a string.

    Example:
        >>> listed({"x": 1})
        Traceback (most recent call last):
        TypeError: expected an iterable of batches, got one batch, a dict: pass [batch]

    """
    if isinstance(batches, Mapping | Tensor):
        kind = type(batches).__name__
        raise TypeError(f"expected an iterable of batches, got one batch, a {kind}: pass [batch]")
    if isinstance(batches, str):
        raise TypeError(f"expected an iterable of batches, got the string {batches[:40]!r}")
    return [*batches]
