"""Parity, the first task of Graves: what a step costs and brings."""

from pathlib import Path
from typing import Any

from torchpact_recipes.experiments.archive import Archive
from torchpact_recipes.experiments.gather import finished, inventory, over_seeds
from torchpact_recipes.experiments.plotting import canvas, save
from torchpact_recipes.experiments.rnn_figures import by_difficulty, legend, overview, points_of
from torchpact_recipes.experiments.rnn_runs import SequenceRun, sequence_run
from torchpact_recipes.experiments.runs import Scale

TAUS: dict[str, dict[str, tuple[float, ...]]] = {
    "fast": {
        "relaxed": (0.1, 0.01, 0.001),
        "act": (0.1, 0.01, 0.001),
        "reinforce": (0.1, 0.01, 0.001),
        "ponder": (0.7, 0.3, 0.1),
    },
    "paper": {
        "relaxed": (0.03, 0.01, 0.003, 0.001, 0.0003),
        "act": (0.03, 0.01, 0.003, 0.001, 0.0003),
        "reinforce": (0.03, 0.01, 0.003, 0.001, 0.0003),
        "ponder": (0.7, 0.3, 0.1, 0.05),
    },
}
"""Prices of a step; PonderNet's is that of its prior, a geometric one of about 1/τ steps."""
REPEATS: dict[str, tuple[int, ...]] = {"fast": (2, 3, 5), "paper": (2, 3, 5, 10, 20)}
FREE: dict[str, tuple[float, ...]] = {"smoke": (0.01,), "fast": (0.1, 0.01), "paper": (0.03, 0.01, 0.003)}
"""Prices of those that pay nothing in the first half of training, while steps do not yet bring anything."""

SIZES: dict[str, dict[str, Any]] = {
    # learned in a minute on a CPU
    "fast": {"size": 8, "hidden": 64, "max_steps": 5, "iterations": 4000},
    "paper": {},
}


def runs(scale: Scale, seeds: list[int]) -> list[SequenceRun]:
    """All methods for every τ, and fixed numbers of steps."""
    name = "fast" if scale.name == "smoke" else scale.name
    taus, repeats = TAUS[name], REPEATS[name]
    if scale.name == "smoke":
        taus, repeats = {method: grid[-1:] for method, grid in taus.items()}, repeats[:1]

    def run(method: str, seed: int, **settings: Any) -> SequenceRun:
        return sequence_run(scale.name, "parity", method, seed, **SIZES[name] | settings)

    found = []
    for seed in seeds:
        found.append(run("plain", seed))
        found += [run("repeat", seed, max_steps=steps) for steps in repeats]
        found += [run(m, seed, tau=tau) for m, grid in taus.items() for tau in grid]
        found += [run(m, seed, tau=tau, free=0.5) for m in ("relaxed", "act") for tau in FREE[scale.name]]
    return found


def draw(archive: Archive, scale: Scale, seeds: list[int], folder: Path) -> list[Path]:
    """Accuracy and steps against τ, against each other and against difficulty."""
    wanted = runs(scale, seeds)
    found = finished(wanted, archive)
    points = points_of(found, archive)
    numbers = {"points": points, **inventory(wanted, found)}
    elements = max(int(level) for level in points[0].steps_by_difficulty)
    title = f"parity of {elements} elements, {scale.name}: {over_seeds(found, wanted)}"
    paths = overview(folder, "rnn-parity", title, numbers, "accuracy", "accuracy, %")
    with canvas(2, size=(8.4, 3.7)) as (figure, axes):
        by_difficulty(axes[0], points, "steps_by_difficulty", "steps")
        by_difficulty(axes[1], points, "accuracy_by_difficulty", "accuracy, %")
        legend(figure, axes[0])
        figure.suptitle(f"{title}, the lowest price of each")
        return paths + save(figure, folder, "rnn-parity-difficulty", {"points": points})
