"""What a ResNet for CIFAR is, apart from its weights."""

from dataclasses import dataclass
from typing import Literal

from torchpact.checks import MOST, check_count, check_number

Per = Literal["pixel", "image"]

CHANNELS = (16, 32, 64)
MOST_BIAS = 1e18
"""Of a halting head, at first: more than that does not fit into all numbers of torch."""


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
        check_count(what, self.units, 2 if self.adaptive else 1, 1000)
        check_count("width", self.width, maximum=MOST)
        check_count("classes", self.classes, maximum=MOST)
        check_count("group", self.group, maximum=MOST)
        check_count("image_size", self.image_size, maximum=MOST)
        check_number("halting_bias", self.halting_bias, -MOST_BIAS, MOST_BIAS)
        if self.per not in ("pixel", "image"):
            raise ValueError(f"expected per to be 'pixel' or 'image', got {self.per!r}")
        if self.per == "image" and self.group != 1:
            raise ValueError(f"expected group=1 with per='image', which has no patches; got {self.group}")
        check_group(self.group, self.image_size, self.image_size)

    @property
    def layers(self) -> int:
        """The number in the network's name: 32 for five units a block.

        >>> ResNetConfig(units=18).layers
        110
        """
        return 6 * self.units + 2

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
