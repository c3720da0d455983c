"""The engine ``compact``: where examples or positions halt independently, halted ones leave the batch.

Any steps will do that treat examples (or positions) independently, which is tested when the engine is built.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from torchpact.core import state
from torchpact.core.block import AdaptiveBlock
from torchpact.core.call_args import CallArgs
from torchpact.core.criterion import Exit, Memory, map_memory
from torchpact.core.loop import HaltingLoop, decide
from torchpact.core.modes import Mode, Thresholded, as_mode
from torchpact.core.ponder import Ponder
from torchpact.core.state import State
from torchpact.engines.base import NO_CONTEXT, Engine, Runner, Unsupported
from torchpact.engines.conv.folded import folded_block
from torchpact.engines.conv.support import conv_block_problem
from torchpact.engines.generic.independence import check_independence
from torchpact.engines.generic.per_example import (
    example_shape,
    flat,
    has_layout,
    is_per_example,
    layout_of,
    rows,
)
from torchpact.specs import BlockSpec, NetworkSpec
from torchpact.specs.blocks import Bounds

_STATE_ALONE = [True, [], {}]
"""The layout of a call with a tensor and no context."""


class CompactRunner(Runner):
    """Runs an adaptive block, without gradients, on the examples that are still active.

    The heads must give one logit an example, and steps treat examples independently. Of the context, tensors
    with as many entries as the batch lose those of halted examples too, also in containers. Any mode in which
    examples can halt for good will do: the hard ones, and ACT.

    Args:
        block: The block.
        positions: Whether every entry of all dimensions but the last is an example of its own, as tokens are
            for steps that look at one at a time: states of shape (batch, tokens, features), logits of
            (batch, tokens, 1).
        example: A call that independence was tested on; others are accepted if they are like it.

    Example:
        >>> block = tp.AdaptiveBlock(nn.Linear(8, 8), nn.Linear(8, 1), max_steps=4, mode="thresholded")
        >>> u = torch.randn(5, 8)
        >>> with torch.no_grad():
        ...     expected, _ = block(u)
        >>> output, ponder = CompactRunner(block)(u)
        >>> torch.allclose(output, expected, atol=1e-6)
        True

    """

    host_sync = True  # for the number of active examples

    def __init__(
        self, block: AdaptiveBlock, positions: bool = False, example: tuple[State, CallArgs] | None = None
    ) -> None:
        self.block, self.positions = block, positions
        self.dimensions, self.layout, self.per_example = 0, None, None
        if example is not None:
            u, context = example
            shape = example_shape(u, positions)
            self.dimensions = state.parts(u)[0].dim()
            rest = (context.args, dict(context.kwargs))
            self.layout = layout_of((u, *rest), shape)
            self.per_example = is_per_example(rest, shape)

    def accepts(self, u: State, context: CallArgs) -> bool:
        """Whether a call is like the one that independence was tested on."""
        if self.layout is None:
            return True
        if state.parts(u)[0].dim() != self.dimensions:
            return False
        if self.layout == _STATE_ALONE and isinstance(u, Tensor):  # the usual call takes little time
            return not (context.args or context.kwargs)
        given = (u, context.args, dict(context.kwargs))
        return has_layout(self.layout, given, example_shape(u, self.positions))

    @torch.no_grad()
    def __call__(
        self,
        u: State,
        context: CallArgs = NO_CONTEXT,
        bounds: Bounds = None,
        *,
        mode: Mode | str | None = None,
    ) -> tuple[State, Ponder]:
        """Run the block on ``u``; see :class:`~torchpact.AdaptiveBlock`."""
        mode = self.block.present_mode if mode is None else as_mode(mode)
        if not mode.can_exit_early:
            raise Unsupported(f"expected a mode in which examples halt for good, got {mode}")
        shape = example_shape(u, self.positions)
        rest: tuple[Any, ...] = (context.args, dict(context.kwargs))
        per_example = is_per_example(rest, shape) if self.per_example is None else self.per_example
        if bounds is None and isinstance(mode, Thresholded):
            bounds = self.block.bounds
        if not self.positions:
            return self._run(u, rest, per_example, mode, bounds)
        u, rest = flat(u, is_per_example(u, shape), len(shape)), flat(rest, per_example, len(shape))
        output, ponder = self._run(u, rest, per_example, mode, bounds)
        output = state.map_state(lambda part: part.unflatten(0, shape), output)
        return output, ponder.map(lambda x: x.unflatten(x.dim() - 2, shape))

    def _run(
        self, u: State, rest: tuple[Any, ...], per_example: Any, mode: Mode, bounds: Bounds
    ) -> tuple[State, Ponder]:
        keep = self.block.details or not isinstance(mode, Thresholded)
        # logits of halted rows are +∞ already
        loop = HaltingLoop.start(mode, self.block.max_steps, bounds=bounds, may_stop=False, keeps_logits=keep)
        loop, output = run_compacted(self.block, u, rest, per_example, loop)
        return output, loop.ponder()


def run_compacted(
    block: AdaptiveBlock, u: State, rest: tuple[Any, ...], per_example: Any, loop: HaltingLoop
) -> tuple[HaltingLoop, State]:
    """Run a block; after each step, drop the examples that have halted from the batch.

    Args:
        block: The block, with one decision an example and steps that treat examples independently.
        u: The state to begin with.
        rest: What steps are given besides: a tuple of positional arguments, and a dictionary of named ones.
        per_example: Which parts of ``rest`` have an entry for each example, see :func:`is_per_example`.
        loop: The loop before the first step.

    Returns:
        The loop after the last decision, of all examples, and the output of the block.

    Raises:
        Unsupported: The heads give more than one logit an example.

    """
    hard = loop.rules.mode.hard
    before, u = u, block.run_step(0, u, None, *rest)
    logits, memory = block.ask(Exit(u, before, 0, context=CallArgs(*rest)))
    if logits.shape != state.per_example(logits):
        raise Unsupported(f"expected one halting logit an example, got logits of {tuple(logits.shape)}")
    if block.max_steps == 1:
        return decide(loop, logits)[0], u
    output = state.map_state(lambda part: torch.zeros_like(part, dtype=_sum_dtype(part, hard)), u)
    active: Tensor | None = None  # the rows that are left; None while all are
    for index in range(1, block.max_steps):
        if index > 1:
            # decisions are made for all examples, so that draws do not depend on which have halted
            found, memory = block.ask(Exit(u, before, index - 1, None, memory, CallArgs(*rest)))
            logits = _spread(found, active, loop)
        loop, weight = decide(loop, logits)
        assert loop.gate is not None
        assert weight is not None
        if not hard:
            _add(output, active, u, _rows(weight, active))
        gate = _rows(loop.gate, active)
        goes_on = (gate > 0).flatten()
        stay = goes_on.nonzero().squeeze(1)
        if not stay.size(0):
            loop.draw_the_rest()
            break
        if stay.size(0) < goes_on.size(0):
            if hard:
                halted = (~goes_on).nonzero().squeeze(1)
                where = halted if active is None else active.index_select(0, halted)
                output = _put(output, where, state.rows_of(u, halted))
            active = stay if active is None else active.index_select(0, stay)
            u, gate = state.rows_of(u, stay), gate.index_select(0, stay)
            rest = rows(rest, per_example, stay)
            memory = _rows_of_memory(memory, stay)
        before, u = u, block.run_step(index, u, gate, *rest)
    # of the last rows, or of those that halted last
    if hard:
        output = u if active is None else _put(output, active, u)
    else:
        assert loop.remaining is not None
        _add(output, active, u, _rows(loop.remaining, active))
    return loop, state.like(output, u)


class Compact(Engine):
    """Halted examples (or positions, where steps look at one at a time) leave the batch."""

    name = "compact"
    host_sync = True
    tolerance: ClassVar[Mapping[torch.dtype, float]] = {torch.float32: 1e-4, torch.bfloat16: 2e-2}

    def concerns(self, spec: BlockSpec | NetworkSpec) -> bool:
        """Whether a part is an adaptive block, or units that are one for engines."""
        return isinstance(spec, BlockSpec) and (
            isinstance(spec.module, AdaptiveBlock) or spec.run is not None
        )

    def supports(self, spec: BlockSpec | NetworkSpec, example: CallArgs) -> str | None:
        """Blocks with one decision an example, in a mode in which examples halt for good."""
        if not isinstance(spec, BlockSpec) or not self.concerns(spec) or not spec.heads:
            return "compact: expected an adaptive block"
        if not spec.mode.can_exit_early:
            return f"compact: expected a mode in which examples halt for good, got {spec.mode}"
        if conv_block_problem(spec) is None and any(head.taps is not None for head in spec.conv_heads or ()):
            return "compact: expected one decision an image, got one a pixel"
        return None

    def build(self, spec: BlockSpec | NetworkSpec, example: CallArgs) -> CompactRunner:
        """Return a runner, once steps are seen to treat examples, or positions, independently."""
        assert isinstance(spec, BlockSpec)
        if conv_block_problem(spec) is None:
            return CompactRunner(folded_block(spec))
        assert isinstance(spec.module, AdaptiveBlock)
        u, context = example.args[0], CallArgs(example.args[1:], dict(example.kwargs))
        positions = check_independence(spec.module, u, context)
        return CompactRunner(spec.module, positions, (u, context))


def _rows_of_memory(memory: Memory, stay: Tensor) -> Memory:
    """Return the rows of what a criterion keeps that stay."""
    return map_memory(lambda part: part.index_select(0, stay), memory)


def _rows(values: Tensor, active: Tensor | None) -> Tensor:
    """Return the active rows, or all of them."""
    return values if active is None else values.index_select(0, active)


def _spread(logits: Tensor, active: Tensor | None, loop: HaltingLoop) -> Tensor:
    """Return logits of all examples: +∞ where they are not active."""
    if active is None:
        return logits
    assert loop.remaining is not None
    return torch.full_like(loop.remaining, torch.inf).index_copy_(0, active, logits)


def _put(output: State, index: Tensor, u: State) -> State:
    """Put rows into the output, in the precision that holds both."""

    def put(total: Tensor, part: Tensor) -> Tensor:
        if total.dtype != part.dtype:
            kind = torch.promote_types(total.dtype, part.dtype)
            total, part = total.to(kind), part.to(kind)
        return total.index_copy_(0, index, part)

    return state.map_state(put, output, u)


def _add(output: State, index: Tensor | None, u: State, weight: Tensor) -> None:
    for total, part in zip(state.parts(output), state.parts(u), strict=True):
        if index is None:
            total.add_(weight * part)
        else:
            total.index_add_(0, index, (weight * part).to(total.dtype))  # under autocast


def _sum_dtype(part: Tensor, hard: bool) -> torch.dtype:
    """What to sum up in: single precision at least; one-hot weights sum up nothing."""
    return part.dtype if hard else torch.promote_types(part.dtype, torch.float32)
