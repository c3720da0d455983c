"""The compact engine: where examples halt one by one, those that have leave the batch. Any steps will do."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from torchpact.core import state as _state
from torchpact.core.block import AdaptiveBlock
from torchpact.core.loop import HaltingLoop, decide
from torchpact.core.modes import Mode, Thresholded, as_mode
from torchpact.core.ponder import Ponder
from torchpact.core.state import State
from torchpact.engines.block_spec import FoldedBlock, Runner, Unsupported


class CompactBlock(nn.Module):
    """Runs an adaptive block, without gradients, on the examples that are still active.

    The heads must give one logit an example, and steps treat examples independently. Of the context, tensors
    with as many entries as the batch has lose those of halted examples too, also in tuples. Any mode in which
    examples can be done early will do: the hard ones, and ACT.

    With ``positions`` every entry of all dimensions but the last is an example of its own, as tokens are for
    steps that look at one at a time: states of shape (batch, tokens, features), logits of (batch, tokens, 1).
    ``theirs`` says what of the context belongs to examples, where lengths could mislead: a tuple of booleans,
    for tuples of such.

    >>> block = tp.AdaptiveBlock(nn.Linear(8, 8), nn.Linear(8, 1), max_steps=4, mode="thresholded")
    >>> u = torch.randn(5, 8)
    >>> with torch.no_grad():
    ...     expected, _ = block(u)
    >>> output, ponder = CompactBlock(block)(u)
    >>> torch.allclose(output, expected, atol=1e-6)
    True
    """

    waits = True  # to know who is left
    _countable = False

    def __init__(self, block: AdaptiveBlock, positions: bool = False, theirs: Any = None) -> None:
        super().__init__()
        self.block, self.positions, self.theirs = block, positions, theirs

    @torch.no_grad()
    def forward(self, u: State, *context: Any, mode: Mode | str | None = None) -> tuple[State, Ponder]:
        """Run the block on ``u``; see :class:`~torchpact.AdaptiveBlock`."""
        mode = self.block.mode if mode is None else as_mode(mode)
        if not mode.leaves:
            raise Unsupported(f"expected a mode in which examples are done early, got {mode}")
        shape = who_may_leave(u, self.positions)
        theirs = belongs(context, shape) if self.theirs is None else self.theirs
        if not self.positions:
            return self._run(u, context, theirs, mode)
        u, context = flat(u, belongs(u, shape), len(shape)), flat(context, theirs, len(shape))
        output, ponder = self._run(u, context, theirs, mode)
        output = _state.map_state(lambda part: part.unflatten(0, shape), output)
        return output, ponder.map(lambda x: x.unflatten(x.dim() - 2, shape))

    def _run(self, u: State, context: tuple[Any, ...], theirs: Any, mode: Mode) -> tuple[State, Ponder]:
        block = self.block
        keep = block.details or not isinstance(mode, Thresholded)
        loop = HaltingLoop.start(
            mode,
            block.max_steps,
            bounds=block.bounds if isinstance(mode, Thresholded) else None,
            may_stop=True,
            keeps_logits=keep,
        )
        u = block.run_step(0, u, None, context)
        logits = block.halting_logits(0, u)
        if logits.shape != _state.per_example(logits):
            raise Unsupported(f"expected one halting logit an example, got logits of {tuple(logits.shape)}")
        rows = torch.arange(len(logits), device=logits.device)
        output = _state.map_state(lambda part: torch.zeros_like(part, dtype=_kind(part, mode.hard)), u)
        for step in range(1, block.max_steps):
            if step > 1:
                found = block.halting_logits(step - 1, u)
                # decisions are made for all: draws do not depend on what has halted
                logits = torch.full_like(logits, torch.inf).index_copy_(0, rows, found)
            loop, weight = decide(loop, logits)
            if not mode.hard:
                assert weight is not None
                _add(output, rows, u, weight.index_select(0, rows))
            assert loop.gate is not None
            goes_on = (loop.gate > 0).flatten().index_select(0, rows)
            stay = goes_on.nonzero().squeeze(1)
            if stay.size(0) < rows.size(0):
                if mode.hard:
                    gone = (~goes_on).nonzero().squeeze(1)
                    output = _put(output, rows.index_select(0, gone), _state.rows_of(u, gone))
                rows, u = rows.index_select(0, stay), _state.rows_of(u, stay)
                context = rows_for(context, theirs, stay)
            if not rows.size(0):
                loop.draw_the_rest()
                break
            u = block.run_step(step, u, loop.gate.index_select(0, rows), context)
        if mode.hard:
            output = _put(output, rows, u)
        elif loop.remaining is not None:
            _add(output, rows, u, loop.remaining.index_select(0, rows))
        if loop.remaining is None:  # a single step
            loop, _ = decide(loop, logits)
        return _state.like(output, u), loop.ponder()


def who_may_leave(u: State, positions: bool) -> torch.Size:
    """Return the dimensions of examples: the batch, or with ``positions`` all but the features."""
    return _state.parts(u)[0].shape[: -1 if positions else 1]


def belongs(value: Any, shape: torch.Size) -> Any:
    """Return whether a value begins with the dimensions of the examples; of containers, for every part."""
    if isinstance(value, dict):
        return {key: belongs(part, shape) for key, part in value.items()}
    if isinstance(value, tuple | list):
        found = [belongs(part, shape) for part in value]
        return found if isinstance(value, list) else tuple(found)
    ours = isinstance(value, Tensor) and not isinstance(value, nn.Parameter)  # those are for all
    return ours and value.shape[: len(shape)] == shape


def rows_for(value: Any, theirs: Any, keep: Tensor) -> Any:
    """Return the entries to keep, of what has one for each example."""
    return mapped(value, theirs, lambda part: part.index_select(0, keep))


def flat(value: Any, theirs: Any, dimensions: int) -> Any:
    """Return what has an entry for each position with these in one dimension."""
    return mapped(value, theirs, lambda part: part.flatten(0, dimensions - 1))


def mapped(value: Any, theirs: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Return what a function makes of those parts of a value that belong to examples."""
    if isinstance(theirs, dict):
        return {key: mapped(part, theirs[key], function) for key, part in value.items()}
    if isinstance(theirs, tuple | list):
        parts = [mapped(part, own, function) for part, own in zip(value, theirs, strict=True)]
        return value._make(parts) if hasattr(value, "_make") else type(value)(parts)
    return function(value) if theirs else value


def _put(output: State, rows: Tensor, u: State) -> State:
    """Put rows into the output, in the precision that holds both."""

    def put(total: Tensor, part: Tensor) -> Tensor:
        if total.dtype != part.dtype:
            kind = torch.promote_types(total.dtype, part.dtype)
            total, part = total.to(kind), part.to(kind)
        return total.index_copy_(0, rows, part)

    return _state.map_state(put, output, u)


def _add(output: State, rows: Tensor, u: State, weight: Tensor) -> None:
    for total, part in zip(_state.parts(output), _state.parts(u), strict=True):
        total.index_add_(0, rows, weight * part)


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
