"""Trained networks on the chip: real test images, beside the best dense alternative and itself run dense.

    python benchmarks/onchip.py NETWORK... [--data FOLDER] [--batch 1 64 1024] [--out benchmarks/onchip.csv]

A network is a checkpoint, a run's folder or a name of the zoo. For each precision: accuracy on all test
images beside that of the model in single precision (no TF32), and the share of positions that take as many
steps. For each batch: images a second of the deployed network, called as users call it, without details (it
returns logits, steps and costs); of the plain network of equal depth by the same kernels (``itself_dense``)
and by the best of eager, channels last, batch norms folded and torch.compile with max-autotune
(``best_dense``), which is a CUDA graph into which the images are copied, in bfloat16; and of the deployed
network whose heads never halt (``never_halting``), so that nothing is skipped but the heads are paid for.
These are times of the device's clock, call after call. Of single images also the latency: milliseconds from a
call until the device has done it, the two in turns, median and 90th percentile.
"""

import argparse
import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gpu_timing import called
from table import write_csv
from torch import Tensor

from torchpact.core.overrides import use_mode
from torchpact.engines import deploy
from torchpact.engines.conv.onchip import ONCHIP, OnChipNetwork
from torchpact.engines.conv.onchip.kernels import Kernels
from torchpact.engines.timing import in_turns
from torchpact.flops.count import flops_from_ponders, max_flops
from torchpact.models import ResNet, ResNetConfig
from torchpact.nn.conv_units import HaltingHead
from torchpact.specs import network_spec
from torchpact_recipes.bench.dense import FoldedNet, dense_alternatives, plain_config, plain_net
from torchpact_recipes.bench.rows import percentile
from torchpact_recipes.commands.common import find_network, load_test
from torchpact_recipes.data import Images, as_input

PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16}


def on_test_images(network: Any, data: Images, dtype: torch.dtype) -> tuple[float, float, list[Tensor]]:
    """Accuracy, FLOPs of an image, and the steps of every position, block by block."""
    right, flops, steps = 0.0, 0.0, []
    for start in range(0, len(data), 1000):
        part = slice(start, start + 1000)
        images = as_input(data.images[part]).to(dtype)
        logits, ponders = network(images)
        right += float((logits.float().argmax(1) == data.labels[part]).sum())
        if isinstance(network, ResNet):
            flops += float(flops_from_ponders(network, ponders, images.shape).total.double().sum())
        steps.append(torch.cat([ponder.steps.flatten() for ponder in ponders]))
    return right / len(data), flops / len(data), steps


def on_chip_kernels(net: ResNet) -> Kernels:
    """Return the kernels of a network's blocks, which keep no details."""
    spec = network_spec(net)
    assert spec is not None  # as it is what its class makes it
    blocks = tuple(replace(block, details=False) for block in spec.blocks)
    runner: OnChipNetwork = ONCHIP.build(replace(spec, blocks=blocks))
    return runner.kernels


class DenseSpeeds:
    """Images a second of plain networks, by depth and batch; each is measured once."""

    def __init__(self, compiling: bool) -> None:
        self.compiling = compiling
        self.known: dict[tuple[ResNetConfig, int], dict[str, Any]] = {}
        self.ways: dict[tuple[ResNetConfig, int], Callable[[], object]] = {}  # the best ones

    def __call__(self, model: ResNet, images: Tensor) -> dict[str, Any]:
        """Measure, or remember."""
        key = plain_config(model.config), len(images)
        if key not in self.known:
            plain = plain_net(model.config).cuda().to(images.dtype)
            ways = dense_alternatives(plain, FoldedNet(plain), images, self.compiling, called=True)
            times = {name: called(run, seconds=0.2) for name, run in ways.items()}
            best = min(times, key=times.__getitem__)
            self.ways[key] = ways[best]
            itself = deploy(plain, images, engines=["onchip"])
            self.known[key] = {
                "best_dense": best,
                "best_dense_images_s": round(1e6 * len(images) / times[best]),
                "itself_dense_images_s": round(1e6 * len(images) / called(lambda: itself(images))),
            }
        return self.known[key]

    def latencies(self, model: ResNet, fast: Callable[[], object]) -> dict[str, float]:
        """Return those of a deployed network and of the best dense one, for single images."""
        calls = {"": fast, "dense_": self.ways[plain_config(model.config), 1]}
        times = in_turns(calls, seconds=1, least=20, most=400)
        return {
            f"{name}p{percent}_ms": round(1e3 * percentile(each, percent), 3)
            for name, each in times.items()
            for percent in (50, 90)
        }


