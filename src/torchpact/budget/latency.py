"""How long a deployed network takes on one batch, at several thresholds."""

import statistics
from collections.abc import Sequence
from datetime import datetime
from functools import partial
from typing import Any

from torch import nn

from torchpact.core.call_args import call_args, first_tensor
from torchpact.core.thresholds import Thresholds
from torchpact.engines import deploy
from torchpact.engines.timing import CpuContention, in_turns


class LatencyMeter:
    """Measures the milliseconds that a network, deployed once, takes on a batch with different thresholds.

    Args:
        net: A network with adaptive blocks.
        example: The batch.
        seconds: How long each measurement takes, about.

    """

    def __init__(self, net: nn.Module, example: Any, seconds: float = 0.5) -> None:
        self.given, self.seconds = call_args(example), seconds
        self.fast = deploy(net, example, mode="thresholded")
        self.batch = len(first_tensor(self.given))
        self.busy, self.when = False, ""

    def ms(self, thresholds: Sequence[Thresholds]) -> list[float]:
        """Return the median milliseconds at each of some thresholds, measured in turns."""
        contention = CpuContention()
        args, kwargs = self.given
        calls = {
            str(i): partial(self.fast, *args, **kwargs, thresholds=each) for i, each in enumerate(thresholds)
        }
        times = in_turns(calls, seconds=self.seconds * len(calls), least=5, most=200)
        self.busy, self.when = contention.is_high(), datetime.now().astimezone().isoformat(" ", "minutes")
        return [1e3 * statistics.median(times[name]) for name in calls]

    @property
    def engines(self) -> str:
        """What runs the blocks."""
        return ", ".join(dict.fromkeys(row.engine for row in self.fast.report.measurements))

    def __str__(self) -> str:
        """Return what was measured, when, and whether that means anything."""
        what = "1 example" if self.batch == 1 else f"{self.batch} examples"
        busy = "; other programs kept the cores busy, so that times mean little" if self.busy else ""
        return f"a batch of {what} by {self.engines}, measured {self.when}{busy}"
