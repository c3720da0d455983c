"""Aliases: other tensors with the same memory, which may carry other attributes."""

from typing import Any

import torch
from torch import Tensor

from torchpact.checks import readable


class _Alias(torch.autograd.Function):
    """The identity, as another tensor with the same memory that is no view: FSDP2 warns of views."""

    generate_vmap_rule = True

    @staticmethod
    def forward(u: Tensor) -> Tensor:
        return u.detach()

    @staticmethod
    def setup_context(_ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> Tensor:
        return gradient

    @staticmethod
    def jvp(_ctx: Any, tangent: Tensor) -> Tensor:
        return tangent.view_as(tangent)


def renamed(u: Tensor) -> Tensor:
    """Return another tensor with the same memory and gradient, to carry a loop.

    The graph of the loop saves the state itself: if that carried the loop, neither would ever be freed
    without a backward pass.
    """
    if torch.compiler.is_compiling() or not u.requires_grad:
        return u.view_as(u)
    alias: Tensor = _Alias.apply(u)
    return alias


def is_alias(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are the same numbers in memory.

    >>> u = torch.zeros(2, 3)
    >>> is_alias(u.view_as(u), u), is_alias(u.clone(), u), is_alias(u[:1], u)
    (True, False, False)
    """
    if one.shape != other.shape or one.dtype != other.dtype or not (readable(one) and readable(other)):
        return False
    return one.stride() == other.stride() and one.data_ptr() == other.data_ptr()
