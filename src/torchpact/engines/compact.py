"""The compact engine: where examples halt one by one, those that have leave the batch. Any steps will do."""

from typing import Any

import torch
from torch import Tensor, nn

from torchpact import _state
from torchpact._state import State
from torchpact.block import AdaptiveBlock, Ponder
from torchpact.engines.folding import FoldedBlock, Runner, Unsupported
from torchpact.engines.ponder import make_ponder
from torchpact.modes import Mode, as_mode


class CompactBlock(nn.Module):
    """Runs an adaptive block, without gradients, on the examples that are still active.

    The heads must give one logit an example, and steps treat examples independently. Of the context, tensors
    with as many entries as the batch has lose those of halted examples too, also in tuples. Any mode in which
    examples can be done early will do: the hard ones, and ACT.

    >>> block = tp.AdaptiveBlock(nn.Linear(8, 8), nn.Linear(8, 1), max_steps=4, mode="thresholded")
    >>> u = torch.randn(5, 8)
    >>> with torch.no_grad():
    ...     expected, _ = block(u)
    >>> output, ponder = CompactBlock(block)(u)
    >>> torch.allclose(output, expected, atol=1e-6)
    True
    """

    waits = True  # to know who is left

    def __init__(self, block: AdaptiveBlock) -> None:
        super().__init__()
        self.block = block

    @torch.no_grad()
    def forward(self, u: State, *context: Any, mode: Mode | str | None = None) -> tuple[State, Ponder]:
        """Run the block on ``u``; see :class:`~torchpact.AdaptiveBlock`."""
        block = self.block
        mode = block.mode if mode is None else as_mode(mode)
        if not mode.leaves:
            raise Unsupported(f"expected a mode in which examples are done early, got {mode}")
        u = block._advance(0, u, None, context, freeze=False)
        logits = block._ask(0, u)
        if logits.shape != _state.per_example(logits):
            raise Unsupported(f"expected one halting logit an example, got logits of {tuple(logits.shape)}")

        batch = len(logits)
        index = torch.arange(batch, device=logits.device)
        remaining = torch.ones_like(logits)
        steps = torch.ones_like(logits, dtype=torch.long)
        asked: list[Tensor] = []
        # by its length at the start: later as many may be left as a shared table has rows
        theirs = _per_example(context, batch)
        output = _state.map_state(lambda part: torch.zeros_like(part, dtype=_kind(part, mode.hard)), u)
        for step in range(1, block.max_steps):
            if step > 1:
                logits = block._ask(step - 1, u)
            asked.append(torch.full_like(steps, torch.inf, dtype=logits.dtype).index_copy_(0, index, logits))
            weight, remaining = mode.halt(remaining, logits)
            goes_on = (mode.gate(remaining) > 0).flatten()
            _add(output, index, u, weight, mode.hard)
            if not goes_on.all():
                keep = goes_on.nonzero().squeeze(1)
                index, remaining = index[keep], remaining[keep]
                u = _state.map_state(lambda part, keep=keep: part[keep], u)
                context = _rows(context, theirs, keep)
            if not len(index):
                break
            steps[index] += 1
            u = block._advance(step, u, None, context, freeze=False)
        _add(output, index, u, remaining, mode.hard)
        return _state.like(output, u), make_ponder(asked, block.max_steps, steps, mode)


def _per_example(value: Any, batch: int) -> Any:
    """Return whether a value has an entry for each example; of a tuple, for every part of it."""
    if isinstance(value, tuple):
        return tuple(_per_example(part, batch) for part in value)
    return isinstance(value, Tensor) and value.dim() > 0 and len(value) == batch


def _rows(value: Any, theirs: Any, keep: Tensor) -> Any:
    """Return the entries to keep, of what has one for each example."""
    if isinstance(theirs, tuple):
        parts = [_rows(part, own, keep) for part, own in zip(value, theirs, strict=True)]
        return value._make(parts) if hasattr(value, "_make") else tuple(parts)
    return value[keep] if theirs else value


def _add(output: State, index: Tensor, u: State, weight: Tensor, hard: bool) -> None:
    """Add weight·u to the rows of the output; with one-hot weights put u where the weight is."""
    for total, part in zip(_state.parts(output), _state.parts(u), strict=True):
        if hard:
            taken = (weight > 0).flatten()
            total[index[taken]] = part[taken]
        else:
            total.index_add_(0, index, weight * part)


def _kind(part: Tensor, hard: bool) -> torch.dtype:
    """What to sum up in: single precision at least; one-hot weights sum up nothing."""
    return part.dtype if hard else torch.promote_types(part.dtype, torch.float32)


def build(block: FoldedBlock) -> Runner:
    """Return a runner for a block with one decision an example."""
    head = block.head
    if head is None or head.conv is not None:
        raise Unsupported(
            "compact: expected one decision an image, got " + ("none" if head is None else "one a pixel")
        )
    if not block.mode.leaves:
        raise Unsupported(f"compact: expected a mode in which examples are done early, got {block.mode}")
    return CompactBlock(block.adaptive())
