"""The dense engine by torch.compile: everything is computed and masked, by kernels made for the block.

Masks become part of the kernels around them, so that little but the heads is added to the plain network. It
takes minutes to compile, for on a GPU convolutions are tried out.
"""

import torch
from torch import Tensor

from torchpact.core.modes import Discrete
from torchpact.core.ponder import Ponder
from torchpact.engines.block_spec import FoldedBlock, Runner, Unsupported
from torchpact.engines.generic import dense


def build(block: FoldedBlock) -> Runner:
    """Return the block compiled, for maps of the size that comes first."""
    if block.heads and isinstance(block.mode, Discrete):
        raise Unsupported(f"compiled: expected a mode that draws nothing, got {block.mode}")
    return Compiled(dense.build(block), block.weight.device)


class Compiled:
    """A block for maps of one size and layout; others run as they are: compiling takes long."""

    def __init__(self, run: Runner, device: torch.device) -> None:
        self.run = run
        mode = "max-autotune-no-cudagraphs" if device.type == "cuda" else None
        self.compiled = torch.compile(run, mode=mode, dynamic=False)
        self.known: object = None

    def __call__(self, u: Tensor) -> tuple[Tensor, Ponder | None]:
        """Run the block."""
        with torch.inference_mode(False), torch.no_grad():  # it would be compiled anew for inference mode
            if u.is_inference():
                u = u.clone()
            kind = u.shape, u.stride()
            if self.known is None:
                self.known = kind
            return (self.compiled if kind == self.known else self.run)(u)
