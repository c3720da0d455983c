"""3×3 convolutions of few channels on one GPU: our kernels against cuDNN's, forwards and backwards.

    python benchmarks/narrow_conv.py [--out benchmarks/narrow_conv.csv]

Microseconds of the median of CUDA graph replays, bf16, channels-last. cuDNN tries all its algorithms first.
The gradient of the weight is with all that it takes to get it, summing over chunks or conversion.
"""

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
from table import write_csv
from torch import Tensor
from torch.nn import functional as F

from torchpact.training.algorithms import fastest_algorithms
from torchpact.training.narrow_conv import _weight_gradient, narrow_conv


def microseconds(work: Callable[[], object], inner: int = 10) -> float:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            work()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(inner):
                work()
        times = []
        for _ in range(23):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e3 / inner)
    return float(statistics.median(times[3:]))


Work = Callable[[], object]


def passes(x: Tensor, dy: Tensor, weight: Tensor) -> dict[str, tuple[Work, Work]]:
    """Each of the three passes by our kernels and by cuDNN's."""
    turned = weight.flip(2, 3).transpose(0, 1)

    def backward(*wanted: bool) -> object:
        ones = [1, 1]
        return torch.ops.aten.convolution_backward(
            dy, x, weight, None, ones, ones, ones, False, [0, 0], 1, [*wanted, False]
        )

    return {
        "output": (lambda: narrow_conv(x, weight), lambda: F.conv2d(x, weight, padding=1)),
        "input gradient": (lambda: narrow_conv(dy, turned), lambda: backward(True, False)),
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
                with fastest_algorithms():
                    own, cudnn = microseconds(ours), microseconds(theirs)
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
