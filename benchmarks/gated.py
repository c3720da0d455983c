"""Steps with a gate that is given, trained and evaluated in several ways, each compared with the best."""

import statistics
from collections.abc import Callable, Iterable, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from torchpact.engines.timing import in_turns
from torchpact.specs import dense_execution

Way = Callable[..., Tensor]


class Gated(nn.Module):
    """The loop of a block, but with gates that are given: from the second step on."""

    def __init__(self, units: Iterable[nn.Module]) -> None:
        super().__init__()
        self.units = nn.ModuleList(units)

    def forward(self, u: Tensor, gate: Tensor) -> Tensor:
        """Return the last state."""
        for number, unit in enumerate(self.units):
            u = unit(u, gate=gate if number else None)
        return u


class Dense(Gated):
    """The same in dense execution: everything is computed and multiplied by the gate."""

    def forward(self, u: Tensor, gate: Tensor) -> Tensor:
        """Return the last state."""
        if torch.compiler.is_compiling():  # which is dense anyway, and does not trace the setting
            return super().forward(u, gate)
        with dense_execution():
            return super().forward(u, gate)


def train(net: Way, u: Tensor, gate: Tensor) -> None:
    """Run it forward and backward."""
    net(u, gate).square().mean().backward()


def evaluate(net: Way, u: Tensor, gate: Tensor) -> None:
    """Run it without gradients."""
    with torch.no_grad():
        net(u, gate)


def compared(
    what: Callable[[Way, Tensor, Tensor], None],
    ways: Mapping[str, Way],
    ours: str,
    u: Tensor,
    gate: Tensor,
    *,
    theory: float,
    seconds: float,
) -> dict[str, object]:
    """Return the columns of a row: the best of the other ways, ours, and what FLOPs promise."""
    calls = {name: partial(what, net, u, gate) for name, net in ways.items()}
    times = in_turns(calls, seconds=seconds, least=5, most=400)
    ms = {name: 1e3 * statistics.median(each) for name, each in times.items()}
    best = min((name for name in ms if name != ours), key=ms.__getitem__)
    speedup = ms[best] / ms[ours]
    return {
        "best": best,
        "best_ms": round(ms[best], 3),
        f"{ours}_ms": round(ms[ours], 3),
        "speedup": round(speedup, 2),
        "flops_speedup": round(theory, 2),
        "of_theory": round(speedup / theory, 2),
    }
