"""A pre-activation ResNet of bottleneck units for large images, with random weights and set active pixels."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchpact import AdaptiveBlock
from torchpact.engines.conv.folded import folded_units
from torchpact.models import Bottleneck, HaltingHead
from torchpact.nn.conv_units import activated, make_linear, make_norm
from torchpact.specs import block_spec
from torchpact_recipes.bench.blobs import halt_above, smooth_noise

UNITS = (3, 4, 6, 3)
CHANNELS = (256, 512, 1024, 2048)


class _Frame(nn.Module):
    """What comes before the blocks of a network, and after them."""

    stem: nn.Conv2d
    norm: nn.BatchNorm2d
    classifier: nn.Linear

    def enter(self, images: Tensor) -> Tensor:
        """Return what the first block is given."""
        return F.max_pool2d(self.stem(images), 3, stride=2, padding=1)

    def leave(self, u: Tensor) -> Tensor:
        """Return the logits of what the last block gave."""
        logits: Tensor = self.classifier(activated(self.norm, u).mean((2, 3)))
        return logits


class BottleneckNet(_Frame):
    """A network much like ResNet-50: 7×7 stem, pooling, four blocks of bottleneck units, 1000 classes.

    >>> net = BottleneckNet(units=(2, 2), channels=(64, 128))
    >>> [ponder.steps.shape for ponder in net(torch.randn(1, 3, 32, 32))[1]]
    [torch.Size([1, 1, 8, 8]), torch.Size([1, 1, 4, 4])]
    """

    def __init__(self, units: tuple[int, ...] = UNITS, channels: tuple[int, ...] = CHANNELS) -> None:
        super().__init__()
        inputs = channels[0] // 4
        self.stem = nn.Conv2d(3, inputs, 7, stride=2, padding=3, bias=False)
        self.blocks = nn.ModuleList()
        for k, (count, outputs) in enumerate(zip(units, channels, strict=True)):
            first = Bottleneck(inputs, outputs, 2 if k else 1)
            steps = [first, *(Bottleneck(outputs, outputs) for _ in range(count - 1))]
            heads = [HaltingHead(outputs) for _ in steps[1:]]
            self.blocks.append(AdaptiveBlock(steps, heads, mode="thresholded"))
            inputs = outputs
        self.norm = make_norm(inputs)
        self.classifier = make_linear(inputs, 1000)

    def forward(self, images: Tensor) -> tuple[Tensor, list[Any]]:
        """Return the logits of the classes, and what each block did."""
        u, ponders = self.enter(images), []
        for block in self.blocks:
            u, ponder = block(u)
            ponders.append(ponder)
        return self.leave(u), ponders


class PlainBottlenecks(_Frame):
    """The same network without decisions, with the units as they are or with batch norms folded."""

    def __init__(self, net: BottleneckNet, folded: bool) -> None:
        super().__init__()
        self.stem, self.norm, self.classifier = net.stem, net.norm, net.classifier
        blocks: Any = net.blocks
        self.units = nn.Sequential(
            *(
                unit
                for block in blocks
                for unit in (folded_units(block_spec(block)) if folded else block.steps)
            )
        )

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits of the classes."""
        return self.leave(self.units(self.enter(images)))


@torch.no_grad()
def bottlenecks_with_blobs(
    batch: int, active: float, size: int = 224, **settings: Any
) -> tuple[BottleneckNet, Tensor]:
    """Return a network, and images whose pixels it keeps active in part after the first unit of each block.

    >>> net, images = bottlenecks_with_blobs(2, 0.5, 64, units=(2, 2), channels=(64, 128))
    >>> [round(float((ponder.steps == 2).float().mean()), 1) for ponder in net(images)[1]]
    [0.5, 0.5]
    """
    torch.manual_seed(0)
    net = BottleneckNet(**settings).eval()
    images = torch.randn(batch, 3, size, size)
    images[:, :1] = F.interpolate(smooth_noise(batch, -(-size // 4)), size)  # as large as in the first block
    net.stem.weight[0] = 0
    net.stem.weight[0, 0, 3, 3] = 1
    noise = F.max_pool2d(images[:, :1, ::2, ::2], 3, stride=2, padding=1)
    channel = 0
    for block in net.blocks:
        first: Any = block.steps[0]  # type: ignore[index]
        if first.stride > 1:
            noise = F.avg_pool2d(noise, 2, ceil_mode=True)
        channel += first.padding // 2
        halt_above(block, channel, 2.0 if active == 1 else float(noise.flatten().quantile(active)))
    return net, images
