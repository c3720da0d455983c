"""What a run costs, in floating-point operations."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from torchpact.block import AdaptiveBlock, Ponder
from torchpact.models.config import map_sizes
from torchpact.models.resnet import ResNet
from torchpact.models.units import Bottleneck, HaltingHead


@dataclass(frozen=True)
class FlopCount:
    """The FLOPs of a batch, image by image.

    >>> count = FlopCount(blocks=torch.tensor([[5, 2], [3, 2]]), rest=1)
    >>> count.total, count.mean.item(), count.std.item()
    (tensor([8, 6]), 7.0, 1.0)
    """

    blocks: Tensor
    """Those of each block: integers of shape (batch, number of blocks)."""
    rest: int
    """Those of all else, the same for every image."""

    @property
    def total(self) -> Tensor:
        """All FLOPs of each image: integers of shape (batch,)."""
        return self.blocks.sum(1) + self.rest

    @property
    def mean(self) -> Tensor:
        """The mean of the total over images."""
        return self.total.double().mean()

    @property
    def std(self) -> Tensor:
        """The standard deviation of the total over images, these being all there are."""
        return self.total.double().std(correction=0)


def count_flops(model: nn.Module, images: Tensor) -> FlopCount:
    """Count the FLOPs of ``model`` on each image; a multiply-add is two, and only they are counted.

    An adaptive ResNet is run on the images in its present halting mode, as in evaluation and without
    gradients; batch norm statistics stay as they are. What is charged, see :func:`flops_from_ponders`.
    Of any other module the convolutions and matrix products of one image are counted.

    >>> from torchpact.models import resnet32
    >>> count_flops(resnet32(), torch.randn(2, 3, 32, 32)).total
    tensor([137725184, 137725184])
    >>> count_flops(nn.Conv2d(3, 16, 3, padding=1), torch.randn(2, 3, 32, 32)).rest
    884736
    """
    net = _uncompiled(model)
    if isinstance(net, ResNet):
        if not net.config.adaptive:
            return flops_from_ponders(net, [], images.shape)
        with _evaluating(net):
            _, ponders = model(images)
        return flops_from_ponders(net, ponders, images.shape)
    if any(isinstance(module, AdaptiveBlock) for module in net.modules()):
        # a static estimate would be wrong without a word
        raise TypeError(
            f"expected a torchpact ResNet or a module without adaptive blocks, got {type(net).__name__}"
        )
    blocks = torch.zeros(len(images), 0, dtype=torch.long, device=images.device)
    return FlopCount(blocks, _dense_flops(net, images))


def flops_from_ponders(model: nn.Module, ponders: Sequence[Ponder], image_shape: Sequence[int]) -> FlopCount:
    """Count the FLOPs of a ResNet from the ponders of a run on images of shape (batch, 3, height, width).

    The first unit of a block is charged in full. Unit l > 1 is charged where it ran: its second
    convolution at the active positions, its first at those and their eight neighbours, which the
    second needs. The halting head after unit l < L is charged where unit l ran, so after the first
    unit everywhere: its convolution at these positions, its linear layer for an image that has any.
    The last unit has no head. Relaxed masks count where they are above zero; a position of a grouped
    network is all pixels of its patch, and that of a network per image the whole map.

    >>> from torchpact.models import psact_resnet32
    >>> model = psact_resnet32(mode="thresholded", halting_bias=50)
    >>> images = torch.zeros(1, 3, 32, 32)
    >>> logits, ponders = model(images)
    >>> count = flops_from_ponders(model, ponders, images.shape)
    >>> count.blocks, count.rest
    (tensor([[9732128, 7225408, 7151744]]), 886016)
    """
    net = _resnet(model)
    if len(image_shape) != 4:
        raise ValueError(f"expected a shape of (batch, 3, height, width), got {tuple(image_shape)}")
    batch, _, height, width = image_shape
    expected = len(net.blocks) if net.config.adaptive else 0
    if len(ponders) != expected:
        raise ValueError(f"expected {expected} ponders for {expected} adaptive blocks, got {len(ponders)}")
    if net.config.adaptive:
        steps = [ponder.steps for ponder in ponders]
    else:
        steps = [_all_steps(net, batch)] * len(net.blocks)
    for given in steps:
        if len(given) != batch:
            raise ValueError(f"expected ponders of {batch} images, got {len(given)}")
    return _count(net, steps, height, width)


def max_flops(model: nn.Module, image_shape: Sequence[int] | None = None) -> int:
    """The FLOPs of a ResNet on one image when nothing halts, halting heads included.

    ``image_shape`` ends with the height and the width; without it the image has the configured size.

    >>> from torchpact.models import psact_resnet32, resnet32
    >>> max_flops(resnet32()), max_flops(psact_resnet32())
    (137725184, 139790464)
    """
    net = _resnet(model)
    if image_shape is None:
        image_shape = (net.config.image_size, net.config.image_size)
    height, width = image_shape[-2:]
    steps = [_all_steps(net, 1).cpu()] * len(net.blocks)
    return int(_count(net, steps, height, width).total)


def _count(net: ResNet, steps: Sequence[Tensor], height: int, width: int) -> FlopCount:
    sizes = zip(map_sizes(height), map_sizes(width), strict=True)
    blocks = [_block_flops(block, s, *size) for block, s, size in zip(net.blocks, steps, sizes, strict=True)]
    rest = _price(net.stem) * height * width + _price(net.classifier)
    return FlopCount(torch.stack(blocks, 1), rest)


def _block_flops(block: Any, steps: Tensor, height: int, width: int) -> Tensor:
    """Return the FLOPs of a block for each image, from how many units ran at each position."""
    first, *others = block.steps
    heads: list[HaltingHead] = [*getattr(block, "halting", ())]  # a plain block has none
    # Unit l runs where steps ≥ l, so that Σ_l over masks is a sum of steps, and the masks dilated are
    # those of the dilated steps: one max-pooling stands for L.
    steps = _spread(steps, height, width).float()
    flops = _sum(torch.ones_like(steps)) * sum(_unit_prices(first))
    if others:
        near = F.max_pool2d(steps, 3, stride=1, padding=1)
        before, after = _unit_prices(others[0])
        flops = flops + _sum(near - 1) * before + _sum(steps - 1) * after
    if heads:
        asked = steps.clamp(max=len(heads))
        if heads[0].conv is not None:
            flops = flops + _sum(asked) * _price(heads[0].conv)
        flops = flops + asked.amax((1, 2, 3)).long() * _price(heads[0].linear)
    return flops


def _plain_flops(block: Any, height: int, width: int) -> int:
    """Return the FLOPs of a block on one image if all of its units run everywhere and nobody decides."""
    return height * width * sum(sum(_unit_prices(unit)) for unit in block.steps)


def _unit_prices(unit: Any) -> tuple[int, int]:
    """The FLOPs of a unit at one position of its output: those that neighbours need, too, and the others.

    The first convolution of a bottleneck that halves the map runs at all pixels of what it is given.
    """
    if isinstance(unit, Bottleneck):
        return unit.stride**2 * _price(unit.conv1), _price(unit.conv2) + _price(unit.conv3)
    return _price(unit.conv1), _price(unit.conv2)


def _price(layer: nn.Conv2d | nn.Linear) -> int:
    """The FLOPs of a layer at one position of its output."""
    return 2 * layer.weight.numel()


def _spread(steps: Tensor, height: int, width: int) -> Tensor:
    """Give every pixel of a map the steps of its position: itself, its patch or its image."""
    rows, columns = steps.shape[2:]
    if height % rows or width % columns:
        raise ValueError(
            f"expected ponders of a map of {height}×{width} pixels, got {rows}×{columns} positions"
        )
    steps = steps[:, :, :, None, :, None].expand(-1, -1, -1, height // rows, -1, width // columns)
    return steps.reshape(-1, 1, height, width)


def _sum(x: Tensor) -> Tensor:
    """Sum over positions, as integers: FLOPs have more digits than a float holds."""
    return x.sum((1, 2, 3), dtype=torch.long)


def _all_steps(net: ResNet, batch: int) -> Tensor:
    return torch.full((batch, 1, 1, 1), net.config.units, device=net.classifier.weight.device)


def _dense_flops(model: nn.Module, images: Tensor) -> int:
    # On a single image, as not every product need grow with the batch; of zeros if there is none
    image = images[:1] if len(images) else images.new_zeros(1, *images.shape[1:])
    with _evaluating(model), FlopCounterMode(display=False) as counter:
        model(image)
    return int(counter.get_total_flops())


def _resnet(model: nn.Module) -> ResNet:
    net = _uncompiled(model)
    if not isinstance(net, ResNet):
        raise TypeError(f"expected a torchpact ResNet, got {type(net).__name__}")
    return net


def _uncompiled(model: nn.Module) -> nn.Module:
    """Return the module that torch.compile was given, or the module itself."""
    inner = getattr(model, "_orig_mod", model)
    return inner if isinstance(inner, nn.Module) else model


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluate without gradients, then put the modules back into training where they were."""
    before = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in before:
            module.training = training
