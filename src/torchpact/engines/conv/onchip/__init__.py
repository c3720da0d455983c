"""The engine that keeps a network on the chip: one CUDA kernel a block, its maps in shared memory."""

from torchpact.engines.conv.onchip.block import OnChipBlock
from torchpact.engines.conv.onchip.calls import Args
from torchpact.engines.conv.onchip.engine import ONCHIP, OnChip
from torchpact.engines.conv.onchip.network import OnChipNetwork

__all__ = ["ONCHIP", "Args", "OnChip", "OnChipBlock", "OnChipNetwork"]
