"""Batches of sequences without their padding, as PackedSequence has them.

The rows of one time step follow those of another, the longest sequence first in each.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from torchpact.core.ponder import Ponder


def pack(
    input: Tensor | PackedSequence, lengths: Tensor | Sequence[int] | None, features: int
) -> PackedSequence:
    """Take the padding out of a batch of sequences of so many features: of what ``time_first`` returns.

    >>> pack(torch.randn(3, 2, 8), [1, 3], features=8).batch_sizes
    tensor([2, 1, 1])
    """
    if isinstance(input, PackedSequence):
        if lengths is not None:
            raise ValueError("expected no lengths with a PackedSequence, which has its own; got both")
        if input.data.dim() != 2 or input.data.size(1) != features:
            given = tuple(input.data.shape)
            raise ValueError(f"expected a PackedSequence of {features} features, got data of shape {given}")
        return input
    time, batch = input.shape[:2]
    each = None if lengths is None else _check_lengths(lengths, batch, time)
    if each is None or batch == 0:
        return PackedSequence(input.reshape(time * batch, features), torch.full((time,), batch))
    return pack_padded_sequence(input, each, enforce_sorted=False)


def time_first(input: Tensor, features: int, batch_first: bool) -> Tensor:
    """Check a batch of sequences of so many features; return it as (time, batch, features)."""
    if not isinstance(input, Tensor):
        raise TypeError(
            f"expected a tensor of shape {_expected(features, batch_first)} or a PackedSequence, "
            f"got {type(input).__name__}"
        )
    if input.dim() != 3 or input.size(2) != features:
        raise ValueError(
            f"expected input of shape {_expected(features, batch_first)}, "
            f"got {tuple(input.shape)}{_hint(input, features)}"
        )
    by_time = input.transpose(0, 1) if batch_first else input
    if by_time.size(0) < 1:
        raise ValueError("expected sequences of at least one time step, got 0")
    return by_time


def _expected(features: int, batch_first: bool) -> str:
    return f"({'batch, time' if batch_first else 'time, batch'}, {features})"


def _hint(input: Tensor, features: int) -> str:
    """What is most likely wrong: a cell made for the features alone."""
    if input.dim() != 3 or input.size(2) != features + 1:
        return ""
    return (
        f"; the cell takes the flag as its last input, so make it for {features + 2} to read {features + 1}"
    )


def pad(rows: Tensor, packed: PackedSequence, total: int, value: float = 0.0) -> Tensor:
    """Return packed rows as (batch, time, …), padded with ``value`` to ``total`` time steps."""
    time, batch = len(packed.batch_sizes), int(packed.batch_sizes[0])
    if packed.unsorted_indices is None and len(rows) == time * batch:
        return rows.view(time, batch, *rows.shape[1:]).transpose(0, 1)
    whole = packed._replace(data=rows)
    padded: Tensor
    padded, _ = pad_packed_sequence(whole, batch_first=True, padding_value=value, total_length=total)
    return padded


def with_time(ponder: Ponder, packed: PackedSequence, total: int) -> Ponder:
    """Give a ponder of packed rows the positions (batch, time).

    It has weights where there is padding: 1 for real time steps and 0 for others.
    """
    probs = pad(ponder.probs.t(), packed, total, 1.0)
    steps, cost = pad(ponder.steps, packed, total), pad(ponder.cost, packed, total)
    sizes = packed.batch_sizes
    full = len(sizes) == total and int(sizes[-1]) == int(sizes[0])
    return Ponder(
        probs=probs.movedim(-1, 0),
        steps=steps,
        expected_steps=pad(ponder.expected_steps, packed, total),
        cost=cost,
        log_prob=None if ponder.log_prob is None else pad(ponder.log_prob, packed, total),
        weights=None if full else (steps > 0).to(cost.dtype),
    )


def _check_lengths(lengths: Tensor | Sequence[int], batch: int, time: int) -> Tensor:
    try:
        given = torch.as_tensor(lengths).cpu()
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"expected {batch} whole numbers as lengths, got {lengths!r:.60}") from None
    if not isinstance(lengths, Tensor) and not len(given):
        given = given.long()  # torch takes an empty list for one of floats
    if given.shape != (batch,) or given.is_floating_point() or given.dtype == torch.bool:
        raise ValueError(f"expected {batch} whole numbers as lengths, got {given.dtype} {tuple(given.shape)}")
    wrong = given[(given < 1) | (given > time)]
    if len(wrong):
        raise ValueError(f"expected lengths of 1 to {time}, got {wrong[0].item()}")
    return given.long()
