"""How the kernel of a block is cut: images for a CTA, tiles for a warp, and the shared memory that takes."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from torchpact.engines.base import Unsupported

WIDEST, HIGHEST = 32, 255
"""Pixels in a row of a map, which is the bits of a word, and rows."""

CHANNELS = (16, 32, 64, 128, 256)
"""Of a map: warps must fit the groups of outputs."""


def _plane(pixels: int, chunks: int) -> int:
    """Return the bytes of eight channels of these pixels; see ``plane_of`` of the kernel."""
    turn = max(1, 8 // chunks)
    return 16 * (-(-(pixels - turn) // 8) * 8 + turn)


def _map(pixels: int, chunks: int) -> int:
    """Return the bytes of all channels of these pixels; see ``map_of`` of the kernel."""
    return _plane(pixels, chunks) * (chunks - 1) + 16 * pixels


@dataclass(frozen=True)
class Plan:
    """The macros of ``kernel.cu``; the sizes are those of the maps that the block computes."""

    half: bool
    channels: int
    height: int
    width: int
    entry_stride: int  # of the first unit; 1 after the stem, which the kernel computes, 0 if the map is given
    last: bool
    classes: int
    images: int
    adaptive: bool = True
    warps: int = 8
    n_tiles: int = 2
    m_tiles: int = 4
    ahead: int = 2  # steps that weights are read ahead
    tall: int = 1
    bordered: bool = False  # the residual stream, too
    gap: int = 1  # columns between rows of logits
    hold: bool = False
    ctas: int = 2
    overlap: bool = False  # begins before the block before it has ended
    cluster: int = 1  # CTAs that share an image

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory, as the kernel lays them out; it refuses to compile with another number."""
        channels, images, pixels = self.channels, self.images, self.images * self.height * self.width
        rows, pitch, chunks = images * self.height, self.width + 1, channels // 8
        slots = (images * (self.height + 1) + 1) * pitch + 1
        x = _map(slots, chunks)
        if self.entry_stride == 2:
            before = (2 * self.height + 2) * (2 * self.width + 1) + 1
            x = max(x, _map(before, chunks // 2))
        homes = slots if self.bordered else pixels + 1
        parts = [x, _map(slots, chunks), _map(homes, chunks)]
        listed = 2 * pixels // self.tall
        free = _plane(slots, chunks) + 16 * (pitch - images * (self.height + 1) * pitch)  # of a border
        parts += [0 if self.bordered and free >= listed else listed, pixels]
        if self.adaptive:
            parts += [4 * (images * (self.height + 1) * (self.width + self.gap) + self.width + 2)]
        parts += [4 * self.warps * channels, 4 * images * self.warps * self.cluster, 16, 16 * channels]
        parts += [4 * channels + 16, pixels // 8 + 8, 4 * rows]
        return sum(-(-part // 16) * 16 for part in parts)

    @property
    def macros(self) -> dict[str, int]:
        """What the compiler is told."""
        names = {name.upper(): int(value) for name, value in vars(self).items()}
        return names | {"SHARED_BYTES": self.shared_bytes}


@dataclass(frozen=True)
class Device:
    """What a plan has to know of the GPU."""

    shared: int  # bytes that a CTA may have: 163 KB on sm_80, 227 KB on sm_90
    multiprocessors: int
    overlaps: bool = True  # kernels of a stream, as sm_90 does and sm_80 does not
    clusters: bool = True  # of CTAs, which sm_90 has and sm_80 has not

    def holds(self, cluster: int, count: int) -> bool:
        """Whether so many clusters surely run at once.

        A cluster lies within one part of the device: of 132 multiprocessors, 16 clusters of eight took two
        waves, eight of them one. Multiprocessors come in pairs, so that pairs leave none idle.
        """
        idle = 1 if cluster == 2 else 2
        return self.clusters and idle * cluster * count <= self.multiprocessors


def candidates(
    channels: tuple[int, ...],
    height: int,
    width: int,
    classes: int,
    half: bool,
    adaptive: bool,
    batch: int,
    device: Device,
) -> list[list[Plan]]:
    """Return for every block the plans that are worth a measurement, the likeliest first."""
    if width > WIDEST or height > HIGHEST or height % 4 or width % 4:
        raise Unsupported(
            f"onchip: expected images of sizes in multiples of 4, no wider than {WIDEST}; "
            f"got {height}×{width}"
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
            overlap=k > 0 and device.overlaps,
        )
        made.append(candidates_of(block, batch, device))
    return made


def candidates_of(block: Plan, batch: int, device: Device) -> list[Plan]:
    """Return plans for a block of the sizes in ``block``."""
    if block.width == 32:
        block = replace(block, gap=8)  # by banks that adds meet, all active: 1.0 for 3.9 turns
    ways = _ways(block, batch, device)
    found = [*dict.fromkeys(plan for way in ways if (plan := _first(way, batch, device)))]
    if not found:
        need = block.shared_bytes // 1024
        raise Unsupported(
            f"onchip: expected maps that fit {device.shared // 1024} KB of shared memory, got {need} KB "
            f"for {block.channels} channels of {block.height}×{block.width}"
        )
    return found


def _first(way: Iterable[Iterable[Plan]], batch: int, device: Device) -> Plan | None:
    """Return the best plan of the first kind that has one."""
    return next((plan for kind in way if (plan := _best(kind, batch, device))), None)


def _best(kind: Iterable[Plan], batch: int, device: Device) -> Plan | None:
    """Return the plan that takes least time, of those that leave room for most warps."""
    # each CTA takes a KB besides
    fitting = [
        plan
        for plan in kind
        if plan.shared_bytes <= (device.shared - (plan.ctas - 1) * 1024) // plan.ctas
        and plan.images * plan.warps <= 32
    ]
    most = max((plan.ctas for plan in fitting), default=0)
    full = [plan for plan in fitting if plan.ctas == most]
    return min(full, key=lambda plan: _time(plan, batch, device), default=None)


def _time(plan: Plan, batch: int, device: Device) -> float:
    """Return how long a batch takes, in times of a CTA of one image.

    CTAs come in waves, as many as there is room for. A CTA of two images takes 1.6 times as long as that of
    one, of three 2.0 times, as measured on an H200 in the third block of ResNet-110.
    """
    at_once = plan.ctas * device.multiprocessors
    waves = math.ceil(max(1, batch) / plan.images / at_once)
    return float(waves * plan.images**0.65)


def _ways(block: Plan, batch: int, device: Device) -> list[list[Iterator[Plan]]]:
    """Ways to run a block, the likeliest first: each has kinds of plans, and the first that fits is taken.

    Times are microseconds of ResNet-110 on an H200, of 1024 images: trained (``tau0.01``), the same never
    halting, and plain; or, where it says so, with all, half and a quarter of the pixels active, when heads
    still read neighbours (kernels have become 2 to 12 % faster since). Not kept, for they won nowhere:
    weights that are read further ahead where tiles are few, four images a CTA, two warps that share a tile.
    """
    crowded = batch > 2 * device.multiprocessors
    bordered = replace(block, bordered=True)
    if crowded and block.channels == 32:
        # 221, 601, 560; small ones 246, 497, 454; four tiles at once 230, 545, – (tau0.005: 318 for 340)
        ways = [[_usual(block)], [_small(block)], [_usual(block, most=4)]]
        return ways if block.adaptive else ways[1::-1]
    kinds = [_usual(block)]
    if block.channels == 64:
        # a single image, all, half and a quarter: 137, 133, 119 for 143, 134, 121
        kinds = [_usual(bordered), *kinds]
    if batch <= device.multiprocessors:
        if block.channels == 16:
            # 64 images, all, half and a quarter: 141, 121, 96 for 149, 123, 97
            kinds = [_alone(bordered), *kinds]
        ways = [[_together(bordered, cluster)] for cluster in (8, 4, 2) if device.holds(cluster, batch)]
        if block.channels in (32, 64):
            return [*ways, kinds, [_deep(bordered if block.channels == 64 else block)]]
        return [*ways, kinds]
    if block.channels == 16:
        return [[_usual(bordered), *kinds]]  # trained and never halting: 322, 658 for 332, 678
    if block.channels == 64 and crowded:
        # all, half and a quarter: 551, 544, 444 with a border, 572, 554, 449 without, for 637, 623, 479 of
        # usual ones; then 332, 466, 442, tall ones 453, 463, 426
        ways = [[_wide(bordered), _wide(block), *kinds], [_tall(bordered)]]
        return ways if block.adaptive else ways[1::-1]
    return [kinds]


def _usual(block: Plan, most: int = 3) -> Iterator[Plan]:
    """As many warps as there is room for; registers hold all weights of 16 channels."""
    chunks = block.channels // 8
    n_tiles = 4 if chunks % 4 == 0 else 2
    for ctas, warps in ((2, 8), (1, 16)):
        for images in (2, 3, 1):
            pixels = images * block.height * block.width
            if images == 1 or pixels <= (512 if images == 2 else 192):
                yield _cut(block, images=images, ctas=ctas, warps=warps, n_tiles=n_tiles, most=most)


def _small(block: Plan) -> Iterator[Plan]:
    """Few warps an image: each reads weights for two tiles of two rows."""
    if block.height % 2 == 0:
        yield replace(block, ctas=3, warps=4, n_tiles=4, m_tiles=2, tall=2, ahead=3)


def _tall(block: Plan) -> Iterator[Plan]:
    """Two images have few warps: each reads weights for half of the outputs of two tiles of two rows."""
    if block.height % 2 == 0:
        yield replace(block, images=2, ctas=3, warps=4, n_tiles=4, m_tiles=2, tall=2, ahead=2)


def _wide(block: Plan) -> Iterator[Plan]:
    """A warp makes all outputs of its pixels, which it reads but once, and reads weights far ahead."""
    for images in (2, 3):
        if images * block.height * block.width <= 192:
            yield _cut(replace(block, ahead=4), images=images, ctas=2, warps=4, n_tiles=8, most=3)


def _deep(block: Plan) -> Iterator[Plan]:
    """An image has a multiprocessor to itself: registers for weights from further ahead."""
    yield _cut(replace(block, ahead=6), images=1, ctas=1, warps=8, n_tiles=4, most=3)


def _alone(block: Plan) -> Iterator[Plan]:
    """An image has a multiprocessor to itself."""
    yield _cut(block, images=1, ctas=1, warps=16, n_tiles=2, most=1)


def _together(block: Plan, cluster: int) -> Iterator[Plan]:
    """A cluster of multiprocessors shares an image: a few rows each, and weights in registers.

    A single image, all and a quarter active, by 8, by 4, by one of them: 16 channels 78, 73, for 97, 81, for
    139, 92 µs; 32 channels 89, 96, for 96, 93, for 137, 103; 64 channels 98, 99, for 104, 116, for 131, 107.
    By pairs, 64 images of the plain ResNet-110 take 269 µs instead of 316, of ResNet-32 (``tau0.05``) 102
    instead of 134, of ResNet-110 (``tau0.01``) as long.
    """
    warps = 16 if cluster == 2 and block.channels == 16 else 8
    plan = _cut(block, images=1, ctas=1, warps=warps, n_tiles=2, most=1)
    if block.channels <= 64 and block.height <= 32 and block.height % (cluster * plan.tall) == 0:
        yield replace(plan, cluster=cluster, hold=True)


def _cut(block: Plan, *, images: int, ctas: int, warps: int, n_tiles: int, most: int) -> Plan:
    """Return a plan whose warps make as many tiles at once as they have, but not more than ``most``."""
    hold = block.channels == 16
    groups = block.channels // 8 // n_tiles
    tiles = -(-images * block.height * block.width // 16) * groups // warps
    return replace(
        block,
        images=images,
        ctas=ctas,
        warps=warps,
        n_tiles=n_tiles,
        m_tiles=max(1, min(tiles, 1 if hold else most)),
        hold=hold,
        tall=2 if hold and block.height % 2 == 0 else 1,
    )
