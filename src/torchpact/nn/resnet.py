"""Pre-activation ResNets for CIFAR: plain, and adaptive per pixel or per image (section 4.1).

One class is both. A plain network and its adaptive version share stem, units and classifier under
the same names, so that the state dict of one is that of the other less the halting heads.
"""

from dataclasses import replace
from functools import partial

from torch import Tensor, nn

from torchpact.core.block import AdaptiveBlock
from torchpact.core.modes import Mode, Thresholded
from torchpact.core.ponder import Ponder
from torchpact.nn.conv_specs import conv_of, linear_of, norm_of
from torchpact.nn.conv_units import (
    HaltingHead,
    ResidualUnit,
    activated,
    join_patches,
    join_ponder,
    make_conv,
    make_linear,
    make_norm,
)
from torchpact.nn.resnet_config import CHANNELS, ResNetConfig, check_group
from torchpact.specs import BlockSpec, NetworkSpec, block_spec, register_block, register_network, step_spec
from torchpact.specs.providers import is_watched


class PlainBlock(nn.Module):
    """Units one after the other, held under the same name as in an adaptive block."""

    def __init__(self, steps: list[ResidualUnit]) -> None:
        super().__init__()
        self.steps = nn.ModuleList(steps)

    def forward(self, u: Tensor) -> Tensor:
        """Run all units."""
        for unit in self.steps:
            u = unit(u)
        return u


class ResNet(nn.Module):
    """A CIFAR ResNet of any size, plain or adaptive; the signature is the same.

    Adaptive networks return a :class:`~torchpact.Ponder` per block, whose positions are of shape
    (batch, 1, height, width) of the block's maps, divided by ``group``, or (batch, 1, 1, 1) per image.
    Plain ones return none. Convolution and linear weights are drawn by He's variance scaling, normal
    and by fan-in; halting heads have them too.

    >>> model = ResNet(ResNetConfig(units=2), mode="thresholded")
    >>> logits, ponders = model(torch.randn(1, 3, 32, 32))
    >>> logits.shape, [tuple(ponder.steps.shape) for ponder in ponders]
    (torch.Size([1, 10]), [(1, 1, 32, 32), (1, 1, 16, 16), (1, 1, 8, 8)])
    """

    def __init__(self, config: ResNetConfig, mode: Mode | str | None = None) -> None:
        super().__init__()
        self.config = config
        channels = [c * config.width for c in CHANNELS]
        self.stem = make_conv(3, channels[0])
        self.blocks = nn.ModuleList()
        for k, outputs in enumerate(channels):
            first = ResidualUnit(channels[max(k - 1, 0)], outputs, 1 if k == 0 else 2, self._group)
            others = [ResidualUnit(outputs, outputs, group=self._group) for _ in range(config.units - 1)]
            self.blocks.append(self._block([first, *others], outputs, mode))
        self.norm = make_norm(channels[-1])
        self.classifier = make_linear(channels[-1], config.classes)

    def _block(self, units: list[ResidualUnit], channels: int, mode: Mode | str | None) -> nn.Module:
        config = self.config
        if not config.adaptive:
            return PlainBlock(units)
        heads = [
            HaltingHead(channels, config.per, config.group, config.halting_norm, config.halting_bias)
            for _ in units[1:]
        ]
        return AdaptiveBlock(units, heads, mode=mode)

    @property
    def _group(self) -> int:
        return self.config.group if self.config.adaptive else 1

    @property
    def latents(self) -> int:
        """M, the number of latent variables z of one image of the configured size."""
        return self.config.latents

    def extra_repr(self) -> str:
        """Return the configuration for ``print(model)``."""
        return repr(self.config)

    def forward(self, images: Tensor) -> tuple[Tensor, list[Ponder]]:
        """Return the logits of the classes, and what each adaptive block did."""
        check_images(images, self._group)
        u = self.stem(images)
        ponders = []
        for block in self.blocks:
            if self.config.adaptive:
                u, ponder = block(u)
                ponders.append(join_ponder(ponder) if self._group > 1 else ponder)
            else:
                u = block(u)
        pooled = activated(self.norm, join_patches(u)).mean((2, 3))
        return self.classifier(pooled), ponders


