"""What figures of sequences have in common: methods as points, against τ, steps and difficulty."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchpact_recipes.experiments.archive import Archive
from torchpact_recipes.experiments.gather import Spread, spread
from torchpact_recipes.experiments.plotting import COLORS, GREY, canvas, save
from torchpact_recipes.experiments.rnn_runs import SequenceRun

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SHOWN = {"act": "act", "relaxed": "thresholded", "reinforce": "discrete", "ponder": "discrete"}
"""The mode of evaluation in which a method is shown; others have none."""
NAMES = {
    "plain": "one step",
    "repeat": "repeat",
    "act": "ACT",
    "act-free": "ACT, first half free",
    "relaxed": "PACT, relaxed",
    "relaxed-free": "PACT, relaxed, first half free",
    "reinforce": "PACT, REINFORCE",
    "ponder": "PonderNet",
}
PAINT = COLORS | {
    "relaxed-free": "#56B4E9",
    "act-free": "#E69F00",
    "ponder": "#009E73",
    "repeat": GREY,
}
MARKS = {
    "plain": "*",
    "repeat": "D",
    "act": "o",
    "act-free": "p",
    "relaxed": "^",
    "relaxed-free": "P",
    "reinforce": "s",
    "ponder": "v",
}


@dataclass(frozen=True)
class Point:
    """What one setting came to, seeds together; accuracies and errors in per cent."""

    setting: str
    method: str
    """As in a configuration; one whose steps cost nothing at first has "-free" after it."""
    tau: float | None
    max_steps: int
    mode: str
    accuracy: Spread
    sequence_error: Spread | None
    bits: Spread | None
    steps: Spread
    steps_by_difficulty: dict[str, float]
    accuracy_by_difficulty: dict[str, float]
    transfer: Spread | None = None
    transfer_steps: Spread | None = None


def points_of(found: dict[str, list[SequenceRun]], archive: Archive) -> list[Point]:
    """A point for every setting."""
    return [_point(setting, group, archive) for setting, group in found.items()]


def _point(setting: str, group: list[SequenceRun], archive: Archive) -> Point:
    config = group[0].config
    mode = SHOWN.get(config.method, config.method)
    measured = [record["results"][mode] for run in group if (record := archive.record(run)) is not None]
    far = [m["transfer"] for m in measured if "transfer" in m]

    def of(name: str, scale: float = 1.0, among: list[dict[str, Any]] = measured) -> Spread | None:
        return spread([scale * m[name] for m in among]) if among and name in among[0] else None

    right = of("sequence_accuracy", 100.0)
    accuracy, steps = of("accuracy", 100.0), of("steps")
    assert accuracy is not None
    assert steps is not None
    return Point(
        setting=setting,
        method=config.method + ("-free" if config.free else ""),
        tau=None if config.method in ("plain", "repeat") else config.tau,
        max_steps=config.network.max_steps,
        mode=mode,
        accuracy=accuracy,
        sequence_error=None if right is None else Spread(100 - right.mean, right.sd, right.n),
        bits=of("bits_per_character"),
        steps=steps,
        steps_by_difficulty=_by_level(measured, far, "steps_by_difficulty"),
        accuracy_by_difficulty=_by_level(measured, far, "accuracy_by_difficulty", 100.0),
        transfer=of("accuracy", 100.0, far),
        transfer_steps=of("steps", 1.0, far),
    )


def _by_level(
    near: list[dict[str, Any]], far: list[dict[str, Any]], name: str, scale: float = 1.0
) -> dict[str, float]:
    """The mean over seeds at each difficulty, beyond those of training too."""
    found: dict[str, float] = {}
    for measured in (near, far):
        for level in measured[0].get(name, {}) if measured else ():
            values = [m[name][level] for m in measured if level in m[name]]
            found[level] = scale * spread(values).mean
    return found


def against_tau(axes: "Axes", points: Iterable[Point], value: str, label: str) -> None:
    """A quantity against the price of a step; those that have none as lines across."""
    points = list(points)
    for method, group in _by_method(points).items():
        style: dict[str, Any] = {"color": PAINT[method], "marker": MARKS[method]}
        priced = sorted((p for p in group if p.tau is not None), key=lambda p: p.tau or 0.0)
        if priced:
            _bars(axes, priced, lambda p: p.tau or 0.0, value, label=NAMES[method], **style)
    for point in points:
        if point.tau is None:
            level = getattr(point, value).mean
            axes.axhline(level, color=PAINT[point.method], linewidth=0.8, linestyle=":")
    if any(p.tau for p in points):
        axes.set_xscale("log")
    axes.set_xlabel("price of a step, τ")
    axes.set_ylabel(label)


def frontier(axes: "Axes", points: Iterable[Point], value: str, label: str) -> None:
    """A quantity against the steps it took, for all methods."""
    for method, group in _by_method(points).items():
        ordered = sorted(group, key=lambda p: p.steps.mean)
        axes.errorbar(
            [p.steps.mean for p in ordered],
            [getattr(p, value).mean for p in ordered],
            xerr=[p.steps.sd or 0.0 for p in ordered],
            yerr=[getattr(p, value).sd or 0.0 for p in ordered],
            color=PAINT[method],
            marker=MARKS[method],
            linestyle="-" if len(ordered) > 1 else "",
            elinewidth=0.8,
            label=NAMES[method],
        )
    axes.set_xlabel("steps")
    axes.set_ylabel(label)


def by_difficulty(axes: "Axes", points: Iterable[Point], value: str, label: str) -> None:
    """A quantity against difficulty, for every method at its lowest price, or most steps."""
    for method, group in _by_method(points).items():
        best = min(group, key=lambda p: (p.tau or 0.0, -p.max_steps))
        levels = getattr(best, value)
        name = NAMES[method] + (f", τ = {best.tau:g}" if best.tau else "")
        axes.plot(
            [int(level) for level in levels],
            list(levels.values()),
            color=PAINT[method],
            marker=MARKS[method],
            label=name,
        )
    axes.set_xlabel("difficulty")
    axes.set_ylabel(label)
    axes.locator_params("x", integer=True)


def beyond(axes: "Axes", points: Iterable[Point], value: str, label: str, high: int) -> None:
    """The same, with the difficulties that were never trained on shaded."""
    by_difficulty(axes, points, value, label)
    left, right = axes.get_xlim()
    axes.axvspan(high + 0.5, right, color="#000000", alpha=0.06, linewidth=0)
    axes.set_xlim(left, right)


def legend(figure: "Figure", axes: "Axes") -> None:
    """What is what, once for all panels and below them; without bars."""
    handles, labels = axes.get_legend_handles_labels()
    lines = [handle[0] if isinstance(handle, tuple) else handle for handle in handles]
    figure.legend(lines, labels, loc="outside lower center", ncols=4)


def overview(
    folder: Path, name: str, title: str, numbers: dict[str, Any], value: str, label: str, steps: str = "steps"
) -> list[Path]:
    """Draw a quantity and steps against τ, and against each other; ``numbers`` hold the points."""
    points = numbers["points"]
    with canvas(3, size=(9.6, 3.6)) as (figure, axes):
        against_tau(axes[0], points, value, label)
        against_tau(axes[1], points, "steps", steps)
        frontier(axes[2], points, value, label)
        legend(figure, axes[2])
        figure.suptitle(title)
        return save(figure, folder, name, numbers)


def _by_method(points: Iterable[Point]) -> dict[str, list[Point]]:
    found: dict[str, list[Point]] = {}
    for method in NAMES:
        if group := [p for p in points if p.method == method]:
            found[method] = group
    return found


def _bars(
    axes: "Axes", points: list[Point], place: Callable[[Point], float], value: str, **style: Any
) -> None:
    axes.errorbar(
        [place(p) for p in points],
        [getattr(p, value).mean for p in points],
        yerr=[getattr(p, value).sd or 0.0 for p in points],
        elinewidth=0.8,
        **style,
    )
