"""A single block on the chip, for networks that are not on it as a whole."""

from collections.abc import Callable

import torch
from torch import Tensor

from torchpact.core.call_args import CallArgs
from torchpact.core.ponder import Ponder
from torchpact.core.state import State
from torchpact.engines.base import NO_CONTEXT, Runner, Unsupported
from torchpact.engines.conv.onchip.calls import Kernel, Weights
from torchpact.engines.conv.onchip.kernels import Kernels
from torchpact.engines.conv.onchip.plan import HIGHEST, WIDEST, Device, Plan, candidates_of
from torchpact.nn.conv_units import join_patches
from torchpact.specs import BlockSpec
from torchpact.specs.blocks import Bounds


class OnChipBlock(Runner):
    """A block; ``load`` makes a kernel of a plan. Threads may share it."""

    def __init__(self, spec: BlockSpec, load: Callable[[Plan], Kernel], device: Device) -> None:
        self.kernels, self.name = _Kernels(spec, load, device), spec.name

    def tune(self, u: State, context: CallArgs = NO_CONTEXT) -> None:
        """For maps of this size, take the kernel that is the fastest with these.

        Raises:
            Unsupported: There is no kernel for maps of this size.

        """
        self.kernels.choose(_channels_last(u))

    def __call__(
        self, u: State, context: CallArgs = NO_CONTEXT, bounds: Bounds = None
    ) -> tuple[State, Ponder | None]:
        """Run the block.

        Raises:
            Unsupported: There is no kernel for maps of this size.

        """
        output, ponders = self.kernels.run(_channels_last(u), {self.name: bounds})
        return output.permute(0, 3, 1, 2), ponders[0] if ponders else None


class _Kernels(Kernels):
    """From map to map, channels last."""

    rows = 1

    def __init__(self, spec: BlockSpec, load: Callable[[Plan], Kernel], device: Device) -> None:
        units = spec.conv_units
        assert units is not None  # as the engine has seen
        super().__init__([Weights(spec, {})], load, device)
        self.half, self.stride = units[0].weight.dtype == torch.float16, units[0].stride

    def candidates(self, height: int, width: int, batch: int) -> list[list[Plan]]:
        """Return ways to run the block for so many maps of this size, the likeliest first."""
        weights = self.weights[0]
        if height % self.stride or width % self.stride:
            raise Unsupported(f"onchip: expected even sizes before a stride of 2, got {height}×{width}")
        height, width = height // self.stride, width // self.stride
        if width > WIDEST or height > HIGHEST:
            raise Unsupported(
                f"onchip: expected maps up to {HIGHEST} pixels high and {WIDEST} wide, got {height}×{width} "
                f"of {weights.channels} channels"
            )
        plan = Plan(
            half=self.half,
            channels=weights.channels,
            height=height,
            width=width,
            entry_stride=2 if self.stride == 2 else 0,
            last=False,
            classes=1,
            images=1,
            adaptive=weights.adaptive,
        )
        return [candidates_of(plan, batch, self.device)]


def _channels_last(u: State) -> Tensor:
    """Return maps as the kernel reads them: 16 bytes at a time."""
    assert isinstance(u, Tensor)
    u = join_patches(u).permute(0, 2, 3, 1).contiguous()
    return u if u.data_ptr() % 16 == 0 else u.clone()
