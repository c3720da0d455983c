"""Maps of computation time: how much was computed at each position of an image (fig. 6)."""

from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from torchpact import ACT, AdaptiveBlock, Mode, use_mode
from torchpact.models import ResNet
from torchpact_recipes.data import as_input
from torchpact_recipes.training.state import seeded

BATCH = 100


@dataclass(frozen=True, eq=False)
class PonderMaps:
    """What the blocks of a network spent on each of B images, and all blocks together."""

    blocks: list[Tensor]
    """One map a block, (B, rows, columns), as fine as the block decides: pixels, patches, or whole images."""
    total: Tensor
    """Their sum at every pixel of the image, (B, height, width): each map as large as the image."""
    quantity: str
    """What is counted, in words."""

    def first(self, count: int) -> "PonderMaps":
        """The maps of the first images."""
        return PonderMaps([block[:count] for block in self.blocks], self.total[:count], self.quantity)

    def means(self) -> list[list[float]]:
        """The mean over the positions of each block, image by image."""
        rows: list[list[float]] = torch.stack([block.mean((1, 2)) for block in self.blocks], 1).tolist()
        return rows


@torch.no_grad()
def ponder_maps(
    model: ResNet, images: Tensor, mode: Mode | str | None = None, *, seed: int = 0
) -> PonderMaps:
    """Return the maps of images, given as bytes, in a mode or the model's own.

    A map shows what the objective charges for: the expected number of units N in Relaxed mode (eq. 24),
    the ponder cost ρ = N + R in ACT mode, which is SACT's, and the units that were run, z, in the hard
    modes. ``seed`` is that of the modes that sample; N depends on it a little, by the masks of earlier
    units.

    A position of block k stands for 2ᵏ⁻¹×2ᵏ⁻¹ pixels, times ``group`` each way, or for all of them if
    the network decides per image. The sum over blocks has the value of that position in each of its
    pixels, without smoothing, so that its mean is the sum of the blocks' means.

    >>> maps = ponder_maps(tp.models.psact_resnet32(), torch.zeros(2, 3, 32, 32, dtype=torch.uint8))
    >>> [tuple(block.shape) for block in maps.blocks], maps.total.shape, maps.quantity
    ([(2, 32, 32), (2, 16, 16), (2, 8, 8)], torch.Size([2, 32, 32]), 'expected units')
    """
    if images.dtype != torch.uint8:
        raise ValueError(f"expected images as bytes, torch.uint8; got {images.dtype}")
    if not model.config.adaptive:
        raise ValueError(
            "expected an adaptive network, got a plain one, which computes everything everywhere"
        )
    training, device = model.training, images.device
    model.eval()
    try:
        with (
            seeded(seed, device),
            nullcontext() if mode is None else use_mode(model, mode),
        ):
            parts = [[p.cost.squeeze(1) for p in model(as_input(part))[1]] for part in images.split(BATCH)]
            quantity = _quantity(model)
    finally:
        model.train(training)
    blocks = [torch.cat(block) for block in zip(*parts, strict=True)]
    height, width = images.shape[2:]
    strides = [
        max(height, width) if model.config.per == "image" else model.config.group * 2**k
        for k in range(len(blocks))
    ]
    spread = [_to_pixels(block, height, width, n) for block, n in zip(blocks, strides, strict=True)]
    return PonderMaps(blocks, torch.stack(spread).sum(0), quantity)


def _to_pixels(values: Tensor, height: int, width: int, stride: int) -> Tensor:
    """Repeat each value in the pixels it stands for; at an odd edge these are fewer."""
    larger = values.repeat_interleave(stride, 1).repeat_interleave(stride, 2)
    return larger[:, :height, :width]


def _quantity(model: ResNet) -> str:
    block = model.blocks[0]
    assert isinstance(block, AdaptiveBlock)
    if isinstance(block.mode, ACT):
        return "ponder cost"
    return "units run" if block.mode.hard else "expected units"
