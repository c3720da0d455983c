"""The reference of every part: the module itself, which runs whatever no engine can."""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch

from torchpact.core.block import AdaptiveBlock
from torchpact.core.call_args import CallArgs
from torchpact.core.modes import NeverHalt
from torchpact.core.ponder import Ponder
from torchpact.core.state import State
from torchpact.core.thresholds import run_bounds
from torchpact.engines.base import NO_CONTEXT, Runner
from torchpact.flops.metering import loop_of
from torchpact.specs import BlockSpec, dense_execution, gated_execution, has_gated_execution
from torchpact.specs.blocks import Bounds


class Reference(Runner):
    """Runs a part by its own forward, which reports what it did, with the thresholds of the run.

    Args:
        spec: What the part is.

    """

    def __init__(self, spec: BlockSpec) -> None:
        self.block = loop_of(spec.module) if spec.run is None else spec.run
        self.returns_ponder = spec.adaptive and spec.run is None
        # the forward of the class: that of the instance may be an engine's by now
        self.forward: Any = type(spec.module).forward.__get__(spec.module)

    def __call__(self, u: State, context: CallArgs = NO_CONTEXT, bounds: Bounds = None) -> Any:
        """Return what the part returns."""
        if bounds is None:  # entering a context takes time in small blocks
            returned = self.forward(u, *context.args, **context.kwargs)
        else:
            with run_bounds({self.block: bounds}):
                returned = self.forward(u, *context.args, **context.kwargs)
        return returned if self.returns_ponder else (returned, None)

    def accepts(self, u: State, context: CallArgs) -> bool:
        """Any call that the part takes."""
        return True


class BlockRunner(Runner):
    """Runs the steps and heads of an adaptive block as they are, and reports nothing.

    Args:
        spec: The block; its module is an :class:`~torchpact.AdaptiveBlock`.
        rows: Whether gated steps compute active rows only where an engine can, or every position.

    Example:
        >>> steps = [tp.Residual(nn.Linear(8, 8), by_position=True) for _ in range(3)]
        >>> block = tp.AdaptiveBlock(steps, nn.Linear(8, 1), mode="thresholded")
        >>> runner = BlockRunner(tp.specs.block_spec(block), rows=True)
        >>> output, ponder = runner(torch.randn(2, 5, 8))
        >>> output.shape, ponder.steps.shape
        (torch.Size([2, 5, 8]), torch.Size([2, 5, 1]))

    """

    def __init__(self, spec: BlockSpec, rows: bool = False) -> None:
        assert isinstance(spec.module, AdaptiveBlock)
        self.spec, self.block, self.host_sync = spec, spec.module, rows
        self.is_gated = any(has_gated_execution(step) for step in spec.steps)
        self.execution = gated_execution if rows else dense_execution

    @torch.no_grad()
    def __call__(
        self, u: State, context: CallArgs = NO_CONTEXT, bounds: Bounds = None
    ) -> tuple[State, Ponder]:
        """Run the block; see :class:`Runner`."""
        with self.execution() if self.is_gated else nullcontext():
            return self._run(u, context, bounds)

    def _run(self, u: State, context: CallArgs, bounds: Bounds) -> tuple[State, Ponder]:
        mode = self.spec.mode
        loop, u = self.block.iterate(
            u,
            context.args,
            context.kwargs,
            mode=mode,
            bounds=self.block.bounds_of(mode, None) if bounds is None else bounds,
            keeps_logits=self.spec.keeps_details,
        )
        output, ponder = loop.result(u)
        # not by _replace, which torch.compile of 2.11 cannot trace
        probs, steps, expected, cost, log_prob, *_ = ponder
        return output, Ponder(probs, steps, expected, cost, log_prob, None, self.spec.label, self.spec.price)

    def accepts(self, u: State, context: CallArgs) -> bool:
        """Any context that steps take."""
        return True


class AllSteps(Runner):
    """Runs all steps of a part and, of a block, asks no head: what an adaptive part is compared with.

    Args:
        spec: What the part is.
        ponders: Those of its calls in a run, returned in turn, so that the network around it goes on.

    """

    def __init__(self, spec: BlockSpec, ponders: Sequence[Ponder | None]) -> None:
        self.spec, self.ponders, self.turn = spec, ponders, 0
        self.reference = Reference(spec)

    def __call__(self, u: State, context: CallArgs = NO_CONTEXT, bounds: Bounds = None) -> Any:
        """Return the last state, and what an adaptive run did."""
        self.turn += 1
        ponder = self.ponders[self.turn % len(self.ponders) - 1]
        block = self.spec.module
        if isinstance(block, AdaptiveBlock):
            gate = None if ponder is None else torch.ones(ponder.steps.shape, device=ponder.steps.device)
            for index in range(block.max_steps):
                u = block.run_step(index, u, gate if index else None, context.args, context.kwargs)
            return u, ponder
        never = {**context.kwargs, "mode": NeverHalt()} if self.spec.heads else context.kwargs
        return self.reference(u, CallArgs(context.args, never))

    def accepts(self, u: State, context: CallArgs) -> bool:
        """Any call that the part takes."""
        return True
