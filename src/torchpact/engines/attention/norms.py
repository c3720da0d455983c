"""Norms of rows by one kernel of torch each, which those of pretrained networks often are not."""

import copy
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

ROWS = 16
"""The rows of the trial."""


class FusedNorm(NamedTuple):
    """A layer norm, or a root-mean-square norm (RMSNorm), of rows.

    >>> norm = FusedNorm("rms", torch.tensor([1.0, 2.0]), None, 0.0)
    >>> norm(torch.tensor([[3.0, 3.0]]))
    tensor([[1., 2.]])
    """

    kind: str
    """"layer" or "rms"."""
    weight: Tensor | None
    bias: Tensor | None
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        """Return normalised rows."""
        return self.scaled(x, self.weight, self.bias)

    def scaled(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """Return normalised rows with another weight and bias, or without."""
        if self.kind == "layer":
            return F.layer_norm(x, x.shape[-1:], weight, bias, self.eps)
        return F.rms_norm(x, x.shape[-1:], weight, self.eps)


def fused_norm(norm: nn.Module) -> FusedNorm | None:
    """Return a norm as one kernel, by its values on random rows; None where it is none of those known.

    Args:
        norm: A module that normalises the last dimension, with the usual names of its parts.

    Example:
        >>> fused_norm(nn.LayerNorm(8)).kind, fused_norm(nn.RMSNorm(8)).kind, fused_norm(nn.Tanh())
        ('layer', 'rms', None)

    """
    weight, bias = (getattr(norm, name, None) for name in ("weight", "bias"))
    found = (getattr(norm, name, None) for name in ("eps", "variance_epsilon"))
    eps = next((each for each in found if isinstance(each, float)), None)
    if not isinstance(weight, Tensor) or weight.dim() != 1:
        return None
    eps = torch.finfo(weight.dtype).eps if eps is None else eps
    weight, bias = weight.detach(), bias.detach() if isinstance(bias, Tensor) else None
    x = 1 + torch.randn(ROWS, len(weight), generator=torch.Generator().manual_seed(0))
    x[0] *= 1e-3  # which tells eps
    for kind in ("layer", "rms"):
        single = FusedNorm(kind, weight.float(), None if bias is None else bias.float(), eps)
        if _agrees(norm, single, x.to(weight.device)):
            return FusedNorm(kind, weight, bias, eps)
    return None


def _agrees(norm: nn.Module, made: FusedNorm, x: Tensor) -> bool:
    """Whether a norm gives in single precision what one of torch's kernels does."""
    try:
        with torch.no_grad():
            found = copy.deepcopy(norm).float()(x)
    except (RuntimeError, TypeError):
        return False
    if not isinstance(found, Tensor) or found.shape != x.shape:
        return False
    return torch.allclose(found, made(x), rtol=1e-4, atol=1e-5)
