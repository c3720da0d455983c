"""What a run costs, in floating-point operations."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torchpact.core.ponder import Ponder
from torchpact.flops.call_capture import arguments, leading
from torchpact.flops.conv import block_flops, price
from torchpact.flops.metering import metered
from torchpact.nn.resnet import ResNet
from torchpact.nn.resnet_config import map_sizes


@dataclass(frozen=True, repr=False)
class FlopCount:
    """The FLOPs of a batch, image by image, or example by example.

    >>> count = FlopCount(blocks=torch.tensor([[5, 2], [3, 2]]), rest=1)
    >>> count.total, count.mean.item(), count.std.item()
    (tensor([8, 6]), 7.0, 1.0)
    >>> count
    FlopCount(mean=7, std=1, mean of blocks=[4, 2], rest=1, examples=2)
    """

    blocks: Tensor
    """Those of each block: integers of shape (batch, number of blocks)."""
    rest: int
    """Those of all else, the same for every image."""

    def __repr__(self) -> str:
        blocks = ", ".join(f"{mean:,.0f}" for mean in self.blocks.double().mean(0).tolist())
        return (
            f"FlopCount(mean={float(self.mean):,.0f}, std={float(self.std):,.0f}, "
            f"mean of blocks=[{blocks}], rest={self.rest:,}, examples={len(self.blocks)})"
        )

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


def count_flops(model: nn.Module, inputs: Any, *, kwargs: Mapping[str, Any] | None = None) -> FlopCount:
    """Count the FLOPs of ``model`` on each example; a multiply-add is two, and only they are counted.

    The model is run in its present halting mode, see :class:`use_mode`, as in evaluation and without
    gradients; batch norm statistics stay as they are. What an adaptive ResNet is charged, see
    :func:`flops_from_ponders`; a block of residual units in any other network likewise.

    Of other adaptive blocks every step and head is metered where nobody halts, and charged for the share of
    an example's positions that ran it; what a step needs of positions that have halted comes besides, and is
    not known, unless a price is registered (``torchpact.specs.register_price``), or the step is a
    :class:`~torchpact.models.TransformerUnit`. Of
    recurrent layers every time step is charged for its iterations. Everything else is the same for all
    examples. ``inputs`` is what the model is called with, a tuple being several arguments, and ``kwargs``
    what it is given by name; the first dimension of the first tensor is the batch. While it counts, nobody
    else may call the model.

    >>> from torchpact.models import resnet32
    >>> count_flops(resnet32(), torch.randn(2, 3, 32, 32)).total
    tensor([137725184, 137725184])
    >>> count_flops(nn.Conv2d(3, 16, 3, padding=1), torch.randn(2, 3, 32, 32)).rest
    884736
    >>> step, head = nn.Linear(8, 8), lambda u: u[:, :1]
    >>> block = tp.AdaptiveBlock(step, head, max_steps=4, mode="thresholded")
    >>> _ = nn.init.eye_(step.weight), nn.init.ones_(step.bias)  # it counts
    >>> count_flops(block, torch.tensor([[-2.5], [-0.5]]).expand(2, 8)).total // (2 * 8 * 8)
    tensor([3, 1])
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected an nn.Module, got a {type(model).__name__}")
    net = uncompiled(model)
    given = arguments(inputs, kwargs)
    first = leading(given)
    for module in net.modules():
        if getattr(module, "_countable", True) is False:
            raise TypeError(
                f"expected the model itself, got a {type(module).__name__}: count before it is deployed"
            )
    if isinstance(net, ResNet) and len(given.inputs) == 1 and not given.named:
        images = first
        if not net.config.adaptive:
            return flops_from_ponders(net, [], images.shape)
        with _evaluating(net):
            _, ponders = model(images)
        return flops_from_ponders(net, ponders, images.shape)
    with _evaluating(net):
        spent, rest = metered(net, given)
    if spent:
        return FlopCount(torch.stack([each.flops for each in spent.values()], 1), rest)
    return FlopCount(torch.zeros(len(first), 0, dtype=torch.long, device=first.device), rest)


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
    blocks = [block_flops(block, s, *size) for block, s, size in zip(net.blocks, steps, sizes, strict=True)]
    rest = price(net.stem) * height * width + price(net.classifier)
    return FlopCount(torch.stack(blocks, 1), rest)


def _all_steps(net: ResNet, batch: int) -> Tensor:
    return torch.full((batch, 1, 1, 1), net.config.units, device=net.classifier.weight.device)


def _resnet(model: nn.Module) -> ResNet:
    net = uncompiled(model)
    if not isinstance(net, ResNet):
        raise TypeError(f"expected a torchpact ResNet, got {type(net).__name__}")
    return net


def uncompiled(model: nn.Module) -> nn.Module:
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
