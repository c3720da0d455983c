"""The sparse engine on a GPU against the best dense alternative of the same run.

    python benchmarks/engines_gpu.py [--out benchmarks/engines_gpu.csv] [--quick]

Blocks of five units and whole networks, bf16, channels last. Blocks and dense alternatives are captured in
CUDA graphs; deployed networks have graphs of their own, and are called as users call them. Dense alternatives
are the plain units with batch norms folded, by cuDNN with its fastest algorithms and, unless --quick, by
torch.compile with max-autotune. Masks are blobs that halt after the first unit of a block, as in
engines_cpu.py. ``of_theory`` is the measured speed-up over the best of them divided by that of FLOPs;
``dense_first_us`` is the time of a block whose first unit, which runs everywhere, is left to cuDNN.
Networks run by the engine that ``deploy`` takes, and ``blocks_us`` is the time of one block by block.
"""

import argparse
from pathlib import Path

import torch
from gpu_timing import called, microseconds
from table import write_csv
from torch import Tensor, nn

from torchpact.engines import deploy
from torchpact.engines.conv.folded import folded_units
from torchpact.engines.conv.triton.block import SparseGPUBlock
from torchpact.flops.conv import conv_block_flops
from torchpact.flops.count import flops_from_ponders, max_flops
from torchpact.models import ResNetConfig, build
from torchpact.specs import block_spec
from torchpact_recipes.bench.blobs import block_with_blobs, with_blobs
from torchpact_recipes.bench.dense import FoldedNet

BLOCKS = [  # channels, size of the maps, batch
    (64, 56, 64),
    (128, 28, 64),
    (256, 14, 64),
    (512, 7, 64),
    (64, 8, 1024),
    (32, 16, 1024),
    (16, 32, 1024),
]

NETWORKS = [(18, 1024), (5, 1024), (18, 1)]  # units of a block, batch


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
    block, u = block_with_blobs(channels, size, batch, active)
    block, u = block.cuda().bfloat16(), u.cuda().bfloat16()
    spec = block_spec(block)
    sparse, dense_first = SparseGPUBlock(spec), SparseGPUBlock(spec, own_first=False)
    if not known:
        known |= dense_times(nn.Sequential(*folded_units(spec)), u, ARGUMENTS.quick)
    with torch.no_grad():
        _, ponder = block(u)
    flops = float(conv_block_flops(spec, ponder.steps, size, size).double().mean())
    plain = 2.0 * 10 * 9 * channels**2 * size**2  # two convolutions in each of five units
    name = f"block {channels}×{size}×{size}"
    row = _row(name, batch, active, known, microseconds(lambda: sparse(u)), plain / flops)
    row["dense_first_us"] = round(microseconds(lambda: dense_first(u)), 1)
    return row


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
    row = _row(name, batch, active, known, called(lambda: fast(images)), float(plain_flops) / flops)
    whole = fast.report.measurements[-1]
    return row | {"engine": whole.engine, "blocks_us": round(1e6 * whole.seconds["blocks"], 1)}


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
        "dense_first_us": "",
        "engine": "gpu",
        "blocks_us": "",
    }


def main() -> None:
    rows: list[dict[str, object]] = []
    for shape in [BLOCKS[int(number)] for number in ARGUMENTS.blocks]:
        known: dict[str, float] = {}
        for active in ARGUMENTS.active:
            rows.append(block_row(*shape, active, known))
            print(*rows[-1].values(), sep="\t", flush=True)
            write_csv(ARGUMENTS.out, rows)
    for units, batch in [NETWORKS[int(number)] for number in ARGUMENTS.networks]:
        known = {}
        for active in ARGUMENTS.active:
            rows.append(network_row(units, batch, active, known))
            print(*rows[-1].values(), sep="\t", flush=True)
            write_csv(ARGUMENTS.out, rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="the sparse GPU engine against dense ones")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".csv"))
    parser.add_argument("--quick", action="store_true", help="leave torch.compile out")
    parser.add_argument("--blocks", type=int, nargs="*", default=[*range(len(BLOCKS))], help="by number")
    parser.add_argument("--networks", type=int, nargs="*", default=[*range(len(NETWORKS))], help="likewise")
    parser.add_argument("--active", type=float, nargs="*", default=[0.1, 0.25, 0.5, 1.0])
    ARGUMENTS = parser.parse_args()
    main()
