"""How long a deployed network takes on one batch, at several thresholds."""

import statistics
from collections.abc import Sequence
from datetime import datetime
from functools import partial
from typing import Any

from torch import nn

from torchpact.budget.prices import NetworkPrices
from torchpact.core.call_args import call_args, first_tensor
from torchpact.core.exits import exit_thresholds
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
        names = dict.fromkeys(row.engine for row in self.fast.report.measurements)
        names.pop("blocks", None)  # the row of a network whose blocks are run one by one
        return ", ".join(names)

    def __str__(self) -> str:
        """Return what was measured, when, and whether that means anything."""
        what = "1 example" if self.batch == 1 else f"{self.batch} examples"
        busy = "; other programs kept the cores busy, so that times mean little" if self.busy else ""
        return f"a batch of {what} by {self.engines}, measured {self.when}{busy}"


def share_of_ms(net: nn.Module, example: Any, ms: float, prices: NetworkPrices) -> tuple[float, str]:
    """Return the share of the FLOPs that takes so many milliseconds, between exits that were measured.

    Args:
        net: A network with adaptive blocks.
        example: The batch.
        ms: The milliseconds.
        prices: What the steps cost.

    Returns:
        The share, and a note on the measurement.

    Raises:
        ValueError: One step of every block takes longer, or the whole network does not.

    """
    blocks = prices.blocks.values()
    steps = range(max(len(block.by_exit) for block in blocks))
    shares = [
        prices.fixed + sum(block.by_exit[min(i, len(block.by_exit) - 1)] for block in blocks) for i in steps
    ]
    meter = LatencyMeter(net, example)
    times = meter.ms([exit_thresholds(net, step + 1) for step in steps])
    times = [max(times[: i + 1]) for i in steps]  # noise does not make a longer run faster
    if not times[0] <= ms <= times[-1]:
        raise ValueError(f"expected a budget of {times[0]:.3g} to {times[-1]:.3g} ms for {meter}; got {ms:g}")
    index = next((i for i in steps[1:] if ms <= times[i]), 0)
    if index == 0:
        return shares[0], str(meter)
    width = times[index] - times[index - 1]
    part = (ms - times[index - 1]) / width if width else 1.0
    return shares[index - 1] + part * (shares[index] - shares[index - 1]), str(meter)
