"""Deployed networks on a CPU against the best dense alternative of the same run.

    python benchmarks/engines_cpu.py [--checkpoints runs/*/last.safetensors] [--seconds 15]

Dense alternatives are the plain network of equal depth: eager, channels last, batch norms folded, compiled by
torch.compile, default and with frozen weights. All candidates of a row take turns, so that other work on
the machine hits all alike, and medians are compared. ``of_theory`` is the measured speed-up over the best of
them divided by the one that FLOPs promise. ``native_plain`` is the plain network run by our own kernel.

Masks are blobs: a channel of the image holds smooth noise, all residuals leave it as it is, and heads halt
after the first unit of a block where it is above a quantile; the rest runs to the end. For networks per image
the noise is one number an image. With ``--checkpoints`` trained networks decide on CIFAR-10 test images.
"""

import argparse
import itertools
import shutil
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from pathlib import Path

import torch
from table import write_csv
from torch import Tensor, nn
from torch.nn import functional as F

import torchpact as tp
from torchpact.data import load_sample, standardize
from torchpact.engines import FoldedBlock
from torchpact.engines.timing import interleaved
from torchpact.flops import max_flops
from torchpact.models import ResNet, ResNetConfig, build
from torchpact.training import load_model

Model = Callable[[Tensor], object]

ENGINES = ("dense", "sparse", "compact", "native")


