"""Attention of ragged rows by ``F.scaled_dot_product_attention``, in groups of about as many rows each."""

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from torchpact.engines.attention.ragged import Ragged, Ranges, Selection


def attend_in_rectangles(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    ragged: Ragged,
    selection: Selection,
    ranges: Ranges,
    length: int,
) -> Tensor:
    """Return what rows see; arguments as those of the kernel in C++, and what a mask is picked by.

    Args:
        queries: (rows, heads, size); of an example one after the other.
        keys: (keys, kv_heads, size), or with a cache (examples, kv_heads, keys, size).
        values: Values, of the same shape.
        scale: What scores are multiplied by.
        ragged: The rows of each example, and what they attend to.
        selection: Which tokens the rows and the keys are.
        ranges: Its mask, where there is one, is used instead of the ranges.
        length: The tokens of an example.

    Returns:
        The sums, (rows, heads · size).

    """
    device, cached = queries.device, keys.dim() == 4
    counts = ragged.starts.diff().tolist()
    begins = ragged.offsets.tolist()
    lengths = [end - begin for begin, end in zip(begins, [*begins[1:], len(keys)], strict=True)]
    output = torch.empty_like(queries)
    for group, take, real in groups_of_rows(counts, device):
        if cached:
            examples = selection.examples.index_select(0, group)
            own_keys, own_values = (x.index_select(0, examples) for x in (keys, values))
            places = torch.arange(keys.size(2), device=device).unsqueeze(0)
            at = places
        else:
            own = torch.tensor([lengths[i] for i in group.tolist()], device=device)[:, None]
            places = torch.arange(int(own.max()), device=device).unsqueeze(0)
            at = ragged.offsets.index_select(0, group)[:, None] + torch.minimum(places, own - 1)
            own_keys, own_values = (x[at].transpose(1, 2) for x in (keys, values))
        if ranges.mask is None:
            first, last = (x[take].unsqueeze(2) for x in (ragged.first, ragged.last))
            mask = ((places.unsqueeze(1) >= first) & (places.unsqueeze(1) < last)).unsqueeze(1)
        else:
            mask = _picked(ranges.mask, selection, take, None if cached else at, length)
            if not cached:
                mask = _hide(mask, (places < own)[:, None, None])
        attended = F.scaled_dot_product_attention(
            queries[take].transpose(1, 2),
            own_keys,
            own_values,
            attn_mask=None if mask.dtype == torch.bool and bool(mask.all()) else mask,
            scale=scale,
            enable_gqa=queries.size(1) != keys.size(1),
        )
        attended = attended.transpose(1, 2).flatten(0, 1)
        output.index_copy_(0, take.flatten()[real], attended.index_select(0, real))
    return output.flatten(1)


def groups_of_rows(
    counts: list[int], device: torch.device, together: bool = False
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield examples that have about as many rows, or all ``together``, and which these rows are.

    All rows lie one after the other, those of an example together; an example that has fewer than another of
    its group takes its last row several times, and ``real`` says which are none of these.

    >>> for examples, take, real in groups_of_rows([3, 1, 2], torch.device("cpu")):
    ...     print(examples.tolist(), take.tolist(), real.tolist())
    [0, 2] [[0, 1, 2], [4, 5, 5]] [0, 1, 2, 3, 4]
    [1] [[3]] [0]
    """
    starts = [0, *itertools.accumulate(counts)]
    groups: list[list[int]] = [[*range(len(counts))]]
    if not together and 2 * min(counts) < max(counts):
        groups = []
        for example in sorted(range(len(counts)), key=counts.__getitem__, reverse=True):
            if not groups or 2 * counts[example] < counts[groups[-1][0]]:
                groups.append([])
            groups[-1].append(example)
    for examples in groups:
        own = torch.tensor([counts[example] for example in examples], device=device)[:, None]
        first = torch.tensor([starts[example] for example in examples], device=device)[:, None]
        places = torch.arange(max(counts[example] for example in examples), device=device)
        real = (places < own).flatten().nonzero().squeeze(1)
        yield torch.tensor(examples, device=device), first + torch.minimum(places, own - 1), real


def _picked(mask: Tensor, selection: Selection, take: Tensor, at: Tensor | None, length: int) -> Tensor:
    """Return a mask for rows of some examples, and for these keys; (examples, heads or 1, rows, keys)."""
    tokens = take if selection.rows is None else selection.rows[take]
    examples = (tokens[:, :1] // length) % mask.size(0)
    if at is None:
        return mask[examples, :, tokens % length].transpose(1, 2)
    columns = (at if selection.keys is None else selection.keys[at]) % length
    each = (examples[..., None], slice(None), (tokens % length)[..., None], columns[:, None])
    return mask[each].permute(0, 3, 1, 2)


def _hide(mask: Tensor, shown: Tensor) -> Tensor:
    """Return a mask without keys that stand for none."""
    return mask & shown if mask.dtype == torch.bool else mask.masked_fill(~shown, -torch.inf)
