"""The kernels of the on-chip engine, block by block, beside what the GPU could do at most.

    python benchmarks/onchip_blocks.py [--network NAME] [--batch 1024] [--out FILE.csv]

For the zoo's network on images of the bundled sample, and for the plain network of equal depth: microseconds
of each block's kernel alone (a CUDA graph of it, replayed), TFLOP/s, and their share of the tensor cores'
peak. Of the plain network also how long its products and its reads and writes of shared memory and of the
first cache, which share a path, would take if nothing else took time: ``tensor_us`` and ``shared_us``. Both
are counted from the plan; the peaks are those of an H200 (989 TFLOP/s in half precision; 128 bytes a cycle
and multiprocessor at 1.98 GHz).
"""

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gpu_timing import called
from onchip import on_chip_kernels
from table import write_csv
from torch import Tensor

from torchpact.core.overrides import use_mode
from torchpact.engines.conv.onchip.calls import Call
from torchpact.engines.conv.onchip.plan import Plan
from torchpact.engines.graphs import replayed
from torchpact.flops.count import flops_from_ponders, max_flops
from torchpact.models import ResNet
from torchpact_recipes.bench.dense import plain_net
from torchpact_recipes.commands.common import find_network
from torchpact_recipes.data import as_input, load_sample

PEAK_FLOPS = 989e12
SHARED_BYTES = 128 * 1.98e9  # a second and multiprocessor


def shared_bytes(plan: Plan, units: int) -> float:
    """Return the bytes that an image moves in a plain block, weights from the first cache included.

    A convolution fetches a tile of 16 pixels nine times, or 12 times for the two tiles of a TALL line whose
    weights registers hold; each group of outputs does so. Weights that registers do not hold are read for
    every ``m_tiles`` tiles. A unit writes y, x and u, and reads u.
    """
    pixels, channels = plan.height * plan.width, plan.channels
    tiles, groups = pixels / 16, channels // 8 // plan.n_tiles
    fetches = 6 if plan.hold and plan.tall == 2 else 9
    rows = tiles * fetches * channels / 16 * 512 * groups
    weights = 9 * channels * channels * 2
    by_warps = (
        weights * plan.warps / groups / plan.images
        if plan.hold
        else weights * tiles / plan.m_tiles / plan.tall
    )
    return units * (2 * (rows + by_warps) + 4 * 2 * channels * pixels)


def rows_of(label: str, net: ResNet, images: Tensor, flops: list[float]) -> list[dict[str, Any]]:
    engine = on_chip_kernels(net)
    engine.choose(images)
    device = torch.cuda.get_device_properties(images.device)
    (batch, _, height, width), found, u = images.shape, [], images
    for number, ((plan, kernel), weights) in enumerate(
        zip(engine.prepare(height, width, batch), engine.weights, strict=True)
    ):
        call = Call([(plan, kernel, weights)], u)
        taken = called(replayed(partial(call, u), u.device), seconds=0.1)
        work = flops[number] * batch
        row: dict[str, Any] = {"network": label, "block": number + 1, "batch": batch}
        row |= {"images_a_cta": plan.images, "ctas": plan.ctas, "warps": plan.warps}
        row |= {"m_tiles": plan.m_tiles, "tall": plan.tall, "us": round(taken, 1)}
        row |= {"tflops": round(work / taken / 1e6), "of_peak": round(1e6 * work / taken / PEAK_FLOPS, 2)}
        if not plan.adaptive:
            moved = shared_bytes(plan, weights.units) * batch
            rate = SHARED_BYTES * device.multi_processor_count
            row |= {"tensor_us": round(1e6 * work / PEAK_FLOPS, 1), "shared_us": round(1e6 * moved / rate, 1)}
        print(*row.values(), sep="\t", flush=True)
        found.append(row)
        u, _ = call(u)
    return found


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description="the on-chip engine, block by block")
    parser.add_argument("--network", default="resnet110-tau0.005")
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".csv"))
    arguments = parser.parse_args()
    own = find_network(arguments.network).model.eval().cuda().bfloat16()
    plain = plain_net(own.config).eval().cuda().bfloat16()
    images = as_input(load_sample("train", "cuda").images[: arguments.batch]).bfloat16()
    images = images.contiguous(memory_format=torch.channels_last)
    with use_mode(own, "thresholded", details=False):
        _, ponders = own(images)
        spent = flops_from_ponders(own, ponders, images.shape).blocks.double().mean(0).tolist()
        rows = rows_of("plain", plain, images, plain_blocks(plain))
        rows += rows_of(arguments.network, own, images, spent)
    write_csv(arguments.out, rows)


def plain_blocks(net: ResNet) -> list[float]:
    """Return the FLOPs of each block of a plain network."""
    count = flops_from_ponders(net, [], (1, 3, 32, 32))
    assert int(count.total.item()) == max_flops(net, (1, 3, 32, 32))
    return [float(each) for each in count.blocks[0]]


if __name__ == "__main__":
    main()
