"""The compact engine: where examples halt one by one, those that have leave the batch. Any steps will do."""

from typing import Any

import torch
from torch import Tensor, nn

from torchpact import _state
from torchpact._state import State
from torchpact.block import AdaptiveBlock, Ponder
from torchpact.engines.folding import FoldedBlock, Runner, Unsupported
from torchpact.engines.ponder import make_ponder, without_details
from torchpact.metering import Never
from torchpact.modes import Mode, Thresholded, as_mode


class CompactBlock(nn.Module):
    """Runs an adaptive block, without gradients, on the examples that are still active.

    The heads must give one logit an example, and steps treat examples independently. Of the context, tensors
    with as many entries as the batch has lose those of halted examples too, also in tuples. Any mode in which
    examples can be done early will do: the hard ones, and ACT.

    With ``positions`` every entry of all dimensions but the last is an example of its own, as tokens are for
    steps that look at one at a time: states of shape (batch, tokens, features), logits of (batch, tokens, 1).

    >>> block = tp.AdaptiveBlock(nn.Linear(8, 8), nn.Linear(8, 1), max_steps=4, mode="thresholded")
    >>> u = torch.randn(5, 8)
    >>> with torch.no_grad():
    ...     expected, _ = block(u)
    >>> output, ponder = CompactBlock(block)(u)
    >>> torch.allclose(output, expected, atol=1e-6)
    True
    """

    waits = True  # to know who is left
    countable = False

    def __init__(self, block: AdaptiveBlock, positions: bool = False) -> None:
        super().__init__()
        self.block, self.positions = block, positions

    @torch.no_grad()
    def forward(self, u: State, *context: Any, mode: Mode | str | None = None) -> tuple[State, Ponder]:
        """Run the block on ``u``; see :class:`~torchpact.AdaptiveBlock`."""
        mode = self.block.mode if mode is None else as_mode(mode)
        if not mode.leaves:
            raise Unsupported(f"expected a mode in which examples are done early, got {mode}")
        if not self.positions:
            return self._run(u, context, mode)
        shape = _state.parts(u)[0].shape[:-1]
        output, ponder = self._run(_flat(u, shape), _flat(context, shape), mode)
        output = _state.map_state(lambda part: part.unflatten(0, shape), output)
        return output, Ponder._make([x if x is None else x.unflatten(x.dim() - 2, shape) for x in ponder])

    def _run(self, u: State, context: tuple[Any, ...], mode: Mode) -> tuple[State, Ponder]:
        block = self.block
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
        ponder = make_ponder(asked, block.max_steps, steps, mode)
        brief = isinstance(mode, Thresholded) and not block.details
        return _state.like(output, u), without_details(ponder) if brief else ponder


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


def compacted(block: AdaptiveBlock, u: State, *context: Any) -> CompactBlock:
    """Return a block that halted examples leave, or positions, if that is seen to make no difference.

    >>> block = tp.AdaptiveBlock(nn.Tanh(), nn.Linear(8, 1), max_steps=4, mode="thresholded")
    >>> compacted(block, torch.randn(5, 7, 8)).positions
    True
    >>> compacted(tp.AdaptiveBlock(lambda u: u - u.mean(0), nn.Linear(8, 1), max_steps=4), torch.randn(5, 8))
    Traceback (most recent call last):
        ...
    torchpact.engines.folding.Unsupported: expected steps and heads that treat examples one by one
    """
    with torch.no_grad():
        output, ponder = block(u, *context, mode=Never())
        decisions, shape = ponder.steps.shape, _state.parts(u)[0].shape[:-1]
        positions = ponder.steps.shape != _state.per_example(ponder.steps)
        if positions and decisions != (*shape, 1):
            raise Unsupported(
                f"expected one decision an example, or for each of {tuple(shape)}, got {tuple(decisions)}"
            )
        if positions:
            u, context, output = (_flat(each, shape) for each in (u, context, output))
        probs = ponder.probs.flatten(1)
        rows = probs.size(1)
        if rows < 2:
            raise Unsupported("expected two examples or more, to see whether steps treat them one by one")
        keep = torch.arange(0, rows, 2, device=probs.device)
        own = _rows(u, _per_example(u, rows), keep), _rows(context, _per_example(context, rows), keep)
        try:
            some, seen = block(own[0], *own[1], mode=Never())
        except Exception as error:  # whatever somebody's step makes of it
            why = f"{type(error).__name__}: {' '.join(str(error).split())}"
            raise Unsupported(f"expected steps that can run fewer examples, got {why}") from error
    expected = [*(part[keep] for part in _state.parts(output)), probs[:, keep]]
    if not all(map(_close, [*_state.parts(some), seen.probs.flatten(1)], expected)):
        what = "positions" if positions else "examples"
        raise Unsupported(f"expected steps and heads that treat {what} one by one")
    return CompactBlock(block, positions)


def _flat(value: Any, shape: torch.Size) -> Any:
    """Return what has these leading dimensions with one in their place; of a tuple, every part of it."""
    if isinstance(value, tuple):
        flat = [_flat(part, shape) for part in value]
        return value._make(flat) if hasattr(value, "_make") else tuple(flat)
    leads = isinstance(value, Tensor) and value.shape[: len(shape)] == shape
    return value.flatten(0, len(shape) - 1) if leads else value


def _close(one: Tensor, other: Tensor) -> bool:
    """Whether two results differ by rounding at most; some of a step may be infinite, or not a number."""
    if one.shape != other.shape:
        return False
    bound = 1e-3 if torch.finfo(other.dtype).bits >= 32 else 3e-2
    size = other[other.isfinite()].abs().double()
    least = bound * float(size.square().mean().sqrt()) if len(size) else 0.0
    return torch.allclose(one, other, rtol=bound, atol=least, equal_nan=True)


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
