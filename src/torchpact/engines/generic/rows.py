"""The engine "rows": gated steps compute their active rows only, a row being a token, a pixel or an example.

How steps of a kind do that is registered by :mod:`torchpact.engines.attention.rows` and
:mod:`torchpact.engines.generic.positionwise`; it holds in training, too. This engine runs a block with it.
"""

from torchpact.core.block import AdaptiveBlock
from torchpact.core.call_args import CallArgs
from torchpact.engines.base import Engine, Unsupported
from torchpact.engines.reference import BlockRunner
from torchpact.specs import (
    BlockSpec,
    NetworkSpec,
    PositionwiseResidual,
    has_gated_execution,
)


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

    def build(self, spec: BlockSpec | NetworkSpec, example: CallArgs) -> BlockRunner:
        """Return the block, run by rows.

        Raises:
            Unsupported: See :meth:`supports`.

        """
        reason = self.supports(spec, example)
        if reason is not None:
            raise Unsupported(reason)
        assert isinstance(spec, BlockSpec)
        return BlockRunner(spec, rows=True)
