"""The sparse engine on a GPU against the best dense alternative of the same run.

    python benchmarks/engines_gpu.py [--out benchmarks/engines_gpu.csv] [--quick]

Blocks of five units and whole networks, bf16, channels last, every candidate captured in a CUDA graph. Dense
alternatives are the plain units with batch norms folded, by cuDNN with its fastest algorithms and, unless
--quick, compiled by torch.compile with max-autotune. Masks are blobs that halt after the first unit of a
block, as in engines_cpu.py. ``of_theory`` is the measured speed-up over the best of them divided by that of
FLOPs.
"""

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
from engines_cpu import FoldedNet, with_blobs
from table import write_csv
from torch import Tensor, nn

from torchpact.engines import FoldedBlock, deploy
from torchpact.engines.gpu import SparseGPUBlock
from torchpact.flops import flops_from_ponders, max_flops
from torchpact.models import ResNetConfig, build
from torchpact.training.algorithms import fastest_algorithms

BLOCKS = [  # channels, size of the maps, batch
    (16, 32, 1024),
    (32, 16, 1024),
    (64, 8, 1024),
    (64, 56, 64),
    (128, 28, 64),
    (256, 14, 64),
    (512, 7, 64),
]


def microseconds(work: Callable[[], object]) -> float:
    """The median time of a CUDA graph of the work."""
    stream = torch.cuda.Stream()
    with torch.no_grad(), torch.cuda.stream(stream), fastest_algorithms():
        for _ in range(3):
            work()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            work()
        times = []
        for _ in range(33):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e3)
    return float(statistics.median(times[3:]))


def dense_times(dense: nn.Module, example: Tensor, quick: bool) -> dict[str, float]:
    times = {"cudnn": microseconds(lambda: dense(example))}
    if not quick:
        torch.compiler.reset()
        compiled = torch.compile(dense, mode="max-autotune-no-cudagraphs", fullgraph=True)
        times["compiled"] = microseconds(lambda: compiled(example))
    return times


def block_row(
    channels: int, size: int, batch: int, active: float, known: dict[str, float]
) -> dict[str, object]:
    config = ResNetConfig(units=5, width=channels // 16, image_size=size)
    model, images = with_blobs(config, batch, active)
    model, images = model.cuda().bfloat16(), images.cuda().bfloat16()
    with torch.no_grad():
        u = model.stem(images).contiguous(memory_format=torch.channels_last)
    sparse = SparseGPUBlock(FoldedBlock(model.blocks[0]))
    if not known:
        known |= dense_times(nn.Sequential(*FoldedBlock(model.blocks[0]).units), u, ARGUMENTS.quick)
    with torch.no_grad():
        _, ponders = model(images)
    flops = float(flops_from_ponders(model, ponders, images.shape).blocks[:, 0].double().mean())
    plain = 2.0 * 10 * 9 * channels**2 * size**2  # two convolutions in each of five units
    name = f"block {channels}×{size}×{size}"
    return _row(name, batch, active, known, microseconds(lambda: sparse(u)), plain / flops)


def network_row(units: int, batch: int, active: float, known: dict[str, float]) -> dict[str, object]:
    model, images = with_blobs(ResNetConfig(units=units), batch, active)
    model, images = model.cuda().bfloat16(), images.cuda().bfloat16()
    if not known:
        plain = build(ResNetConfig(units=units, adaptive=False)).eval().cuda().bfloat16()
        folded = FoldedNet(plain).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        known |= dense_times(folded, images.contiguous(memory_format=torch.channels_last), ARGUMENTS.quick)
    fast = deploy(model, images)
    _, ponders = fast(images)
    flops = float(flops_from_ponders(model, ponders, images.shape).total.double().mean())
    plain_flops = max_flops(build(ResNetConfig(units=units, adaptive=False)), images.shape)
    name = f"ResNet-{6 * units + 2}"
    return _row(name, batch, active, known, microseconds(lambda: fast(images)), float(plain_flops) / flops)


def _row(
    name: str, batch: int, active: float, dense: dict[str, float], sparse: float, theory: float
) -> dict[str, object]:
    best = min(dense, key=dense.__getitem__)
    return {
        "work": name,
        "batch": batch,
        "active": active,
        "best_dense": best,
        "dense_us": round(dense[best], 1),
        "sparse_us": round(sparse, 1),
        "speedup": round(dense[best] / sparse, 2),
        "theory": round(theory, 2),
        "of_theory": round(dense[best] / sparse / theory, 2),
        "images_per_second": round(batch / sparse * 1e6),
    }


def main() -> None:
    rows: list[dict[str, object]] = []
    for shape in BLOCKS:
        known: dict[str, float] = {}
        for active in ARGUMENTS.active:
            rows.append(block_row(*shape, active, known))
            print(*rows[-1].values(), sep="\t", flush=True)
            write_csv(ARGUMENTS.out, rows)
    for units, batch in ((5, 1024), (18, 1024), (18, 1)):
        known = {}
        for active in ARGUMENTS.active:
            rows.append(network_row(units, batch, active, known))
            print(*rows[-1].values(), sep="\t", flush=True)
            write_csv(ARGUMENTS.out, rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="the sparse GPU engine against dense ones")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".csv"))
    parser.add_argument("--quick", action="store_true", help="leave torch.compile out")
    parser.add_argument("--active", type=float, nargs="*", default=[0.1, 0.25, 0.5, 1.0])
    ARGUMENTS = parser.parse_args()
    main()