def never_halting(model: ResNet) -> ResNet:
    """The same network, but its heads are sure that it must go on."""
    patient = copy.deepcopy(model)
    for module in patient.modules():
        if isinstance(module, HaltingHead):
            module.linear.bias.fill_(-1e4)
    return patient


@torch.no_grad()
def rows_of(
    name: str, data: Images, batches: list[int], precisions: list[str], dense: DenseSpeeds
) -> Iterator[dict[str, Any]]:
    model = find_network(name).model.eval().cuda()
    with use_mode(model, "thresholded", details=False):
        accuracy, flops, steps = on_test_images(model, data, torch.float32)
        share = flops / max_flops(plain_net(model.config), (1, 3, 32, 32))
        for precision in precisions:
            dtype = PRECISIONS[precision]
            own = find_network(name).model.eval().cuda().to(dtype)
            with use_mode(own, "thresholded", details=False):
                for batch in batches:
                    images = as_input(data.images).to(dtype)[:batch]
                    images = images if len(images) == batch else images[:1024].repeat(batch // 1024, 1, 1, 1)
                    fast = deploy(own, images, engines=["onchip", "dense"])
                    row: dict[str, Any] = {"network": Path(name).name, "precision": precision}
                    row |= {"batch": batch, "flops": round(share, 3)}
                    row |= {"engine": fast.report.measurements[-1].engine} | dense(model, images.bfloat16())
                    speed = 1e6 * batch / called(partial(fast, images))
                    row |= {"images_s": round(speed), "faster": round(speed / row["best_dense_images_s"], 2)}
                    row["of_theory_over_itself"] = round(speed / row["itself_dense_images_s"] * share, 2)
                    patient = deploy(never_halting(own), images, engines=["onchip"])
                    slow = 1e6 * batch / called(partial(patient, images))
                    saved = max_flops(model, (1, 3, 32, 32)) / flops
                    row |= {"never_halting_images_s": round(slow)}
                    row["of_theory_over_never_halting"] = round(speed / slow / saved, 2)
                    row |= {"accuracy_fp32": accuracy}
                    if batch == 1:
                        row |= dense.latencies(model, partial(fast, images))
                    if batch == 1024:
                        ours, _, taken = on_test_images(fast, data, dtype)
                        same = [(a == b).float().mean().item() for a, b in zip(taken, steps, strict=True)]
                        row |= {"accuracy": ours, "same_steps": round(sum(same) / len(same), 5)}
                    yield row


def main() -> None:
    parser = argparse.ArgumentParser(description="trained networks on the chip")
    parser.add_argument("networks", nargs="+")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 64, 1024, 8192])
    parser.add_argument("--precision", nargs="*", choices=PRECISIONS, default=list(PRECISIONS))
    parser.add_argument("--quick", action="store_true", help="leave torch.compile out")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".csv"))
    arguments = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    data, dense = load_test(arguments.data, torch.device("cuda")), DenseSpeeds(not arguments.quick)
    rows: list[dict[str, Any]] = []
    for name in arguments.networks:
        for row in rows_of(name, data, arguments.batch, arguments.precision, dense):
            print(*row.values(), sep="\t", flush=True)
            rows.append(row)
            write_csv(arguments.out, rows)


if __name__ == "__main__":
    main()
