"""Fig. 5: accuracy against FLOPs of PSACT and SACT, ResNet-32 and ResNet-110."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchpact_recipes.experiments.archive import Archive
from torchpact_recipes.experiments.gather import at_end, finished, inventory, over_seeds
from torchpact_recipes.experiments.labels import Label, write_labels
from torchpact_recipes.experiments.plotting import COLORS, GREY, LINES, MARKERS, canvas, draw_points, save
from torchpact_recipes.experiments.published import PUBLISHED, Published
from torchpact_recipes.experiments.runs import Run, Scale, adaptive, looks, plain
from torchpact_recipes.training.titles import METHODS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TAUS: dict[int, dict[str, tuple[float, ...]]] = {
    32: {"relaxed": (0.05, 0.02, 0.01, 0.005, 0.001), "act": (0.1, 0.05, 0.01, 0.005)},
    110: {"relaxed": (0.01, 0.005, 0.001), "act": (0.005, 0.001, 0.0005)},
}
"""The grids of the supplement."""

SERIES = (("relaxed", "discrete"), ("relaxed", "thresholded"), ("act", "act"))
"""Methods and modes of the figure."""
EXTENDED = (*SERIES, ("act", "thresholded"))
"""Those of the supplement's version."""


def runs(scale: Scale, seeds: list[int], depth: int = 32, halting_norm: bool = False) -> list[Run]:
    """PSACT and SACT for every τ of the supplement, and the plain networks they start from."""
    taus = TAUS[depth]
    if scale.name == "smoke":
        taus = {"relaxed": (0.01,), "act": (0.01,)}
    network = {"halting_norm": halting_norm}
    often = looks(scale, 4)
    return [
        *(plain(scale, depth, seed, **often) for seed in seeds),
        *(
            adaptive(scale, depth, method, tau, seed, network=network, **often)
            for method, grid in taus.items()
            for tau in grid
            for seed in seeds
        ),
    ]


def draw(
    archive: Archive, scale: Scale, seeds: list[int], folder: Path, depth: int = 32, name: str = "fig5"
) -> list[Path]:
    """The figure, and the supplement's version with SACT thresholded."""
    wanted = runs(scale, seeds, depth)
    found = finished(wanted, archive)
    # the small networks of a smoke test are not those that others have published
    others = PUBLISHED[depth] if scale.depths[depth] == (depth - 2) // 6 else ()
    paths = []
    for title, series in ((name, SERIES), (f"{name}-extended", EXTENDED)):
        points = [
            _point(group, archive, mode)
            for method, mode in (*series, ("plain", "plain"))
            for group in found.values()
            if group[0].config.method == method
        ]
        with canvas(size=(6.2, 4.2)) as (figure, (axes,)):
            _draw_points(axes, points, others)
            shown = f"{over_seeds(found, wanted)}, τ beside the points"
            axes.set_title(f"{scale.network(depth)}, {scale.length}: {shown}")
            write_labels(axes, _labels(points, others))
            numbers = {"points": points, "published": others, **inventory(wanted, found)}
            paths += save(figure, folder, title, numbers)
    return paths


def _point(group: list[Run], archive: Archive, mode: str) -> dict[str, Any]:
    config = group[0].config
    tau = None if config.method == "plain" else config.tau
    start = {"method": config.method, "mode": mode, "tau": tau, "n": len(group)}
    return start | at_end(group, archive, mode)


def _draw_points(axes: "Axes", points: list[dict[str, Any]], others: tuple[Published, ...]) -> None:
    for method, mode in dict.fromkeys((point["method"], point["mode"]) for point in points):
        chosen = [point for point in points if (point["method"], point["mode"]) == (method, mode)]
        style = {"color": COLORS[method], "linestyle": LINES[mode], "marker": MARKERS[mode]}
        label = METHODS[method] + ("" if method == mode else f", {mode}")
        draw_points(axes, chosen, label, zorder=3, markersize=9 if mode == "plain" else 4.5, **style)
    if others:
        x, y = [other.mflops for other in others], [other.accuracy for other in others]
        axes.plot(x, y, "o", color=GREY, markerfacecolor="none", linestyle="", label="published")
    axes.set(xlabel="MFLOPs an image", ylabel="test accuracy, %")
    axes.margins(0.08, 0.1)
    axes.legend(loc="best")


def _labels(points: list[dict[str, Any]], others: tuple[Published, ...]) -> list[Label]:
    """τ at the points, the first of those that lie side by side; names at what others have published."""
    labels = [
        Label(p["mflops"].mean, p["accuracy"].mean, f"{p['tau']:g}", COLORS[p["method"]])
        for p in points
        if (p["method"], p["mode"]) in (("relaxed", "discrete"), ("act", "act"))
    ]
    return labels + [Label(other.mflops, other.accuracy, other.label, GREY) for other in others]
