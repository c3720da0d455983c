"""The dense engine: compute everything and mask. The reference for all others, and the last resort."""

from typing import Any

import torch

from torchpact.core.block import AdaptiveBlock
from torchpact.core.ponder import Ponder
from torchpact.core.state import State
from torchpact.engines.base import CallArgs, Engine, Runner
from torchpact.engines.conv.folded import folded_block, folded_units
from torchpact.engines.conv.support import bounds_of, conv_block_problem
from torchpact.nn.conv_units import join_patches, join_ponder
from torchpact.specs import BlockSpec, NetworkSpec
from torchpact.specs.blocks import Bounds
from torchpact.specs.providers import is_changed


class Dense(Engine):
    """Blocks of any steps; those of convolutional units with their batch norms folded."""

    name = "dense"
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 1e-2}

    def supports(self, spec: BlockSpec | NetworkSpec, example: CallArgs) -> str | None:
        """Return None if it can run a block, or one line that says why not."""
        if isinstance(spec, NetworkSpec):
            return "dense: expected a block, got a network"
        if not spec.adaptive:
            return conv_block_problem(spec)
        if not isinstance(spec.module, AdaptiveBlock):
            return f"dense: expected an adaptive block, got a {type(spec.module).__name__}"
        if is_changed(spec.module):
            return f"{type(spec.module).__name__} has a forward of its own, which engines do not know"
        return None

    def build(self, spec: BlockSpec | NetworkSpec, example: CallArgs = CallArgs()) -> Runner:
        """Return the block itself, its batch norms folded where it is of convolutional units."""
        assert isinstance(spec, BlockSpec)
        return DenseRunner(spec) if spec.adaptive else plain_runner(spec)


class DenseRunner(Runner):
    """A block with a head for every decision, masked."""

    def __init__(self, spec: BlockSpec) -> None:
        module: Any = spec.module
        self.block: AdaptiveBlock = module if conv_block_problem(spec) else folded_block(spec)
        self.mode, self.details, self.joins = spec.mode, spec.keeps_details, spec.of_network

    @torch.no_grad()
    def __call__(
        self, u: State, context: CallArgs = CallArgs(), bounds: Bounds = None
    ) -> tuple[State, Ponder | None]:
        """Run the block."""
        bounds_of(self.mode, bounds, self.block.max_steps - 1)  # which may refuse
        loop, u = self.block.iterate(
            u, context.args, context.kwargs, mode=self.mode, bounds=bounds, keeps_logits=self.details
        )
        output, ponder = loop.result(u)
        if self.joins and isinstance(output, torch.Tensor):
            return join_patches(output), join_ponder(ponder)
        return output, ponder

    def accepts(self, u: State, context: CallArgs) -> bool:
        """Whether it can run such a call: whatever the steps are called with."""
        return True


def plain_runner(spec: BlockSpec) -> Runner:
    """Return all steps of a block without a decision: what an adaptive one is compared with.

    Args:
        spec: A block; its heads and mode are left out.

    Returns:
        A runner without a ponder.

    Example:
        >>> from torchpact.specs import block_spec
        >>> block = tp.AdaptiveBlock(nn.Linear(4, 4), nn.Linear(4, 1), max_steps=3)
        >>> u = torch.randn(2, 4)
        >>> output, ponder = plain_runner(block_spec(block))(u)
        >>> torch.equal(output, block.steps[0](block.steps[0](block.steps[0](u)))), ponder
        (True, None)

    """
    return PlainUnits(spec) if conv_block_problem(spec) is None else PlainSteps(spec)


class PlainUnits(Runner):
    """Convolutional units, one after the other, their batch norms folded."""

    def __init__(self, spec: BlockSpec) -> None:
        self.units = folded_units(spec)

    @torch.no_grad()
    def __call__(
        self, u: State, context: CallArgs = CallArgs(), bounds: Bounds = None
    ) -> tuple[State, Ponder | None]:
        """Run all units."""
        assert isinstance(u, torch.Tensor)
        for unit in self.units:
            u = unit(u)
        return join_patches(u), None


class PlainSteps(Runner):
    """The steps of a block of any kind, one after the other, none of which is given a mask."""

    def __init__(self, spec: BlockSpec) -> None:
        assert isinstance(spec.module, AdaptiveBlock)
        self.block = spec.module

    @torch.no_grad()
    def __call__(
        self, u: State, context: CallArgs = CallArgs(), bounds: Bounds = None
    ) -> tuple[State, Ponder | None]:
        """Run all steps."""
        for index in range(self.block.max_steps):
            u = self.block.run_step(index, u, None, context.args, context.kwargs)
        return u, None

    def accepts(self, u: State, context: CallArgs) -> bool:
        """Whether it can run such a call: whatever the steps are called with."""
        return True


DENSE = Dense()