class FoldedNet(nn.Module):
    """The plain network with its batch norms folded, for torch.compile."""

    def __init__(self, net: ResNet) -> None:
        super().__init__()
        self.stem, self.norm, self.classifier = net.stem, net.norm, net.classifier
        self.units = nn.Sequential(*(unit for block in net.blocks for unit in FoldedBlock(block).units))

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits."""
        u = F.relu(self.norm(self.units(self.stem(images))))
        logits: Tensor = self.classifier(u.mean((2, 3)))
        return logits


@lru_cache(maxsize=1)
def dense_alternatives(units: int, batch: int, compiling: bool) -> dict[str, Model]:
    """Return plain networks ready to run; compiled ones are for this batch."""
    torch.manual_seed(0)
    plain = plain_net(units)
    found: dict[str, Model] = {
        "eager": plain_net(units),
        "channels_last": plain.to(memory_format=torch.channels_last),  # type: ignore[call-overload]
        "folded": FoldedNet(plain),
    }
    if compiling:
        torch.compiler.reset()
        found["compiled"] = torch.compile(FoldedNet(plain))
        found["compiled_frozen"] = torch.compile(FoldedNet(plain), options={"freezing": True})
    return found


def plain_net(units: int) -> ResNet:
    return build(ResNetConfig(units=units, adaptive=False)).eval()


def smooth_noise(batch: int, size: int, per: str) -> Tensor:
    """Return noise from 0 to 1 whose level sets are blobs a few pixels wide, or one number an image."""
    if per == "image":
        levels = (torch.randperm(batch) + 0.5) / batch
        return levels[:, None, None, None].expand(-1, 1, size, size)
    noise = torch.randn(batch, 1, size + 16, size + 16)
    noise = F.avg_pool2d(F.avg_pool2d(noise, 9, 1), 9, 1)
    ranks = noise.flatten(1).argsort(1).argsort(1).float() / size**2
    return ranks.view(batch, 1, size, size)


@torch.no_grad()
def with_blobs(config: ResNetConfig, batch: int, active: float) -> tuple[ResNet, Tensor]:
    """Return a network of random weights and images of which it keeps a fraction active after first units."""
    torch.manual_seed(0)
    model = build(config, "thresholded").eval()
    images = torch.randn(batch, 3, config.image_size, config.image_size)
    noise = smooth_noise(batch, config.image_size, config.per)
    images[:, :1] = noise
    channel = 0
    model.stem.weight[0] = 0
    model.stem.weight[0, 0, 1, 1] = 1
    for k, block in enumerate(model.blocks):
        if k:
            noise = F.avg_pool2d(noise, 2)
            channel += block.steps[0].padding // 2  # type: ignore[index, union-attr]
        bound = 2.0 if active == 1 else noise.flatten().quantile(active)
        for unit in block.steps:  # type: ignore[union-attr]
            unit.conv2.weight.mul_(0.1)[channel] = 0
        for head in block.halting:  # type: ignore[union-attr]
            weight = head.linear.weight if head.conv is None else head.conv.weight[:, :, 1, 1]
            for each in head.parameters():
                each.zero_()
            weight[0, channel] = 100
            head.linear.bias.fill_(-100 * bound)
    return model, images


def cases(arguments: argparse.Namespace) -> Iterator[tuple[str, ResNet, Tensor]]:
    trained = [load_model(path) for path in arguments.checkpoints]
    images = standardize(load_sample("test").images)
    for units, batch in itertools.product(arguments.units, arguments.batch):
        for active in arguments.active:
            yield f"blobs {active:.0%}", *with_blobs(ResNetConfig(units=units), batch, active)
        if batch > 1:
            yield "images 50%", *with_blobs(ResNetConfig(units=units, per="image"), batch, 0.5)
        for model, config in trained:
            if config.network.adaptive and config.network.units == units:
                yield f"trained, {config.method}, tau {config.tau:g}", model, images[:batch]


def measure(masks: str, model: ResNet, images: Tensor, arguments: argparse.Namespace) -> dict[str, object]:
    units = model.config.units
    dense = dense_alternatives(units, len(images), arguments.compile)
    ours = {"deployed": tp.deploy(model, images, mode="thresholded")}
    for name in arguments.engines:
        fast = tp.deploy(model, images, mode="thresholded", engines=[name])
        if {each.engine for each in fast.report.measurements} == {name, "blocks"}:
            ours[name] = fast
    ours["native_plain"] = tp.deploy(plain_net(units), images, engines=["native"])
    last = images.contiguous(memory_format=torch.channels_last)
    calls = {
        f"plain {name}": partial(run, images if name == "eager" else last) for name, run in dense.items()
    }
    calls |= {name: partial(run, last) for name, run in ours.items()}
    with torch.no_grad(), tp.use_mode(model, "thresholded"):
        times = interleaved(calls, seconds=arguments.seconds, least=11, most=400)
        flops = float(tp.count_flops(model, images).mean)
    best = min(dense, key=lambda name: times[f"plain {name}"])
    best_time = times[f"plain {best}"]
    speedup, theory = best_time / times["deployed"], max_flops(plain_net(units)) / flops
    row: dict[str, object] = {
        "network": f"ResNet-{6 * units + 2}",
        "batch": len(images),
        "masks": masks,
        "best_dense": best,
        "best_dense_ms": round(1e3 * best_time, 3),
        "deployed_ms": round(1e3 * times["deployed"], 3),
        "speedup": round(speedup, 2),
        "flops_speedup": round(theory, 2),
        "of_theory": round(speedup / theory, 2),
    }
    for name in (*ENGINES, "native_plain"):
        row[f"{name}_ms"] = round(1e3 * times[name], 3) if name in times else ""
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description="deployed networks on a CPU")
    parser.add_argument("--units", type=int, nargs="*", default=[5, 18])
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 64])
    parser.add_argument("--active", type=float, nargs="*", default=[0.25, 0.5, 0.75, 1.0])
    parser.add_argument("--engines", nargs="*", default=ENGINES, help="to be timed one by one, too")
    parser.add_argument("--checkpoints", type=Path, nargs="*", default=[])
    parser.add_argument("--seconds", type=float, default=15.0, help="of measuring, for each row")
    parser.add_argument(
        "--compile", action=argparse.BooleanOptionalAction, default=shutil.which("c++") is not None
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".csv"))
    arguments = parser.parse_args()
    rows = []
    for masks, model, images in cases(arguments):
        rows.append(measure(masks, model, images, arguments))
        print(*rows[-1].values(), sep="\t", flush=True)
        write_csv(arguments.out, rows)


if __name__ == "__main__":
    main()
