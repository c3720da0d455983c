"""Whether the steps of somebody's block treat examples, or positions, one by one, so that some may leave."""

from typing import Any

import torch
from torch import Tensor

from torchpact import _state
from torchpact._state import State
from torchpact.block import AdaptiveBlock
from torchpact.engines.compact import CompactBlock, belongs, flat, rows_for
from torchpact.engines.folding import Unsupported
from torchpact.metering import Never


@torch.no_grad()
def compacted(block: AdaptiveBlock, u: State, *context: Any) -> CompactBlock:
    """Return a block that halted examples leave, or positions, if that is seen to make no difference.

    Every second one is run without the others, through all steps. What of the context belongs to examples is
    seen here, too, once and for all.

    >>> block = tp.AdaptiveBlock(nn.Tanh(), nn.Linear(8, 1), max_steps=4, mode="thresholded")
    >>> compacted(block, torch.randn(5, 7, 8)).positions
    True
    >>> compacted(tp.AdaptiveBlock(lambda u: u - u.mean(0), nn.Linear(8, 1), max_steps=4), torch.randn(5, 8))
    Traceback (most recent call last):
        ...
    torchpact.engines.folding.Unsupported: compact: expected steps and heads that treat examples one by one
    """
    output, ponder = block(u, *context, mode=Never())
    decisions = ponder.steps.shape
    positions = decisions != _state.per_example(ponder.steps)
    shape = _state.parts(u)[0].shape[: -1 if positions else 1]
    if positions and decisions != (*shape, 1):
        raise Unsupported(
            f"compact: expected a decision an example, or for each of {tuple(shape)}; got {tuple(decisions)}"
        )
    if shape.numel() < 2:
        raise Unsupported("compact: expected two examples, to see whether steps treat them one by one")
    theirs = belongs((u, context), shape)
    keep = torch.arange(0, shape.numel(), 2, device=ponder.steps.device)
    own, others = rows_for(flat((u, context), theirs, len(shape)), theirs, keep)
    try:
        some, seen = block(own, *others, mode=Never())
    except Exception as error:  # whatever somebody's step makes of it
        why = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise Unsupported(f"compact: expected steps that can run fewer examples, got {why}") from error
    expected = [part.flatten(0, len(shape) - 1)[keep] for part in _state.parts(output)]
    found = [*_state.parts(some), seen.probs.flatten(1)]
    if not all(map(_close, found, [*expected, ponder.probs.flatten(1)[:, keep]])):
        what = "positions" if positions else "examples"
        raise Unsupported(f"compact: expected steps and heads that treat {what} one by one")
    return CompactBlock(block, positions, theirs[1])


def _close(one: Tensor, other: Tensor) -> bool:
    """Whether two results differ by rounding at most; some of a step may be infinite, or not a number."""
    if one.shape != other.shape:
        return False
    bound = 1e-3 if torch.finfo(other.dtype).bits >= 32 else 3e-2
    sizes = other[other.isfinite()].double()
    least = bound * float(sizes.square().mean().sqrt()) if len(sizes) else 0.0
    return torch.allclose(one, other, rtol=bound, atol=least, equal_nan=True)
