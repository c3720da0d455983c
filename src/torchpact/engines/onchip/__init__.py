"""The engine that keeps a network on the chip: one CUDA kernel a block, its maps in shared memory."""

from torchpact.engines.onchip.calls import Args
from torchpact.engines.onchip.engine import OnChip, build, check

__all__ = ["Args", "OnChip", "build", "check"]
