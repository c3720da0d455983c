"""Measured time of a network in each of its modes."""

import statistics
import warnings
from collections.abc import Iterable
from typing import Any

import torch

from torchpact.engines import deploy
from torchpact.engines.timing import CpuContention
from torchpact.models import ResNet
from torchpact_recipes.data import Images, as_input

BATCH = 64


def measure(model: ResNet, data: Images, modes: Iterable[str], batch: int = BATCH) -> dict[str, Any]:
    """Return seconds an image of the deployed network, by mode, and of the same network run in full.

    Each mode is measured in turns with the network in full, so that both meet what else the machine does;
    where other programs keep all cores busy, even their ratio means little, and the name of the device says
    so. Seconds are these ratios times one time of the network in full, the median over modes.
    """
    others = CpuContention()
    images = as_input(data.images[:batch])
    ratios: dict[str, float] = {}
    plain = []
    for mode in modes:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that in a soft mode nothing is skipped: the page shows it
            fast = deploy(model.eval(), images, mode=None if mode == "plain" else mode)
        seconds = fast.report.measurements[-1].seconds
        ratios[mode] = seconds[fast.report.measurements[-1].engine] / seconds["plain"]
        plain.append(seconds["plain"] / len(images))
    full = statistics.median(plain)
    return {
        "modes": {mode: full * ratio for mode, ratio in ratios.items()},
        "plain": full,
        "batch": len(images),
        "device": _device(images.device) + (", while other programs ran" if others.is_high() else ""),
    }


def _device(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{threads} CPU core{'' if threads == 1 else 's'}"
