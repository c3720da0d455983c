"""Pre-activation ResNets for CIFAR: plain, and adaptive per pixel or per image (section 4.1).

One class is both. A plain network and its adaptive version share stem, units and classifier under
the same names, so that the state dict of one is that of the other less the halting heads.
"""

from dataclasses import dataclass
from typing import Literal, TypedDict, Unpack

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchpact._checks import at_least_single, check_count, check_number
from torchpact.block import AdaptiveBlock, Ponder
from torchpact.modes import Mode

Per = Literal["pixel", "image"]

CHANNELS = (16, 32, 64)


@dataclass(frozen=True)
class ResNetConfig:
    """What a network is, apart from its weights; plain values, so that JSON can hold it.

    ``units`` a block, n: the network has 6n + 2 layers. ``width`` multiplies the 16, 32 and 64
    channels of the blocks. The rest concerns adaptive networks. ``per`` says what halts: a "pixel"
    (PSACT; SACT in ACT mode) or an "image" (PACT; ACT). ``group=n`` lets patches of n×n pixels share
    one decision. ``halting_norm`` puts batch norm and ReLU into the halting heads, and
    ``halting_bias`` is the initial b of their logits. ``image_size`` is what ``latents`` refers to;
    images of other sizes run too, as long as ``group`` divides their maps.

    >>> from dataclasses import asdict, replace
    >>> config = ResNetConfig(units=18, group=4)
    >>> ResNetConfig(**asdict(config)) == config
    True
    >>> plain = replace(config, adaptive=False)
    """

    units: int = 5
    width: int = 1
    classes: int = 10
    adaptive: bool = True
    per: Per = "pixel"
    group: int = 1
    halting_norm: bool = False
    halting_bias: float = -3.0
    image_size: int = 32

    def __post_init__(self) -> None:
        for name in ("adaptive", "halting_norm"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"expected {name} to be True or False, got {getattr(self, name)!r}")
        # a single unit always runs, which leaves nothing to decide
        what = "units of an adaptive network" if self.adaptive else "units"
        check_count(what, self.units, 2 if self.adaptive else 1)
        check_count("width", self.width)
        check_count("classes", self.classes)
        check_count("group", self.group)
        check_count("image_size", self.image_size)
        check_number("halting_bias", self.halting_bias, open_low=True, open_high=True)
        if self.per not in ("pixel", "image"):
            raise ValueError(f"expected per to be 'pixel' or 'image', got {self.per!r}")
        if self.per == "image" and self.group != 1:
            raise ValueError(f"expected group=1 with per='image', which has no patches; got {self.group}")
        check_group(self.group, self.image_size, self.image_size)

    @property
    def latents(self) -> int:
        """M, the number of latent variables z of one image."""
        if not self.adaptive:
            return 0
        if self.per == "image":
            return len(CHANNELS)
        return sum((size // self.group) ** 2 for size in map_sizes(self.image_size))


def map_sizes(size: int) -> tuple[int, int, int]:
    """Return the side of the maps of the three blocks, for images of side ``size``.

    >>> map_sizes(32)
    (32, 16, 8)
    """
    half = (size + 1) // 2
    return size, half, (half + 1) // 2


def check_group(group: int, height: int, width: int) -> None:
    """Refuse patches that do not tile the maps of all blocks."""
    sizes = list(zip(map_sizes(height), map_sizes(width), strict=True))
    if any(h % group or w % group for h, w in sizes):
        maps = ", ".join(f"{h}×{w}" for h, w in sizes)
        raise ValueError(f"expected a group that divides the maps of {maps} pixels, got {group}")


class ResidualUnit(nn.Module):
    """Batch norm, ReLU, 3×3 convolution, twice; what comes out is added where the gate is open (eq. 28).

    A unit of ``stride`` 2 has a shortcut without parameters: the mean over 2×2 pixels (of those there
    are, at an odd edge), with channels of zeros before and after, half of them each.

    >>> ResidualUnit(16, 32, stride=2)(torch.randn(1, 16, 8, 8)).shape
    torch.Size([1, 32, 4, 4])
    """

    gated = True

    def __init__(self, inputs: int, outputs: int, stride: int = 1, group: int = 1) -> None:
        super().__init__()
        self.norm1 = _norm(inputs)
        self.conv1 = _conv(inputs, outputs, stride)
        self.norm2 = _norm(outputs)
        self.conv2 = _conv(outputs, outputs)
        self.stride = stride
        self.padding = outputs - inputs
        self.group = group

    def forward(self, u: Tensor, gate: Tensor | None = None) -> Tensor:
        """Return u + f(u)·gate, in patches if the unit has a ``group``."""
        u = _join(u)
        residual = self.conv1(F.relu(self.norm1(u)))
        residual = self.conv2(F.relu(self.norm2(residual)))
        u, residual = _split(self.shortcut(u), self.group), _split(residual, self.group)
        return u + (residual if gate is None else residual * gate)

    def shortcut(self, u: Tensor) -> Tensor:
        """Return ``u`` in the shape of the unit's output."""
        if self.stride > 1:
            u = F.avg_pool2d(u, self.stride, ceil_mode=True)
        before = self.padding // 2
        return F.pad(u, (0, 0, 0, 0, before, self.padding - before)) if self.padding else u


class HaltingHead(nn.Module):
    """The logits W̃∗u + W·pool(u) + b of the halting map, with a 3×3 convolution W̃ (section 4.1).

    With ``per="image"`` the convolution is left out, which leaves one logit an image. With ``norm``
    batch norm and ReLU come before W̃, and others before W, as in the code of SACT. With a ``group``
    the logits are averaged within patches.

    >>> HaltingHead(16)(torch.zeros(1, 16, 8, 8)).shape
    torch.Size([1, 1, 8, 8])
    """

    def __init__(
        self, channels: int, per: Per = "pixel", group: int = 1, norm: bool = False, bias: float = -3.0
    ) -> None:
        super().__init__()
        local = per == "pixel"
        self.norm = _norm(channels) if norm and local else None
        self.conv = _conv(channels, 1) if local else None
        self.pooled_norm = _norm(channels) if norm else None
        self.linear = _linear(channels, 1, bias)
        self.group = group

    def forward(self, u: Tensor) -> Tensor:
        """Return logits that broadcast to ``u``."""
        u = _join(u)
        if self.conv is not None and self.norm is None:
            # pooling is linear: its product rides along with those of the convolution
            products = _project(u, torch.cat([self.conv.weight[0].flatten(1), self.linear.weight.t()], 1))
            logits = _gather_taps(products[:, :9]) + products[:, 9:].mean((2, 3), keepdim=True)
            logits = logits + at_least_single(self.linear.bias)
        else:
            pooled = u.mean((2, 3), keepdim=True)
            if self.pooled_norm is not None:
                pooled = F.relu(self.pooled_norm(pooled))
            logits = at_least_single(self.linear(pooled.flatten(1)))[:, :, None, None]
            if self.conv is not None and self.norm is not None:
                local = F.relu(self.norm(u))
                logits = _gather_taps(_project(local, self.conv.weight[0].flatten(1))) + logits
        return logits if self.group == 1 else _split(logits, self.group).mean((3, 5), keepdim=True)


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
        self.stem = _conv(3, channels[0])
        self.blocks = nn.ModuleList()
        for k, outputs in enumerate(channels):
            first = ResidualUnit(channels[max(k - 1, 0)], outputs, 1 if k == 0 else 2, self._group)
            others = [ResidualUnit(outputs, outputs, group=self._group) for _ in range(config.units - 1)]
            self.blocks.append(self._block([first, *others], outputs, mode))
        self.norm = _norm(channels[-1])
        self.classifier = _linear(channels[-1], config.classes)

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
        if images.dim() != 4 or images.size(1) != 3:
            raise ValueError(f"expected images of shape (batch, 3, height, width), got {tuple(images.shape)}")
        check_group(self._group, images.size(2), images.size(3))
        u = self.stem(images)
        ponders = []
        for block in self.blocks:
            if self.config.adaptive:
                u, ponder = block(u)
                ponders.append(_join_ponder(ponder) if self._group > 1 else ponder)
            else:
                u = block(u)
        pooled = F.relu(self.norm(_join(u))).mean((2, 3))
        return self.classifier(pooled), ponders


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


class Settings(TypedDict, total=False):
    """What may be set of a network whose depth is in its name; see :class:`ResNetConfig`."""

    width: int
    classes: int
    per: Per
    group: int
    halting_norm: bool
    halting_bias: float
    image_size: int


def resnet32(**settings: Unpack[Settings]) -> ResNet:
    """ResNet-32: five units a block; ``settings`` are those of :class:`ResNetConfig`.

    >>> logits, ponders = resnet32(classes=100)(torch.randn(1, 3, 32, 32))
    >>> logits.shape, ponders
    (torch.Size([1, 100]), [])
    """
    return build(ResNetConfig(units=5, adaptive=False, **settings))


def resnet110(**settings: Unpack[Settings]) -> ResNet:
    """ResNet-110: eighteen units a block; see :func:`resnet32`."""
    return build(ResNetConfig(units=18, adaptive=False, **settings))


def psact_resnet32(mode: Mode | str | None = None, **settings: Unpack[Settings]) -> ResNet:
    """ResNet-32 that decides, per pixel or per image, how many of its units to run.

    >>> model = psact_resnet32(mode="thresholded", group=2)
    >>> logits, ponders = model(torch.randn(1, 3, 32, 32))
    >>> model.latents, sum(ponder.steps.numel() for ponder in ponders)
    (336, 336)
    """
    return build(ResNetConfig(units=5, **settings), mode)


def psact_resnet110(mode: Mode | str | None = None, **settings: Unpack[Settings]) -> ResNet:
    """ResNet-110 that decides how many of its units to run; see :func:`psact_resnet32`."""
    return build(ResNetConfig(units=18, **settings), mode)


def warm_start(adaptive: ResNet, plain: ResNet) -> ResNet:
    """Copy all that ``adaptive`` shares with a trained ``plain`` network, batch norm statistics too.

    Only the halting heads are left as they are. Returns ``adaptive``.

    >>> model = warm_start(psact_resnet32(), resnet32())
    """
    for net, expected in ((adaptive, True), (plain, False)):
        if not isinstance(net, ResNet) or net.config.adaptive != expected:
            given = net.config if isinstance(net, ResNet) else type(net).__name__
            kind = "an adaptive" if expected else "a plain"
            raise ValueError(f"expected {kind} ResNet, got {given}")
    for name in ("units", "width", "classes"):
        ours, theirs = getattr(adaptive.config, name), getattr(plain.config, name)
        if ours != theirs:
            raise ValueError(f"expected networks of equal {name}, got {ours} adaptive and {theirs} plain")
    heads = {key: value for key, value in adaptive.state_dict().items() if ".halting." in key}
    adaptive.load_state_dict(plain.state_dict() | heads)
    return adaptive


# A 3×3 convolution to a single channel leaves a GPU's matrix units idle: cuDNN's takes half as long as a
# whole unit's. One product with all nine taps, added up where they belong, makes a relaxed training step of
# ResNet-32 1.29 times the plain one instead of 1.68 times (benchmarks/training.py).


def _project(u: Tensor, weight: Tensor) -> Tensor:
    """Multiply the channels of ``u`` by a (channels, n) matrix at every position; in single precision."""
    if u.is_contiguous(memory_format=torch.channels_last) and not u.is_contiguous():
        product = (u.permute(0, 2, 3, 1) @ weight).permute(0, 3, 1, 2)
    else:
        product = (weight.t() @ u.flatten(2)).unflatten(2, u.shape[2:])
    return at_least_single(product)


def _gather_taps(products: Tensor) -> Tensor:
    """Add the nine products of each pixel's 3×3 neighbours, row by row, as the convolution would."""
    height, width = products.shape[2:]
    padded = F.pad(products, (1, 1, 1, 1))
    taps = [(i, j) for i in range(3) for j in range(3)]
    shifted = [padded[:, t : t + 1, i : i + height, j : j + width] for t, (i, j) in enumerate(taps)]
    return torch.stack(shifted).sum(0)


# Decisions are made per patch by way of views. A state (B, C, H, W) seen as (B, C, H/n, n, W/n, n) has
# patches as positions: logits of (B, 1, H/n, 1, W/n, 1) broadcast to it, which is all a block asks.


def _split(x: Tensor, group: int) -> Tensor:
    """View maps as patches of group×group pixels."""
    if group == 1:
        return x
    rows, columns = x.size(2) // group, x.size(3) // group
    patches: Tensor = x.unflatten(3, (columns, group)).unflatten(2, (rows, group))
    return patches


def _join(x: Tensor) -> Tensor:
    """View patches as maps again; maps stay as they are."""
    return x.flatten(4).flatten(2, 3) if x.dim() == 6 else x


def _join_ponder(ponder: Ponder) -> Ponder:
    """Take the in-patch dimensions, which are of size 1, out of the positions."""
    # a list, since torch.compile of 2.11 fails on a generator here
    return Ponder._make([x.squeeze(-1).squeeze(-2) if isinstance(x, Tensor) else x for x in ponder])


def _norm(channels: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(channels, eps=1e-3, momentum=0.1)


def _conv(inputs: int, outputs: int, stride: int = 1) -> nn.Conv2d:
    conv = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
    nn.init.kaiming_normal_(conv.weight, nonlinearity="relu")
    return conv


def _linear(inputs: int, outputs: int, bias: float = 0.0) -> nn.Linear:
    linear = nn.Linear(inputs, outputs)
    nn.init.kaiming_normal_(linear.weight, nonlinearity="relu")
    nn.init.constant_(linear.bias, bias)
    return linear
