"""Evaluation by the dense engine: images a second and memory of each mode, beside the plain network.

    python benchmarks/evaluation.py [--device cuda] [--out benchmarks/evaluation.csv]

Every mode computes everything and masks, so adaptive networks are slower here than plain ones, whatever their
FLOPs: this is the table that engines which skip halted work have to beat. Weights and images are random and
halting biases are -1, so that positions stop early (`flops_to_plain` is what is left); outputs do not matter.
"""

import argparse
import statistics
import time
from pathlib import Path

import torch
from table import write_csv
from torch import nn

import torchpact as tp
from torchpact.models import HaltingHead, ResNet, ResNetConfig

MODES = ("relaxed", "discrete", "thresholded", "act")


def make(units: int, mode: str | None) -> ResNet:
    torch.manual_seed(0)
    model = tp.models.build(ResNetConfig(units=units, adaptive=mode is not None), mode)
    for module in model.modules():
        if isinstance(module, HaltingHead):
            nn.init.constant_(module.linear.bias, -1.0)
    if mode is not None:
        tp.use_mode(model, mode, details=False)  # only steps matter here
    return model.eval()


def measure(model: ResNet, images: torch.Tensor, repeats: int) -> tuple[float, int]:
    """Images a second, by the median of repeats, and the peak of memory on a GPU in MiB."""
    on_gpu = images.device.type == "cuda"
    times = []
    cast = torch.autocast(images.device.type, dtype=torch.bfloat16, enabled=on_gpu)
    with torch.no_grad(), cast:
        for _ in range(3):
            model(images)
        if on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        for _ in range(repeats):
            start = time.perf_counter()
            model(images)
            if on_gpu:
                torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated() >> 20 if on_gpu else 0
    return len(images) / statistics.median(times), peak


def main() -> None:
    parser = argparse.ArgumentParser(description="evaluation speed by mode")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--units", type=int, nargs="*", default=[5, 18])
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 128, 1024])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".csv"))
    arguments = parser.parse_args()
    rows: list[dict[str, object]] = []
    for units in arguments.units:
        for batch in arguments.batch:
            images = torch.randn(batch, 3, 32, 32, device=arguments.device)
            images = images.contiguous(memory_format=torch.channels_last)
            plain = 0.0
            for mode in (None, *MODES):
                model = make(units, mode).to(arguments.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
                speed, peak = measure(model, images, arguments.repeats)
                plain = plain or speed
                share = (
                    tp.count_flops(model, images).mean.item() / tp.count_flops(make(units, None), images).mean
                )
                rows.append(
                    {
                        "network": f"ResNet-{6 * units + 2}",
                        "mode": mode or "plain",
                        "batch": batch,
                        "images_per_second": round(speed),
                        "speed_to_plain": round(speed / plain, 3),
                        "flops_to_plain": round(float(share), 3),
                        "peak_MiB": peak,
                    }
                )
                print(*rows[-1].values(), sep="\t", flush=True)
    write_csv(arguments.out, rows)


if __name__ == "__main__":
    main()