def check_images(images: Tensor, group: int = 1) -> None:
    """Refuse images of a wrong shape, or whose maps patches of group×group pixels do not tile."""
    if not isinstance(images, Tensor):
        raise TypeError(f"expected a tensor of images, got a {type(images).__name__}")
    if images.dim() != 4 or images.size(1) != 3:
        raise ValueError(f"expected images of shape (batch, 3, height, width), got {tuple(images.shape)}")
    check_group(group, images.size(2), images.size(3))


@register_block(PlainBlock)
def plain_block(block: PlainBlock) -> BlockSpec:
    """Return the spec of a block that is not adaptive.

    >>> spec = plain_block(PlainBlock([ResidualUnit(16, 16), ResidualUnit(16, 16)]))
    >>> spec.max_steps, spec.heads, spec.adaptive
    (2, (), False)
    """
    steps = [step_spec(step, f"step {n}") for n, step in enumerate(block.steps, start=1)]
    return BlockSpec(block, tuple(steps), (), Thresholded())


@register_network(ResNet)
def resnet(net: ResNet) -> NetworkSpec:
    """Return the spec of a network whose stem, blocks, norm and classifier are as the class makes them.

    >>> spec = resnet(ResNet(ResNetConfig(units=2, group=2)))
    >>> [block.name for block in spec.blocks], spec.blocks[0].heads[0].group
    (['blocks.0', 'blocks.1', 'blocks.2'], 2)
    """
    for block in net.blocks:
        kind = AdaptiveBlock if net.config.adaptive else PlainBlock
        if type(block) is not kind or "forward" in vars(block) or is_watched(block):
            raise TypeError(f"expected blocks as the network makes them, got a {type(block).__name__}")
    blocks = [replace(block_spec(block), name=f"blocks.{k}") for k, block in enumerate(net.blocks)]
    channels = [count * net.config.width for count in CHANNELS]
    return NetworkSpec(
        module=net,
        stem=conv_of(net.stem, 3, channels[0], 3),
        blocks=tuple(blocks),
        norm=norm_of(net.norm, channels[-1]),
        classifier=linear_of(net.classifier, channels[-1], net.config.classes),
        image_size=net.config.image_size,
        check=partial(check_images, group=net.config.group if net.config.adaptive else 1),
    )


def build(config: ResNetConfig, mode: Mode | str | None = None) -> ResNet:
    """Build a network from its description, such as a checkpoint holds.

    >>> import json
    >>> model = build(ResNetConfig(**json.loads('{"units": 2, "group": 8}')), mode="discrete")
    >>> model.latents
    21
    """
    if not isinstance(config, ResNetConfig):
        raise TypeError(f"expected a ResNetConfig, got {type(config).__name__}")
    return ResNet(config, mode)


def warm_start(adaptive: ResNet, plain: ResNet) -> ResNet:
    """Copy all that ``adaptive`` shares with a trained ``plain`` network, batch norm statistics too.

    Only the halting heads are left as they are; a network without any goes on as ``plain`` was. Returns
    ``adaptive``.

    >>> model = warm_start(tp.models.psact_resnet32(), tp.models.resnet32())
    """
    for net, kind in ((adaptive, "a ResNet"), (plain, "a plain ResNet")):
        if not isinstance(net, ResNet):
            raise ValueError(f"expected {kind}, got {type(net).__name__}")
    if plain.config.adaptive:
        raise ValueError("expected a plain ResNet, got an adaptive ResNet")
    if adaptive.config.units != plain.config.units:
        ours, theirs = (f"a ResNet-{net.config.layers}" for net in (adaptive, plain))
        raise ValueError(f"expected networks of equal depth, got {ours} and {theirs} to start from")
    for name in ("width", "classes"):
        ours, theirs = getattr(adaptive.config, name), getattr(plain.config, name)
        if ours != theirs:
            raise ValueError(f"expected networks of equal {name}, got {ours} and {theirs} to start from")
    heads = {key: value for key, value in adaptive.state_dict().items() if ".halting." in key}
    adaptive.load_state_dict(plain.state_dict() | heads)
    return adaptive
