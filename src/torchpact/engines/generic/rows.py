"""The engine "rows": gated steps compute their active rows only, a row being a token, a pixel or an example.

How steps of a kind do that is registered by :mod:`torchpact.engines.attention.rows` and
:mod:`torchpact.engines.generic.positionwise`; it holds in training, too. This engine runs a block with it.
"""

from typing import Any

import torch

from torchpact.core.block import AdaptiveBlock
from torchpact.core.call_args import CallArgs
from torchpact.core.modes import Thresholded
from torchpact.core.ponder import Ponder
from torchpact.core.state import State
from torchpact.engines.base import NO_CONTEXT, Engine, Runner, Unsupported
from torchpact.specs import (
    BlockSpec,
    NetworkSpec,
    PositionwiseResidual,
    gated_execution,
    has_gated_execution,
)
from torchpact.specs.blocks import Bounds


class RowsEngine(Engine):
    """Runs a block as it is, with gated steps that compute active rows only."""

    name = "rows"
    host_sync = True

    def concerns(self, spec: BlockSpec | NetworkSpec) -> bool:
        """Whether any step of a block, or a part of it, can skip rows."""
        if not isinstance(spec, BlockSpec) or spec.hooked:
            return False
        return any(has_gated_execution(step) for step in spec.steps)

    def supports(self, spec: BlockSpec | NetworkSpec, example: CallArgs) -> str | None:
        """Return None if any gated step of the block, or a part of it, can skip rows; else why not.

        Args:
            spec: The block.
            example: A call of it, with the state first.

        """
        if not isinstance(spec, BlockSpec):
            return "expected a block, got a network as a whole"
        block = spec.module
        if not isinstance(block, AdaptiveBlock):
            return f"expected an adaptive block, got a {type(block).__name__}"
        if type(block).forward is not AdaptiveBlock.forward or "forward" in vars(block):
            return f"expected the forward of AdaptiveBlock, got one of its own in {type(block).__name__}"
        if not spec.mode.can_exit_early:
            return f"expected a mode in which positions halt early, got {spec.mode}"
        gated = [step for step in spec.steps[1:] if has_gated_execution(step)]
        if not gated:
            kinds = "as TransformerUnit and Residual(by_position=True) do"
            return f"expected gated steps that compute active rows only, {kinds}"
        if len(example.values) > 1 and all(isinstance(step, PositionwiseResidual) for step in gated):
            return "expected residual steps by position to be given the state only, got a context"
        return None

    def build(self, spec: BlockSpec | NetworkSpec, example: CallArgs) -> "RowsRunner":
        """Return the block, run by rows.

        Raises:
            Unsupported: See :meth:`supports`.

        """
        reason = self.supports(spec, example)
        if reason is not None:
            raise Unsupported(reason)
        assert isinstance(spec, BlockSpec)
        return RowsRunner(spec)


class RowsRunner(Runner):
    """A block whose gated steps compute active rows only.

    Args:
        spec: The block; its module is an :class:`~torchpact.AdaptiveBlock`.

    Example:
        >>> steps = [tp.Residual(nn.Linear(8, 8), by_position=True) for _ in range(3)]
        >>> block = tp.AdaptiveBlock(steps, nn.Linear(8, 1), mode="thresholded")
        >>> runner = RowsRunner(tp.specs.block_spec(block))
        >>> output, ponder = runner(torch.randn(2, 5, 8))
        >>> output.shape, ponder.steps.shape
        (torch.Size([2, 5, 8]), torch.Size([2, 5, 1]))

    """

    host_sync = True

    def __init__(self, spec: BlockSpec) -> None:
        assert isinstance(spec.module, AdaptiveBlock)
        self.spec, self.block = spec, spec.module

    @torch.no_grad()
    def __call__(
        self, u: State, context: CallArgs = NO_CONTEXT, bounds: Bounds = None
    ) -> tuple[State, Ponder]:
        """Run the block, see :class:`Runner`."""
        spec = self.spec
        with gated_execution():
            loop, u = self.block.iterate(
                u,
                context.args,
                context.kwargs,
                mode=spec.mode,
                bounds=self.block.bounds_of(spec.mode, None) if bounds is None else bounds,
                keeps_logits=spec.details or not isinstance(spec.mode, Thresholded),
            )
            output, ponder = loop.result(u)
        return output, ponder._replace(name=spec.label, price=spec.price)

    def accepts(self, u: Any, context: CallArgs) -> bool:
        """Return True: steps are given what they are given in the block itself."""
        return True
