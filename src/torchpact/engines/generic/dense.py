"""The dense engine: compute everything and mask. The reference for all others, and the last resort."""

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from torchpact.core.block import AdaptiveBlock
from torchpact.core.call_args import CallArgs
from torchpact.core.ponder import Ponder
from torchpact.core.state import State
from torchpact.engines.base import NO_CONTEXT, Engine, Runner
from torchpact.engines.conv.folded import folded_block, folded_units
from torchpact.engines.conv.support import bounds_of, conv_block_problem
from torchpact.engines.reference import AllSteps, BlockRunner, Reference
from torchpact.specs import BlockSpec, NetworkSpec
from torchpact.specs.blocks import Bounds


class Dense(Engine):
    """Blocks of convolutional units with their batch norms folded; any other part by its own forward."""

    name = "dense"
    tolerance: ClassVar[Mapping[torch.dtype, float]] = {
        torch.float64: 1e-12,
        torch.float32: 1e-5,
        torch.float16: 1e-2,
        torch.bfloat16: 1e-2,
    }

    def supports(self, spec: BlockSpec | NetworkSpec, example: CallArgs) -> str | None:
        """Return None for a part of a network, whatever it is."""
        return "dense: expected a block, got a network" if isinstance(spec, NetworkSpec) else None

    def build(self, spec: BlockSpec | NetworkSpec, example: CallArgs = NO_CONTEXT) -> Runner:
        """Return a runner that computes every step everywhere, and masks."""
        assert isinstance(spec, BlockSpec)
        if conv_block_problem(spec) is None:
            return FoldedRunner(spec) if spec.adaptive else PlainUnits(spec)
        return BlockRunner(spec) if isinstance(spec.module, AdaptiveBlock) else Reference(spec)

    def build_plain(self, spec: BlockSpec, ponders: Sequence[Ponder | None] = ()) -> Runner:
        """Return what runs all steps of a part without decisions: what an adaptive one is compared with.

        Args:
            spec: The part.
            ponders: Returned in turn, so that a network around it goes on.

        Returns:
            A runner; of convolutional units with their batch norms folded.

        Example:
            >>> from torchpact.models import HaltingHead, ResidualUnit
            >>> from torchpact.specs import block_spec
            >>> block = tp.AdaptiveBlock([ResidualUnit(16, 16) for _ in "ab"], [HaltingHead(16)]).eval()
            >>> u = torch.randn(1, 16, 4, 4)
            >>> output, _ = DENSE.build_plain(block_spec(block))(u)
            >>> torch.allclose(output, block.steps[1](block.steps[0](u)), atol=1e-4)
            True

        """
        if conv_block_problem(spec) is None:
            return PlainUnits(spec, ponders)
        return AllSteps(spec, ponders or [None])


class FoldedRunner(Runner):
    """A block of convolutional units with their batch norms folded, masked by its halting loop."""

    def __init__(self, spec: BlockSpec) -> None:
        self.block, self.mode, self.details = folded_block(spec), spec.mode, spec.keeps_details

    @torch.no_grad()
    def __call__(
        self, u: State, context: CallArgs = NO_CONTEXT, bounds: Bounds = None
    ) -> tuple[State, Ponder | None]:
        """Run the block."""
        bounds_of(self.mode, bounds, self.block.max_steps - 1)  # which may refuse
        loop, u = self.block.iterate(u, mode=self.mode, bounds=bounds, keeps_logits=self.details)
        return loop.result(u)


class PlainUnits(Runner):
    """Convolutional units, one after the other, with their batch norms folded.

    Args:
        spec: The block; its heads and mode do not matter.
        ponders: Returned in turn; without, there are none.

    """

    def __init__(self, spec: BlockSpec, ponders: Sequence[Ponder | None] = ()) -> None:
        self.units, self.ponders, self.turn = folded_units(spec), ponders or [None], 0

    @torch.no_grad()
    def __call__(
        self, u: State, context: CallArgs = NO_CONTEXT, bounds: Bounds = None
    ) -> tuple[State, Ponder | None]:
        """Run all units."""
        assert isinstance(u, Tensor)
        self.turn += 1
        for unit in self.units:
            u = unit(u)
        return u, self.ponders[self.turn % len(self.ponders) - 1]


DENSE = Dense()
