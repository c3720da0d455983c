"""Addition, the third task of Graves: error and steps against the price of a step, and by difficulty."""

from pathlib import Path
from typing import Any

from torchpact_recipes.experiments.archive import Archive
from torchpact_recipes.experiments.gather import finished, inventory, over_seeds
from torchpact_recipes.experiments.plotting import canvas, save
from torchpact_recipes.experiments.rnn_figures import against_tau, by_difficulty, frontier, legend, points_of
from torchpact_recipes.experiments.rnn_runs import SequenceRun, sequence_run
from torchpact_recipes.experiments.runs import Scale

METHODS = ("relaxed", "act", "reinforce")
TAUS: dict[str, tuple[float, ...]] = {
    "smoke": (0.01,),
    "fast": (0.1, 0.01, 0.001),
    "paper": (0.1, 0.03, 0.01, 0.003, 0.001, 0.0003),
}
FREE: dict[str, tuple[float, ...]] = {"smoke": (0.01,), "fast": (0.1, 0.01), "paper": (0.1, 0.03, 0.01)}
"""Prices of those that pay nothing in the first half of training."""
REPEATS: dict[str, tuple[int, ...]] = {"smoke": (2,), "fast": (2, 3, 5), "paper": (2, 3, 5, 10)}
SIZES: dict[str, dict[str, Any]] = {
    "smoke": {"max_numbers": 2, "max_digits": 1},
    # up to three numbers of up to two digits: learned in minutes on a CPU
    "fast": {
        "max_numbers": 3,
        "max_digits": 2,
        "hidden": 128,
        "max_steps": 5,
        "iterations": 10_000,
        "milestones": (0.8,),
    },
    "paper": {},
}


def runs(scale: Scale, seeds: list[int]) -> list[SequenceRun]:
    """Three methods for every τ, one step, and fixed numbers of them."""
    sizes = SIZES[scale.name]

    def run(method: str, seed: int, **settings: Any) -> SequenceRun:
        return sequence_run(scale.name, "addition", method, seed, **sizes | settings)

    found = []
    for seed in seeds:
        found.append(run("plain", seed))
        found += [run("repeat", seed, max_steps=steps) for steps in REPEATS[scale.name]]
        found += [run(m, seed, tau=tau) for m in METHODS for tau in TAUS[scale.name]]
        found += [run(m, seed, tau=tau, free=0.5) for m in ("relaxed", "act") for tau in FREE[scale.name]]
    return found


def draw(archive: Archive, scale: Scale, seeds: list[int], folder: Path) -> list[Path]:
    """Sequences with any wrong digit, and steps: against τ, against each other, and by difficulty."""
    wanted = runs(scale, seeds)
    found = finished(wanted, archive)
    points = points_of(found, archive)
    with canvas(4, size=(12.4, 3.5)) as (figure, axes):
        against_tau(axes[0], points, "sequence_error", "sequences with an error, %")
        against_tau(axes[1], points, "steps", "steps")
        frontier(axes[2], points, "sequence_error", "sequences with an error, %")
        by_difficulty(axes[3], points, "steps_by_difficulty", "steps")
        axes[3].set_xlabel("digits of the number added")
        legend(figure, axes[2])
        figure.suptitle(f"addition, {scale.name}: {over_seeds(found, wanted)}")
        return save(figure, folder, "rnn-addition", {"points": points, **inventory(wanted, found)})
