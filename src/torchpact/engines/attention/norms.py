"""Norms of rows by one kernel each, which those of pretrained networks often are not."""

import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchpact.engines.attention.native import PRECISIONS, norm_natively
from torchpact.engines.attention.panels import Norm

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


class RowNorm:
    """The norm of a layer, and the sum before it: in one pass by the kernel in C++, where that can run.

    Args:
        norm: The module.
        native: Whether the kernel can run.

    Example:
        >>> norm, product, u = RowNorm(nn.LayerNorm(8), native=False), torch.randn(5, 8), torch.randn(5, 8)
        >>> expected = nn.LayerNorm(8)(product + u)
        >>> torch.allclose(norm.of_sum(product, u), expected, atol=1e-6)
        True

    """

    def __init__(self, norm: nn.Module, native: bool) -> None:
        fused = fused_norm(norm)
        self.norm: Any = norm if fused is None else fused
        self.fused = fused if native else None
        parts = (None, None) if fused is None else (fused.weight, fused.bias)
        # single precision, whatever the network's is
        self.weight, self.bias = (None if part is None else part.float().contiguous() for part in parts)

    def told(self) -> Norm | None:
        """Return it as the kernel takes it, where that can run."""
        if self.fused is None:
            return None
        weight, bias = (None if part is None else part.data_ptr() for part in (self.weight, self.bias))
        return Norm(weight, bias, self.fused.eps, self.fused.kind == "rms")

    def __call__(self, x: Tensor) -> Tensor:
        """Return normalised rows, (rows, size)."""
        if self.fused is None or not _fits(x):
            return self.norm(x)  # type: ignore[no-any-return]
        output = torch.empty_like(x)
        self._run(x, None, output)
        return output

    def of_sum(self, product: Tensor, u: Tensor, *, in_place: bool = False) -> Tensor:
        """Add rows to others, which become the sum, and return its norm.

        Args:
            product: What is added to, in place.
            u: What is added.
            in_place: Whether the norm may take the place of the sum.

        """
        if self.fused is None or not (_fits(product) and _fits(u) and product.dtype == u.dtype):
            return self.norm(product.add_(u))  # type: ignore[no-any-return]
        output = product if in_place else torch.empty_like(product)
        self._run(product, u, output)
        return output

    def _run(self, x: Tensor, added: Tensor | None, output: Tensor) -> None:
        assert self.fused is not None
        rms = self.fused.kind == "rms"
        norm_natively(x, added, self.weight, self.bias, self.fused.eps, rms, output)


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


def _fits(x: Tensor) -> bool:
    return x.dtype in PRECISIONS and x.dim() == 2 and x.is_contiguous() and x.device.type == "cpu"


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
