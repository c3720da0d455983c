"""Parity, the first task of Graves: what a step costs and brings, and what lies beyond what was learned."""

from pathlib import Path
from typing import Any

from torchpact.experiments.archive import Archive
from torchpact.experiments.gather import finished, inventory, over_seeds
from torchpact.experiments.plotting import canvas, save
from torchpact.experiments.rnn_figures import (
    Point,
    against_tau,
    beyond,
    by_difficulty,
    frontier,
    legend,
    points_of,
)
from torchpact.experiments.rnn_runs import SequenceRun, sequence_run
from torchpact.experiments.runs import Scale

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
BEYOND = {"relaxed": 0.001, "act": 0.001, "ponder": 0.3}
"""The prices at which to see what lies beyond the difficulties of training."""

SIZES: dict[str, dict[str, Any]] = {
    # learned in a minute on a CPU
    "fast": {"size": 8, "hidden": 64, "max_steps": 5, "iterations": 4000},
    "paper": {},
}
FAR = {"smoke": (4, 2), "fast": (12, 6), "paper": (96, 48)}
"""Elements of the vector, and how many of them are used in training at most; more are beyond."""


def runs(scale: Scale, seeds: list[int]) -> list[SequenceRun]:
    """All methods for every τ, fixed numbers of steps, and training on the easier half."""
    name = "fast" if scale.name == "smoke" else scale.name
    taus, repeats = TAUS[name], REPEATS[name]
    if scale.name == "smoke":
        taus, repeats = {method: grid[-1:] for method, grid in taus.items()}, repeats[:1]
    near = SIZES[name]
    size, high = FAR[scale.name]
    far = near | {"size": size, "high": high, "transfer": {"size": size, "low": high + 1}}

    def run(method: str, seed: int, **settings: Any) -> SequenceRun:
        return sequence_run(scale.name, "parity", method, seed, **settings)

    found = []
    for seed in seeds:
        found.append(run("plain", seed, **near))
        found += [run("repeat", seed, **near | {"max_steps": steps}) for steps in repeats]
        found += [run(m, seed, tau=tau, **near) for m, grid in taus.items() for tau in grid]
        found += [
            run(m, seed, tau=tau, free=0.5, **near) for m in ("relaxed", "act") for tau in FREE[scale.name]
        ]
        found.append(run("repeat", seed, **far | {"max_steps": max(repeats)}))
        found += [run(m, seed, tau=tau, **far) for m, tau in BEYOND.items()]
    return found


def draw(archive: Archive, scale: Scale, seeds: list[int], folder: Path) -> list[Path]:
    """Accuracy and steps against τ, against each other and against difficulty; what lies beyond."""
    wanted = runs(scale, seeds)
    found = finished(wanted, archive)
    points = points_of(found, archive)
    near = [p for p in points if p.transfer is None]
    far = [p for p in points if p.transfer is not None]
    numbers = {"points": points, **inventory(wanted, found)}
    title = f"parity of {_elements(near or far)}, {scale.name}: {over_seeds(found, wanted)}"
    paths = []
    if near:
        with canvas(3, size=(9.6, 3.6)) as (figure, axes):
            against_tau(axes[0], near, "accuracy", "accuracy, %")
            against_tau(axes[1], near, "steps", "steps")
            frontier(axes[2], near, "accuracy", "accuracy, %")
            legend(figure, axes[2])
            figure.suptitle(title)
            paths += save(figure, folder, "rnn-parity", numbers)
        with canvas(2, size=(8.4, 3.7)) as (figure, axes):
            by_difficulty(axes[0], near, "steps_by_difficulty", "steps")
            by_difficulty(axes[1], near, "accuracy_by_difficulty", "accuracy, %")
            legend(figure, axes[0])
            figure.suptitle(f"{title}, the lowest price of each")
            paths += save(figure, folder, "rnn-parity-difficulty", {"points": near})
    if far:
        size, high = FAR[scale.name]
        with canvas(2, size=(8.4, 3.7)) as (figure, axes):
            beyond(axes[0], far, "accuracy_by_difficulty", "accuracy, %", high)
            beyond(axes[1], far, "steps_by_difficulty", "steps", high)
            legend(figure, axes[0])
            figure.suptitle(f"parity of {size}, trained on 1 to {high} elements, {scale.name}")
            paths += save(figure, folder, "rnn-parity-beyond", {"points": far})
    return paths


def _elements(points: list[Point]) -> str:
    return f"{max(int(level) for level in points[0].steps_by_difficulty)} elements"
