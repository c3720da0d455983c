"""The reference of every part: the module itself, which runs whatever no engine can."""

from collections.abc import Sequence
from contextlib import ExitStack
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
from torchpact.specs import BlockSpec, dense_execution, has_gated_execution
from torchpact.specs.blocks import Bounds


class Reference(Runner):
    """Runs a part by its own forward, with the thresholds of the run.

    Args:
        spec: What the part is.
        dense: Whether gated steps compute every position, where engines could skip some.

    """

    def __init__(self, spec: BlockSpec, dense: bool = False) -> None:
        self.adaptive, self.block = spec.adaptive, loop_of(spec.module)
        self.dense = dense and any(has_gated_execution(step) for step in spec.steps)
        # the forward of the class: that of the instance may be an engine's by now
        self.forward: Any = type(spec.module).forward.__get__(spec.module)

    def __call__(self, u: State, context: CallArgs = NO_CONTEXT, bounds: Bounds = None) -> Any:
        """Return what the part returns."""
        if bounds is None and not self.dense:  # what is entered takes time in small blocks
            returned = self.forward(u, *context.args, **context.kwargs)
            return returned if self.adaptive else (returned, None)
        with ExitStack() as stack:
            if bounds is not None:
                stack.enter_context(run_bounds({self.block: bounds}))
            if self.dense:
                stack.enter_context(dense_execution())
            returned = self.forward(u, *context.args, **context.kwargs)
        return returned if self.adaptive else (returned, None)

    def accepts(self, u: State, context: CallArgs) -> bool:
        """Any call that the part takes."""
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
