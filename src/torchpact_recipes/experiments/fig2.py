"""Fig. 2: ACT's ponder cost jumps as a halting probability changes; PACT's expected steps do not."""

from dataclasses import dataclass
from pathlib import Path

import torch

from torchpact import ACTHalting, act_halting, expected_steps
from torchpact_recipes.experiments.archive import Archive
from torchpact_recipes.experiments.plotting import COLORS, canvas, save
from torchpact_recipes.experiments.runs import Run, Scale

OTHERS = (1 / 3, 1 / 3, 1 / 3)
"""h², h³ and h⁴."""
STEP = 0.01


@dataclass(frozen=True)
class Jump:
    """Where the ponder cost changes at once, and from what to what."""

    h1: float
    before: float
    after: float


def runs(scale: Scale, seeds: list[int]) -> list[Run]:
    """None: it is exact."""
    return []


def ponder_costs(h1: list[float]) -> list[float]:
    """ACT's ρ for values of h¹."""
    return _act(h1).ponder_cost.tolist()


def pact_steps(h1: list[float]) -> list[float]:
    """PACT's expected number of iterations for values of h¹."""
    return expected_steps(_halting(h1)).tolist()


def jumps() -> list[Jump]:
    """All jumps of the ponder cost between h¹ = 0 and 1, found by halving intervals."""
    grid = [k * STEP for k in range(round(1 / STEP) + 1)]
    steps = _act(grid).steps.tolist()
    found = []
    for k in range(len(grid) - 1):
        if steps[k] != steps[k + 1]:
            low, high = grid[k], grid[k + 1]
            for _ in range(40):
                middle = (low + high) / 2
                low, high = (middle, high) if _act([middle]).steps[0] == steps[k] else (low, middle)
            found.append(Jump(high, *ponder_costs([low, high])))
    return found


def draw(archive: Archive, scale: Scale, seeds: list[int], folder: Path) -> list[Path]:
    """Both costs against h¹."""
    h1 = [round(k * STEP, 4) for k in range(round(1 / STEP) + 1)]
    rho, expected, breaks = ponder_costs(h1), pact_steps(h1), jumps()
    with canvas(size=(4.6, 3.2)) as (figure, (axes,)):
        color, label = COLORS["act"], "ACT: ponder cost ρ = N + R"
        starts = [(0.0, rho[0]), *((jump.h1, jump.after) for jump in breaks)]
        ends = [*((jump.h1, jump.before) for jump in breaks), (1.0, rho[-1])]
        for start, end in zip(starts, ends, strict=True):  # linear in between
            axes.plot(*zip(start, end, strict=True), color=color, label=label)
            label = "_"
        for jump in breaks:
            axes.plot([jump.h1] * 2, [jump.before, jump.after], ":", color=color, linewidth=0.8)
            axes.plot(jump.h1, jump.before, "o", color=color, markerfacecolor="white")
            axes.plot(jump.h1, jump.after, "o", color=color)
        axes.plot(h1, expected, color=COLORS["relaxed"], label="PACT: expected steps N")
        axes.set(xlabel="halting probability h¹   (h² = h³ = h⁴ = 1/3)", ylabel="cost of a position")
        axes.set_ylim(0.8, 4.6)
        axes.legend(loc="upper right")
        numbers = {"h1": h1, "ponder_cost": rho, "expected_steps": expected, "jumps": breaks}
        return save(figure, folder, "fig2", numbers)


def _halting(h1: list[float]) -> torch.Tensor:
    first = torch.tensor(h1, dtype=torch.double)
    return torch.stack([first, *(torch.full_like(first, h) for h in OTHERS)])


def _act(h1: list[float]) -> ACTHalting:
    return act_halting(_halting(h1))
