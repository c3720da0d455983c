"""How the kernel of a block is cut: images for a CTA, tiles for a warp, and the shared memory that takes."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from torchpact.engines.folding import Unsupported

SHARED_LIMIT = 227 * 1024
"""What a CTA may have where a multiprocessor has most: 163 KB on sm_80, 227 KB on sm_90."""


def _plane(pixels: int, chunks: int) -> int:
    """Return the bytes of eight channels of these pixels; see ``plane_of`` of the kernel."""
    turn = max(1, 8 // chunks)
    return 16 * (-(-(pixels - turn) // 8) * 8 + turn)


@dataclass(frozen=True)
class Plan:
    """The macros of ``kernel.cu``; the sizes are those of the maps that the block computes."""

    half: bool
    channels: int
    height: int
    width: int
    entry_stride: int
    last: bool
    classes: int
    images: int
    adaptive: bool = True
    warps: int = 8
    n_tiles: int = 2
    m_tiles: int = 4
    ahead: int = 2  # steps that weights are read ahead; more of them gained nothing on an H200
    tall: int = 1
    hold: bool = False
    ctas: int = 2

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory, as the kernel lays them out; it refuses to compile with another number."""
        channels, images, pixels = self.channels, self.images, self.images * self.height * self.width
        rows, pitch, chunks = images * self.height, self.width + 1, channels // 8
        slots = (images * (self.height + 1) + 1) * pitch + 1
        x = chunks * _plane(slots, chunks)
        if self.entry_stride == 2:
            before = (2 * self.height + 2) * (2 * self.width + 1) + 1
            x = max(x, chunks // 2 * _plane(before, chunks // 2))
        parts = [x, chunks * _plane(slots, chunks), chunks * _plane(pixels + 1, chunks)]
        parts += [2 * pixels // self.tall, pixels]
        parts += [4 * images * self.warps * channels, 4 * images * self.warps, 16, 16 * channels]
        parts += [4 * channels + 16, 30 * channels, pixels // 8 + 8, 4 * rows]
        return sum(-(-part // 16) * 16 for part in parts)

    @property
    def macros(self) -> dict[str, int]:
        """What the compiler is told."""
        names = {name.upper(): int(value) for name, value in vars(self).items()}
        return names | {"SHARED_BYTES": self.shared_bytes}


@dataclass(frozen=True)
class Device:
    """What a plan has to know of the GPU."""

    shared: int  # bytes that a CTA may have
    multiprocessors: int


H200 = Device(SHARED_LIMIT, 132)


def plans(
    channels: tuple[int, ...],
    height: int,
    width: int,
    classes: int,
    half: bool,
    adaptive: bool = True,
    batch: int = 1024,
    device: Device = H200,
) -> list[Plan]:
    """Return a plan for every block of a network for images of this size.

    >>> [plan.images for plan in plans((16, 32, 64), 32, 32, classes=10, half=False)]
    [1, 2, 2]
    """
    if width > 32 or height > 255 or height % 4 or width % 4:
        raise Unsupported(
            f"onchip: expected images of sizes in multiples of 4, no wider than 32; got {height}×{width}"
        )
    made = []
    for k, count in enumerate(channels):
        block = Plan(
            half=half,
            channels=count,
            height=height >> k,
            width=width >> k,
            entry_stride=1 if k == 0 else 2,
            last=k == len(channels) - 1,
            classes=classes,
            images=1,
            adaptive=adaptive,
        )
        made.append(_best(block, batch, device))
    return made


def _best(block: Plan, batch: int, device: Device) -> Plan:
    """Return the plan that takes least time, of those that leave room for most warps."""
    # each CTA takes a KB besides
    fitting = [
        plan
        for plan in _choices(block, crowded=batch > 2 * device.multiprocessors)
        if plan.shared_bytes <= (device.shared - (plan.ctas - 1) * 1024) // plan.ctas
    ]
    if not fitting:
        need = block.shared_bytes // 1024
        raise Unsupported(
            f"onchip: expected maps that fit {device.shared // 1024} KB of shared memory, got {need} KB for "
            f"{block.channels} channels of {block.height}×{block.width}"
        )
    most = max(plan.ctas for plan in fitting)
    return min((plan for plan in fitting if plan.ctas == most), key=lambda plan: _time(plan, batch, device))


def _time(plan: Plan, batch: int, device: Device) -> float:
    """Return how long a batch takes, in times of a CTA of one image.

    CTAs come in waves, as many as there is room for. A CTA of two images takes 1.6 times as long as that of
    one, of three 2.0 times, as measured on an H200 in the third block of ResNet-110.
    """
    at_once = plan.ctas * device.multiprocessors
    waves = math.ceil(max(1, batch) / plan.images / at_once)
    return float(waves * plan.images**0.65)


def _choices(block: Plan, crowded: bool) -> Iterator[Plan]:
    """Plans to choose from; registers hold all weights of 16 channels."""
    hold = block.channels == 16
    tall = 2 if hold and block.height % 2 == 0 else 1
    chunks = block.channels // 8
    n_tiles = 4 if chunks % 4 == 0 else 2
    if chunks // n_tiles not in (1, 2, 4, 8):
        return
    if crowded and not block.adaptive and block.channels == 32 and block.height % 2 == 0:
        # measured on an H200 in the second block of ResNet-110: 3520 µs for 8192 images, else 4336
        yield replace(block, ctas=3, warps=4, n_tiles=4, m_tiles=2, tall=2)
    for ctas, warps in ((2, 8), (1, 16)):
        for images in (2, 3, 1):
            pixels = images * block.height * block.width
            if images == 1 or (pixels <= (512 if images == 2 else 192) and images * warps <= 32):
                tiles = -(-pixels // 16) * (chunks // n_tiles) // warps
                yield replace(
                    block,
                    images=images,
                    ctas=ctas,
                    warps=warps,
                    hold=hold,
                    tall=tall,
                    n_tiles=n_tiles,
                    m_tiles=max(1, min(tiles, 1 if hold else 3)),
                )
