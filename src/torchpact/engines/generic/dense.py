"""The dense engine: compute everything and mask. The reference for all others, and the last resort."""

from torch import Tensor

from torchpact.core.ponder import Ponder
from torchpact.engines.block_spec import FoldedBlock, Runner
from torchpact.nn.conv_units import join_patches, join_ponder


def build(block: FoldedBlock) -> Runner:
    """Return the block itself, its batch norms folded."""
    if not block.heads:
        return build_plain(block)
    adaptive = block.adaptive()

    def run(u: Tensor) -> tuple[Tensor, Ponder | None]:
        u, ponder = adaptive(u)
        return join_patches(u), join_ponder(ponder)

    return run


def build_plain(block: FoldedBlock) -> Runner:
    """Return the block run in full, without a look at its heads: what an adaptive one is compared to."""
    units = block.units

    def run(u: Tensor) -> tuple[Tensor, None]:
        for unit in units:
            u = unit(u)
        return join_patches(u), None

    return run
