"""How long a network takes in earnest, in each of its modes."""

import os
import statistics
import time
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from torchpact.data import Images
from torchpact.engines import deploy
from torchpact.models import ResNet
from torchpact.training.inputs import as_input

BATCH = 64


def measure(model: ResNet, data: Images, modes: Iterable[str], batch: int = BATCH) -> dict[str, Any]:
    """Return seconds an image of the deployed network, by mode, and of the same network run in full.

    Each mode is measured in turns with the network in full, so that both meet what else the machine does;
    where other programs keep all cores busy, even their ratio means little, and the name of the device says
    so. Seconds are these ratios times one time of the network in full, the median over modes.
    """
    others = Others()
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
        "device": _device(images.device) + (", while other programs ran" if others.in_the_way() else ""),
    }


class Others:
    """What other programs take of the machine, from now on, where the system tells."""

    def __init__(self) -> None:
        self.start = self._now()

    def in_the_way(self) -> bool:
        """Whether they have used more than half a core, and left less than one idle."""
        if self.start is None or (now := self._now()) is None:
            return False
        wall, used, idle = (after - before for after, before in zip(now, self.start, strict=True))
        return used > 0.5 * wall and idle < wall

    @staticmethod
    def _now() -> tuple[float, float, float] | None:
        """Seconds: of the clock; of all cores, used by others; of all cores, idle."""
        try:
            lines = Path("/proc/stat").read_text().splitlines()
            tick = os.sysconf("SC_CLK_TCK")
            # user, nice, system, idle, iowait, irq, softirq, steal
            spent = [int(number) / tick for number in lines[0].split()[1:9]]
        except (OSError, ValueError, IndexError, AttributeError):
            return None
        idle = spent[3] + spent[4]
        return time.monotonic(), sum(spent) - idle - sum(os.times()[:4]), idle


def _device(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{threads} CPU core{'' if threads == 1 else 's'}"
