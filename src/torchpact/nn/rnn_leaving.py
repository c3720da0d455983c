"""A time step of a recurrent layer whose examples leave the batch when they halt."""

import torch
from torch import Tensor

from torchpact.checks import at_least_single
from torchpact.core import state as _state
from torchpact.core.block import AdaptiveBlock, Trace
from torchpact.core.modes import Mode
from torchpact.core.state import State


def leave_batch(block: AdaptiveBlock, u: State, first: Tensor, again: Tensor, mode: Mode) -> Trace:
    """As the loop of a recurrent layer's block without gradients, but with the rows only that are active."""
    step, head = block.steps[0], block.halting[0]
    u = step(u, first, again, iteration=1)
    remaining = at_least_single(_state.parts(u)[0].new_ones(len(first), 1))
    steps = torch.ones_like(remaining, dtype=torch.long)
    rows = torch.arange(len(first), device=first.device)
    asked: list[Tensor] = []
    kind = None if mode.hard else remaining.dtype
    output = _state.map_state(lambda part: torch.zeros_like(part, dtype=kind), u)
    for iteration in range(2, block.max_steps + 1):
        # decisions are made for everyone, which is cheap and draws the same noise as without leaving
        logits = head(u).to(remaining.dtype)
        if len(rows) < len(remaining):
            logits = torch.full_like(remaining, torch.inf).index_copy_(0, rows, logits)
        asked.append(logits)
        weight, remaining = mode.halt(remaining, logits)
        if not mode.hard:
            _add(output, rows, u, weight)
        active = remaining > 0
        steps = steps + active
        stay = active[:, 0].nonzero()[:, 0]
        if len(stay) < len(rows):
            if mode.hard:  # also those that stay, to be overwritten when they leave
                _put(output, rows, u)
            rows, kept = stay, torch.searchsorted(rows, stay)
            u, again = _state.rows_of(u, kept), again.index_select(0, kept)
        if not len(rows):
            break
        u = step(u, first, again, iteration=iteration)
    if mode.hard:
        _put(output, rows, u)
    else:
        _add(output, rows, u, remaining)
    return Trace(_state.like(output, u), asked, remaining, steps)


def _put(output: State, rows: Tensor, u: State) -> None:
    for whole, part in zip(_state.parts(output), _state.parts(u), strict=True):
        whole.index_copy_(0, rows, part)


def _add(output: State, rows: Tensor, u: State, weight: Tensor) -> None:
    for whole, part in zip(_state.parts(output), _state.parts(u), strict=True):
        whole.index_add_(0, rows, weight.index_select(0, rows) * part)
