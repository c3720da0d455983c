"""Which tiles the convolutions of the engine "gpu" run best in: the reason for engines/conv/triton/tiles.py.

    python benchmarks/engines_gpu_tiles.py [--out benchmarks/engines_gpu_tiles.csv] [--shapes 0 1 2]

Both convolutions of a unit, bf16, at blobs of the given share of pixels: the first at active pixels and their
neighbours, the second at active ones, where it also leaves what the next iteration looks at. Every setting
runs ten times in a CUDA graph; medians of replays, in microseconds. ``cudnn`` is a dense convolution of the
same maps by cuDNN, without what comes before and after; ``share`` of its time would be spent if only FLOPs
counted.
"""

import argparse
import itertools
import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import gpu_timing
import torch
from engines_gpu import BLOCKS
from table import write_csv
from torch.nn import functional as F

from torchpact.engines.conv.triton.block import SparseGPUBlock
from torchpact.engines.conv.triton.gpu_kernels import convolve
from torchpact.engines.conv.triton.tiles import REGION, Tiles, region_for
from torchpact.specs import block_spec
from torchpact_recipes.bench.blobs import block_with_blobs, smooth_noise

microseconds = partial(gpu_timing.microseconds, times=10, quick=True)


def candidates(channels: int) -> Iterator[Tiles]:
    """Settings that may be good: sums of a tile fit in registers, what is loaded ahead in shared memory."""
    most = min(channels, 256)
    outputs = sorted({most, max(most // 2, 64), 64}) if channels > 64 else [most]
    k = min(channels, 64)
    ahead = (2, 3, 4) if channels < 128 else (3, 4)
    for p, n, warps, stages in itertools.product((64, 128, 256), outputs, (4, 8), ahead):
        memory = 2 * stages * k * (p + n)
        if not 8 <= p * n / (32 * warps) <= 128 or memory > 200_000 or (warps == 8 and p < 128):
            continue
        programs = 8 if channels < 256 else 3
        yield Tiles(p, n, k, warps, stages, programs)
        if p * n <= 64 * 32 * warps:  # sums take a quarter of them
            yield Tiles(p, n, k, warps, stages, programs, 168 if warps == 4 else 128)


class Work:
    """Maps, lists and weights of one shape."""

    def __init__(self, channels: int, size: int, batch: int, active: float) -> None:
        torch.manual_seed(0)
        self.shape = (channels, size, batch)
        goes_on = torch.ones(batch, 1, size, size)
        if active < 1:
            noise = smooth_noise(batch, size)
            goes_on = (noise < active).float()
        near = F.max_pool2d(goes_on, 3, 1, 1)
        self.goes_on = goes_on.flatten().byte().cuda()
        self.lists = [mask.flatten().nonzero().flatten().int().cuda() for mask in (near, goes_on)]
        self.counts = [torch.tensor([len(x)], dtype=torch.int32).cuda() for x in self.lists]
        self.share = [len(x) / goes_on.numel() for x in self.lists]
        self.maps = [torch.randn(batch, size, size, channels).cuda().bfloat16() for _ in range(3)]
        self.columns = torch.randn(channels, 16).cuda().bfloat16()
        self.products = torch.empty(-(-channels // 16), 9, batch, size, size).cuda()
        self.weight = (torch.randn(9 * channels, channels) / 24).cuda().bfloat16()
        self.bias = torch.zeros(channels).cuda()
        self.pools = torch.empty(-(-channels // 16), 4, batch, size, size).cuda()
        self.processors = torch.cuda.get_device_properties(0).multi_processor_count

    def convolve(self, tiles: Tiles, first: bool) -> None:
        """Queue one of the two convolutions of a unit."""
        channels, size, _ = self.shape
        places, count = self.lists[0 if first else 1], self.counts[0 if first else 1]
        parts = channels // tiles.outputs
        programs = min(tiles.programs * self.processors, -(-self.goes_on.numel() // tiles.pixels) * parts)
        convolve[(programs,)](
            self.maps[0], self.weight, self.bias, self.maps[1], self.maps[1], self.bias, self.bias,
            self.maps[2], self.columns, self.products, self.pools, places, count,
            self.goes_on.numel(), 2, size, size, size, size,
            **constants(channels, tiles, first),
        )  # fmt: skip


def constants(channels: int, tiles: Tiles, first: bool) -> dict[str, Any]:
    return {
        "C": channels, "D": channels, "TAPS": 9, "P": tiles.pixels, "N": tiles.outputs, "K": tiles.inputs,
        "STRIDE": 1, "KEPT": channels, "RAISES": False, "W": 16, "HEADS": 4,
        "ALL": False, "LAST": not first, "ASKED": not first, "PRECISION": "tf32",
        "num_warps": tiles.warps, "num_stages": tiles.stages, "maxnreg": tiles.registers,
    }  # fmt: skip


def compile_ahead(job: tuple[int, int, Tiles, bool]) -> None:
    """Fill Triton's cache, in a process of its own."""
    channels, size, tiles, first = job
    half, single, whole = torch.bfloat16, torch.float32, torch.int32
    convolve.warmup(
        half, half, single, half, half, single, single, half, half, single, single, whole, whole,
        1, 2, size, size, size, size, grid=(1,), **constants(channels, tiles, first),
    )  # fmt: skip


def dense(channels: int, size: int, batch: int) -> float:
    x = torch.randn(batch, channels, size, size, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(channels, channels, 3, 3, device="cuda", dtype=torch.bfloat16)
    x, weight = (t.contiguous(memory_format=torch.channels_last) for t in (x, weight))
    return microseconds(lambda: F.conv2d(x, weight, padding=1))


def measured(work: Work, tiles: Tiles, first: bool) -> float:
    try:
        return microseconds(lambda: work.convolve(tiles, first))
    except Exception as error:  # out of resources, by whatever name this version has for it
        print(*tiles, first, type(error).__name__, sep="\t")
        return float("inf")


def rows_of(shape: tuple[int, int, int], active: float) -> list[dict[str, object]]:
    channels, size, batch = shape
    cudnn = dense(*shape)
    work = Work(*shape, active)
    found = []
    for first in (True, False):
        times = {tiles: measured(work, tiles, first) for tiles in candidates(channels)}
        for tiles in sorted(times, key=times.__getitem__)[:3]:  # how many programs matters less
            for programs in (1, 2, 3, 4, 8):
                other = tiles._replace(programs=programs)
                times[other] = measured(work, other, first)
        for tiles, time in times.items():
            share = work.share[0 if first else 1]
            found.append(
                {
                    "channels": channels, "size": size, "batch": batch, "active": active, "first": first,
                    **tiles._asdict(), "microseconds": round(time, 1), "cudnn": round(cudnn, 1),
                    "share": round(share, 3), "of_theory": round(cudnn * share / time, 2),
                }
            )  # fmt: skip
    return found


def decisions(shape: tuple[int, int, int], active: float) -> None:
    """Print how long blocks take by the regions that are decided on, and pixels surveyed at a time."""
    size = shape[1]
    block, u = block_with_blobs(*shape, active)
    spec, u = block_spec(block.cuda().bfloat16()), u.cuda().bfloat16()
    for region, frozen in itertools.product(((16, 16), (16, 32), (32, 32)), (32, 64)):
        if region > REGION and region_for(size, size, region) == region_for(size, size):
            continue
        sparse = SparseGPUBlock(spec, region=region, frozen=frozen)
        time = gpu_timing.microseconds(partial(sparse, u))
        print("block", *shape, active, *region, frozen, f"{time:.1f}", sep="\t")


def main() -> None:
    parser = argparse.ArgumentParser(description="tiles of the convolutions of the sparse GPU engine")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".csv"))
    parser.add_argument("--shapes", type=int, nargs="*", default=[*range(len(BLOCKS))], help="by number")
    parser.add_argument("--active", type=float, nargs="*", default=[0.25, 0.5, 1.0])
    arguments = parser.parse_args()
    shapes = [BLOCKS[number] for number in arguments.shapes]
    jobs = [(c, s, t, first) for c, s, _ in shapes for t in candidates(c) for first in (True, False)]
    with ProcessPoolExecutor(14, multiprocessing.get_context("spawn")) as pool:
        for done in [pool.submit(compile_ahead, job) for job in jobs]:
            if (problem := done.exception()) is not None:
                print("not compiled:", type(problem).__name__, str(problem)[:200])
    rows: list[dict[str, object]] = []
    for shape, active in itertools.product(shapes, arguments.active):
        found = rows_of(shape, active)
        rows += found
        write_csv(arguments.out, rows)
        for first in (True, False):
            ranked = [row for row in found if row["first"] == first]
            for row in sorted(ranked, key=lambda row: float(str(row["microseconds"])))[:4]:
                print(*row.values(), sep="\t", flush=True)
    for shape in shapes if arguments.active else ():  # else only compiled
        decisions(shape, 0.25)


if __name__ == "__main__":
    main()
