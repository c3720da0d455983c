"""3×3 convolutions of few channels on one GPU: our kernels against cuDNN's, forwards and backwards.

    python benchmarks/narrow_conv.py [--out benchmarks/narrow_conv.csv]

Microseconds of the median of CUDA graph replays, bf16, channels-last. cuDNN tries all its algorithms first.
The gradient of the weight is with all that it takes to get it, summing over chunks or conversion.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from gpu_timing import microseconds
from table import write_csv
from torch import Tensor
from torch.nn import functional as F

from torchpact_recipes.training.kernels.narrow_conv import _weight_gradient, narrow_conv

Work = Callable[[], object]


def passes(x: Tensor, dy: Tensor, weight: Tensor) -> dict[str, tuple[Work, Work]]:
    """Each of the three passes by our kernels and by cuDNN's."""

    def backward(*wanted: bool) -> object:
        ones = [1, 1]
        return torch.ops.aten.convolution_backward(
            dy, x, weight, None, ones, ones, ones, False, [0, 0], 1, [*wanted, False]
        )

    return {
        "output": (lambda: narrow_conv(x, weight), lambda: F.conv2d(x, weight, padding=1)),
        "input gradient": (lambda: narrow_conv(dy, weight, True), lambda: backward(True, False)),
        "weight gradient": (lambda: _weight_gradient(x, dy), lambda: backward(False, True)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="narrow convolutions against cuDNN")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".csv"))
    arguments = parser.parse_args()
    rows: list[dict[str, object]] = []
    for channels, size in ((16, 32), (32, 16), (64, 8)):
        for batch in (128, 1024):
            shape = (batch, channels, size, size)
            x = torch.randn(shape, device="cuda", dtype=torch.bfloat16).to(memory_format=torch.channels_last)
            dy = torch.randn_like(x)
            weight = torch.randn(channels, channels, 3, 3, device="cuda").mul_(0.1).bfloat16()
            weight = weight.to(memory_format=torch.channels_last)

            for name, (ours, theirs) in passes(x, dy, weight).items():
                own, cudnn = microseconds(ours, times=10), microseconds(theirs, times=10)
                rows.append(
                    {
                        "channels": channels,
                        "size": size,
                        "batch": batch,
                        "what": name,
                        "microseconds": round(own, 1),
                        "cudnn_microseconds": round(cudnn, 1),
                        "ratio": round(own / cudnn, 2),
                    }
                )
                print(*rows[-1].values(), sep="\t", flush=True)
                write_csv(arguments.out, rows)


if __name__ == "__main__":
    main()
