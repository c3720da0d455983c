"""Which tokens a layer computes, and which tokens each of them attends to: indices for ragged batches."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

LARGE = 1e4
"""Masks that are added hold zeros, and numbers below −LARGE where nothing is attended to."""


class Selection(NamedTuple):
    """The tokens whose queries, outputs and MLP are computed, and those whose keys and values are.

    Tokens are numbered through the batch, example by example; None stands for all of them.
    """

    rows: Tensor | None
    """The active tokens."""
    keys: Tensor | None
    """The real tokens of examples that have active ones, or of all examples."""
    picks: Tensor | None
    """Where the rows are among the keys; None where they are the same."""
    examples: Tensor
    """The examples that have rows."""
    starts: Tensor
    """The first row of each of these examples, and the number of rows."""
    offsets: Tensor
    """The first key of each of these examples."""


class Ranges(NamedTuple):
    """What every token of the batch attends to.

    Positions are those of the keys that are given: of the real tokens of an example, one after the other, or
    of a cache.
    """

    first: Tensor
    """(tokens of the batch), the first position; int32."""
    last: Tensor
    """The position after the last one."""
    mask: Tensor | None
    """Where these are no ranges: the mask, (batch, heads or 1, queries, keys)."""


class Ragged(NamedTuple):
    """What attention of rows is told; see :class:`Selection` and :class:`Ranges`."""

    starts: Tensor
    offsets: Tensor
    first: Tensor
    last: Tensor


def select(active: Tensor, real: Tensor | None, cached: bool = False) -> Selection | None:
    """Return which tokens are computed, or None where no token is active.

    Args:
        active: Booleans, (batch, length); false for padding.
        real: False for padding; None where there is none.
        cached: Whether keys and values of all examples are wanted.

    Example:
        >>> select(torch.tensor([[True, False], [False, False], [True, True]]), None)._asdict()
        {'rows': tensor([0, 4, 5]), 'keys': tensor([0, 1, 4, 5]), 'picks': tensor([0, 2, 3]),
         'examples': tensor([0, 2]), 'starts': tensor([0, 1, 3]), 'offsets': tensor([0, 2])}

    """
    batch, length = active.shape
    rows = active.flatten().nonzero().squeeze(1)
    if not rows.numel():
        return None
    counts = active.sum(1)
    examples = counts.nonzero().squeeze(1)
    all_alive = examples.numel() == batch
    starts = F.pad(counts.index_select(0, examples).cumsum(0), (1, 0))
    wanted = None  # all
    if not (all_alive or cached):
        alive = (counts > 0).unsqueeze(1)
        wanted = alive.expand(batch, length) if real is None else real & alive
    elif real is not None:
        wanted = real
    if cached:
        offsets = examples
    elif wanted is None:
        offsets = examples * length
    else:
        lengths = wanted.sum(1).index_select(0, examples)
        offsets = lengths.cumsum(0) - lengths
    if wanted is None:
        same = rows.numel() == batch * length
        some = None if same else rows
        return Selection(some, None, some, examples, starts, offsets)
    keys = wanted.flatten().nonzero().squeeze(1)
    if keys.numel() == rows.numel():
        return Selection(rows, keys, None, examples, starts, offsets)
    picks = (wanted.flatten().cumsum(0) - 1).index_select(0, rows)
    return Selection(rows, keys, picks, examples, starts, offsets)


def ranges_of(
    mask: Tensor | None,
    causal: bool,
    window: int | None,
    shape: tuple[int, int],
    total: int | None,
    real: Tensor | None,
    device: torch.device,
) -> Ranges:
    """Return what every token attends to.

    Args:
        mask: (batch or 1, heads or 1, queries, keys), booleans or what is added; it says everything.
        causal: Without a mask, whether tokens attend only to themselves and those before.
        window: And to how many of these.
        shape: Batch and length.
        total: The keys of an example in a cache; None where there is no cache, and real tokens are counted.
        real: False for padding, (batch, length); None where there is none.
        device: Where the tokens are.

    Example:
        >>> ranges_of(None, True, 2, (1, 4), None, None, torch.device("cpu"))[:2]
        (tensor([0, 0, 1, 2], dtype=torch.int32), tensor([1, 2, 3, 4], dtype=torch.int32))

    """
    batch, length = shape
    count = length if total is None else total
    real = None if total is not None else real
    if mask is None:
        last = torch.full((1, length), count, device=device)
        if causal:
            last = torch.arange(count - length + 1, count + 1, device=device).unsqueeze(0)
        first = torch.zeros_like(last) if window is None or not causal else (last - window).clamp(min=0)
        seen = None
    else:
        mask = mask[..., :count]
        allowed = mask if mask.dtype == torch.bool else _as_booleans(mask)
        if allowed is None or mask.size(1) != 1:
            nothing = torch.empty(0, dtype=torch.int32, device=device)
            return Ranges(nothing, nothing, mask)
        allowed = allowed[:, 0, :1] if allowed.stride(2) == 0 else allowed[:, 0]
        if real is not None:
            allowed = allowed & real.unsqueeze(1)
        seen, bits = allowed.sum(-1), allowed.byte()
        first, last = bits.argmax(-1), count - bits.flip(-1).argmax(-1)
        last = torch.where(seen > 0, last, first)
    first, last = first.expand(batch, length), last.expand(batch, length)
    if real is not None:
        before = F.pad(real.cumsum(1), (1, 0))
        first, last = before.gather(1, first), before.gather(1, last)
    if seen is not None:
        gaps = (last - first) != seen
        if bool((gaps if real is None else gaps & real).any()):
            return Ranges(first.flatten().int(), last.flatten().int(), mask)
    return Ranges(first.flatten().int(), last.flatten().int(), None)


def _as_booleans(mask: Tensor) -> Tensor | None:
    """Return what may be attended to, if a mask that is added says no more than that."""
    allowed = mask == 0
    return allowed if bool((allowed | (mask < -LARGE)).all()) else None
