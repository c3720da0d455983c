"""The engine that keeps a network on the chip: one CUDA kernel a block, its maps in shared memory."""

from torchpact.engines.conv.onchip.block import OnChipBlock
from torchpact.engines.conv.onchip.block import build as build_block
from torchpact.engines.conv.onchip.calls import Args
from torchpact.engines.conv.onchip.engine import OnChip, build, check

__all__ = ["Args", "OnChip", "OnChipBlock", "build", "build_block", "check"]
