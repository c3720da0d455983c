"""Residual steps by position on their active positions, which are picked by rows; differentiable."""

from typing import Any

import torch
from torch import Tensor

from torchpact.checks import readable
from torchpact.specs import PositionwiseResidual, register_gated


@register_gated(PositionwiseResidual)
def residual_by_rows(spec: PositionwiseResidual, u: Tensor, gate: Tensor, *context: Any) -> Tensor | None:
    """Return u + f(u)·a, with f computed where the gate is open.

    What f is given has the dimensions of u, with the open positions along the first and 1 for all others but
    the features. Batch norm in f would see open positions only. The host waits for the gate.

    Args:
        spec: The step.
        u: The state.
        gate: The active positions mask, with one value along the features.
        context: What else f is given; its rows are not known, so that f runs everywhere.

    Returns:
        The state after the step; None where all gates are open or cannot be read, and with a context.

    Raises:
        ValueError: f does not keep the shape of a position.

    """
    if context or not readable(gate):
        return None
    last = u.movedim(spec.features, -1)
    weights = gate.movedim(spec.features, -1).expand(*last.shape[:-1], 1).reshape(-1, 1)
    rows = (weights != 0).flatten().nonzero().squeeze(1)
    if len(rows) == len(weights):
        return None
    flat = last.reshape(-1, last.size(-1))
    picked = flat.index_select(0, rows)
    single = [1] * (u.dim() - 2)
    given = picked.view(len(rows), *single, flat.size(1)).movedim(-1, spec.features)
    residual: Tensor = spec.function(given)
    if residual.shape != given.shape:
        raise ValueError(
            f"expected a function that keeps the shape of a position, got {tuple(residual.shape)} for "
            f"{tuple(given.shape)}"
        )
    weights = weights.index_select(0, rows)
    added = residual.movedim(spec.features, -1).reshape(picked.shape) * weights
    kind = torch.promote_types(flat.dtype, added.dtype)
    moved = flat.to(kind).index_add(0, rows, added.to(kind))
    output = moved.view(last.shape).movedim(-1, spec.features)
    return output.contiguous() if u.is_contiguous() else output
