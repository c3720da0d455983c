"""Steps that heed the mask: u + f(u)·a, everywhere or only where the mask is open."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from torchpact.checks import readable
from torchpact.core.callables import as_module


class Residual(nn.Module):
    """A step u + f(u)·a that heeds the active positions mask a (eq. 28).

    A block hands the mask, as ``gate``, to any step with a true attribute ``gated``, from the second
    iteration on. Use such steps where positions see each other, as pixels under a convolution do:
    what a halted neighbour shows is then the same in training and in evaluation.

    With ``by_position``, f looks at one position at a time, as an MLP does, and is given those only whose
    gate is open: in training, too, where a relaxed mask is clipped to zero, which changes neither outputs nor
    gradients. ``features`` is the dimension that f works along: the last one or, for 1×1 convolutions, 1.
    What f is given has the dimensions of u, with the open positions along the first and 1 for all others but
    the features. Batch norm in f would see open positions only. The host waits for the mask; where it must
    not, as in torch.compile, and where f is given a context, f runs everywhere.

    >>> unit = Residual(nn.Conv2d(4, 4, 3, padding=1))
    >>> u = torch.randn(1, 4, 8, 8)
    >>> torch.equal(unit(u, gate=torch.zeros(1, 1, 8, 8)), u)
    True
    >>> mlp = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 4))
    >>> tokens, gate = torch.randn(2, 5, 4), torch.rand(2, 5, 1).round()
    >>> output = Residual(mlp, by_position=True)(tokens, gate=gate)
    >>> torch.allclose(output, tokens + mlp(tokens) * gate, atol=1e-6)
    True
    """

    gated = True

    def __init__(
        self, function: Callable[..., Tensor], *, by_position: bool = False, features: int = -1
    ) -> None:
        super().__init__()
        self.function = as_module(function)
        self.by_position, self.features = by_position, features

    def extra_repr(self) -> str:
        """Return the settings for ``print``."""
        return f"by_position=True, features={self.features}" if self.by_position else ""

    def forward(self, u: Tensor, *context: Any, gate: Tensor | None = None, **named: Any) -> Tensor:
        """Add the residual, where the gate is open; a context goes to the function."""
        if self.by_position and gate is not None and not (context or named) and readable(gate):
            weights = self._weights(u, gate)
            rows = (weights != 0).flatten().nonzero().squeeze(1)
            if len(rows) < len(weights):
                return self._add_to(u, rows, weights.index_select(0, rows))
        residual: Tensor = self.function(u, *context, **named)
        return u + (residual if gate is None else residual * gate)

    def _weights(self, u: Tensor, gate: Tensor) -> Tensor:
        """Return the gate of every position, a row each."""
        if u.dim() < 2 or gate.size(self.features) != 1:
            raise ValueError(
                f"expected a gate of one value along dim {self.features}, got gates of {tuple(gate.shape)} "
                f"for a state of {tuple(u.shape)}"
            )
        positions = u.movedim(self.features, -1).shape[:-1]
        return gate.movedim(self.features, -1).expand(*positions, 1).reshape(-1, 1)

    def _add_to(self, u: Tensor, rows: Tensor, weights: Tensor) -> Tensor:
        """Compute some positions, and add what they give to them."""
        last = u.movedim(self.features, -1)
        flat = last.reshape(-1, last.size(-1))
        picked = flat.index_select(0, rows)
        single = [1] * (u.dim() - 2)
        given = picked.view(len(rows), *single, flat.size(1)).movedim(-1, self.features)
        residual: Tensor = self.function(given)
        if residual.shape != given.shape:
            raise ValueError(
                f"expected a function that keeps the shape of a position, got {tuple(residual.shape)} for "
                f"{tuple(given.shape)}"
            )
        added = residual.movedim(self.features, -1).reshape(picked.shape) * weights
        kind = torch.promote_types(flat.dtype, added.dtype)
        moved = flat.to(kind).index_add(0, rows, added.to(kind))
        output = moved.view(last.shape).movedim(-1, self.features)
        return output.contiguous() if u.is_contiguous() else output
