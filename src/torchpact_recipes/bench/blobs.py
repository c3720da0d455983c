"""Networks of random weights that keep a given share of their positions active, in blobs."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from torchpact import AdaptiveBlock
from torchpact.models import HaltingHead, ResidualUnit, ResNet, ResNetConfig, build
from torchpact.nn.resnet_config import Per


def smooth_noise(batch: int, size: int, per: Per = "pixel") -> Tensor:
    """Return noise from 0 to 1 whose level sets are blobs a few pixels wide, or one number an image.

    >>> noise = smooth_noise(2, 16)
    >>> (noise < 0.25).float().mean((1, 2, 3))
    tensor([0.2500, 0.2500])
    """
    if per == "image":
        levels = (torch.randperm(batch) + 0.5) / batch
        return levels[:, None, None, None].expand(-1, 1, size, size)
    noise = torch.randn(batch, 1, size + 16, size + 16)
    noise = F.avg_pool2d(F.avg_pool2d(noise, 9, 1), 9, 1)
    ranks = noise.flatten(1).argsort(1).argsort(1).float() / size**2
    return ranks.view(batch, 1, size, size)


@torch.no_grad()
def with_blobs(config: ResNetConfig, batch: int, active: float) -> tuple[ResNet, Tensor]:
    """Return a network, and images whose pixels it keeps active in part after the first unit of each block.

    A channel of the image holds smooth noise, all residuals leave it as it is, and heads halt where it is
    above a quantile; what does not halt there runs to the end. For networks per image the noise is one
    number an image.

    >>> model, images = with_blobs(ResNetConfig(units=3), batch=2, active=0.25)
    >>> [round(float((ponder.steps == 3).float().mean()), 2) for ponder in model(images)[1]]
    [0.25, 0.25, 0.25]
    """
    torch.manual_seed(0)
    model = build(config, "thresholded").eval()
    images = torch.randn(batch, 3, config.image_size, config.image_size)
    noise = smooth_noise(batch, config.image_size, config.per)
    images[:, :1] = noise
    channel = 0
    model.stem.weight[0] = 0
    model.stem.weight[0, 0, 1, 1] = 1
    for k, block in enumerate(model.blocks):
        if k:
            noise = F.avg_pool2d(noise, 2, ceil_mode=True)
            channel += block.steps[0].padding // 2  # type: ignore[index, union-attr]
        halt_above(block, channel, 2.0 if active == 1 else float(noise.flatten().quantile(active)))
    return model, images


@torch.no_grad()
def block_with_blobs(
    channels: int, size: int, batch: int, active: float, units: int = 5
) -> tuple[AdaptiveBlock, Tensor]:
    """Return a single block, and maps whose pixels it keeps active in part after its first unit.

    >>> block, u = block_with_blobs(16, size=8, batch=2, active=0.5, units=3)
    >>> (block(u)[1].steps == 3).float().mean()
    tensor(0.5000)
    """
    torch.manual_seed(0)
    steps = [ResidualUnit(channels, channels) for _ in range(units)]
    block = AdaptiveBlock(steps, [HaltingHead(channels) for _ in steps[1:]], mode="thresholded").eval()
    u = torch.randn(batch, channels, size, size).contiguous(memory_format=torch.channels_last)
    u[:, :1] = smooth_noise(batch, size)
    # between two ranks
    halt_above(block, 0, 2.0 if active == 1 else active - 0.5 / size**2)
    return block, u


def halt_above(block: Any, channel: int, bound: float) -> None:
    """Let heads halt where a channel, which units leave as it is, exceeds a bound."""
    for unit in block.steps:
        last = getattr(unit, "conv3", unit.conv2)
        last.weight.mul_(0.1)[channel] = 0
    for head in block.halting:
        weight = head.linear.weight if head.conv is None else head.conv.weight[:, :, 1, 1]
        for each in head.parameters():
            each.zero_()
        weight[0, channel] = 100
        head.linear.bias.fill_(-100 * bound)
