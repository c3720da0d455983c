"""A single block on the chip, for networks that are not on it as a whole."""

from collections.abc import Callable

import torch
from torch import Tensor

from torchpact.core.ponder import Ponder
from torchpact.engines.block_spec import FoldedBlock, Unsupported
from torchpact.engines.conv.onchip import engine
from torchpact.engines.conv.onchip.calls import Kernel, Weights
from torchpact.engines.conv.onchip.engine import Kernels, on_device
from torchpact.engines.conv.onchip.plan import HIGHEST, WIDEST, Device, Plan, candidates_of
from torchpact.engines.generic import dense


def build(block: FoldedBlock) -> "OnChipBlock":
    """Return a runner of a block on a GPU."""
    check(block)
    return OnChipBlock(block, *on_device(block.weight.device))


def check(block: FoldedBlock) -> None:
    """Refuse what the kernel does not know of single blocks."""
    engine.check(block)
    if block.bottleneck:
        raise Unsupported("onchip: expected units of two 3×3 convolutions, got bottlenecks")
    first = block.units[0]
    same, doubled = (first.stride, first.padding) == (1, 0), 2 * first.padding == block.channels > 16
    if not (same or (first.stride == 2 and doubled)):
        raise Unsupported(
            "onchip: expected a first unit of stride 1, or one of stride 2 that doubles 16 channels or more; "
            f"got stride {first.stride} from {block.channels - first.padding} to {block.channels}"
        )


class OnChipBlock:
    """A block; maps of a size that does not fit are run by the dense engine."""

    def __init__(self, block: FoldedBlock, load: Callable[[Plan], Kernel], device: Device) -> None:
        self.kernels, self.dense = _Kernels(block, load, device), dense.build(block)

    def tune(self, u: Tensor) -> None:
        """For maps of this size, take the kernel that is the fastest with these, if any."""
        self.kernels.tune(_channels_last(u))

    def __call__(self, u: Tensor) -> tuple[Tensor, Ponder | None]:
        """Run the block."""
        try:
            output, ponders = self.kernels(_channels_last(u))
        except Unsupported:
            return self.dense(u)
        return output.permute(0, 3, 1, 2), ponders[0] if ponders else None


class _Kernels(Kernels):
    """From map to map, channels last."""

    rows = 1

    def __init__(self, block: FoldedBlock, load: Callable[[Plan], Kernel], device: Device) -> None:
        super().__init__([Weights(block, {})], load, device)
        self.half, self.stride = block.weight.dtype == torch.float16, block.units[0].stride

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


def _channels_last(u: Tensor) -> Tensor:
    """Return maps as the kernel reads them: 16 bytes at a time."""
    u = u.permute(0, 2, 3, 1).contiguous()
    return u if u.data_ptr() % 16 == 0 else u.clone()
