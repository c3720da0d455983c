"""Batch norm with ReLU, and halting heads, there and back on one GPU: our kernels against the compiler's.

    python benchmarks/fused_kernels.py [--out benchmarks/fused_kernels.csv]

Microseconds of a forward and a backward pass, the median of CUDA graph replays, bf16, channels-last, batch
128; both are compiled, as in training, with what the compiler joins to them left out. ``kernels`` is how many
run.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gpu_timing import microseconds
from table import write_csv
from torch import Tensor, nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from torchpact.nn.conv_units import HaltingHead
from torchpact_recipes.training.compiling import compiled
from torchpact_recipes.training.kernels.fused_bn_relu import with_fused_norms
from torchpact_recipes.training.kernels.fused_head import with_fused_heads

SHAPES = ((16, 32), (32, 16), (64, 8))


def norms(channels: int) -> tuple[nn.Module, Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """The parameters, our norm and torch's."""
    plain, ours = nn.BatchNorm2d(channels).cuda(), nn.BatchNorm2d(channels).cuda()
    ours = with_fused_norms(ours)
    by_kernels: Any = ours.by_kernels
    return nn.ModuleList([ours, plain]), by_kernels, lambda x: F.relu(plain(x))


def heads(channels: int) -> tuple[nn.Module, Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """The same of halting heads."""
    plain, ours = HaltingHead(channels).cuda(), HaltingHead(channels).cuda()
    ours = with_fused_heads(ours)
    by_kernels: Any = ours.by_kernels
    return nn.ModuleList([ours, plain]), by_kernels, plain


@torch.enable_grad()
def there_and_back(layer: Callable[[Tensor], Tensor], parameters: list[nn.Parameter], x: Tensor) -> object:
    with torch.autocast("cuda", torch.bfloat16):
        y = layer(x)
    return torch.autograd.grad(y, [x, *parameters], torch.ones_like(y))


def kernels(work: Callable[[], object]) -> int:
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        work()
        torch.cuda.synchronize()
    return sum(event.device_type.name == "CUDA" for event in found.events())


def main() -> None:
    parser = argparse.ArgumentParser(description="our training kernels against the compiler's")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".csv"))
    arguments = parser.parse_args()
    rows: list[dict[str, object]] = []
    for what, make in (("norm and ReLU", norms), ("halting head", heads)):
        for channels, size in SHAPES:
            both, *layers = make(channels)
            both.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            x = torch.randn(128, channels, size, size, device="cuda", dtype=torch.bfloat16)
            x = x.contiguous(memory_format=torch.channels_last).requires_grad_()
            found = []
            for layer, owner in zip(layers, both.children(), strict=True):
                fast, parameters = compiled(layer), list(owner.parameters())

                def work(
                    fast: Any = fast, parameters: list[nn.Parameter] = parameters, x: Tensor = x
                ) -> object:
                    return there_and_back(fast, parameters, x)

                found.append((microseconds(work, times=10), kernels(work)))
            (ours, ours_kernels), (theirs, their_kernels) = found
            rows.append(
                {
                    "what": what,
                    "channels": channels,
                    "size": size,
                    "microseconds": round(ours, 1),
                    "kernels": ours_kernels,
                    "compiler_microseconds": round(theirs, 1),
                    "compiler_kernels": their_kernels,
                    "ratio": round(ours / theirs, 2),
                }
            )
            print(*rows[-1].values(), sep="\t", flush=True)
            write_csv(arguments.out, rows)


if __name__ == "__main__":
    main()
