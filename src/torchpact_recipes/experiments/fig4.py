"""Fig. 4: training by the relaxation against training by REINFORCE, for fewer and more latent variables."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchpact_recipes.experiments.archive import Archive
from torchpact_recipes.experiments.gather import at_end, finished, inventory, over_seeds, through_training
from torchpact_recipes.experiments.labels import Label, write_labels
from torchpact_recipes.experiments.plotting import (
    COLORS,
    canvas,
    count_iterations,
    draw_curve,
    draw_points,
    save,
)
from torchpact_recipes.experiments.runs import Run, Scale, adaptive, looks
from torchpact_recipes.training.run_files import Event

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TAU = 0.1
GROUPS = {8: 21, 4: 84, 2: 336, 1: 1344}
"""Pixels a side that share a decision, and the number M of latent variables that makes."""
METHODS = {"relaxed": "relaxation", "reinforce": "REINFORCE"}
PARTS = {
    "total": "all parameters, images and latents drawn",
    "latents": "all parameters, only latents drawn",
    "halting": "halting heads, only latents drawn",
}
"""Of what the variance is; see :mod:`torchpact_recipes.training.variance`."""
LINES = {21: ":", 84: "-.", 336: "--", 1344: "-"}
MARKERS = {21: "o", 84: "s", 336: "^", 1344: "D"}


def runs(scale: Scale, seeds: list[int]) -> list[Run]:
    """Both methods for every M, with the variance of their gradients."""
    groups = GROUPS if scale.name != "smoke" else {8: 21}
    samples = 32 if scale.name != "smoke" else 2
    often = looks(scale, 8) | {"variance_samples": samples}
    return [
        adaptive(scale, 32, method, TAU, seed, network={"group": group}, **often)
        for seed in seeds
        for group in groups
        for method in METHODS
    ]


def draw(archive: Archive, scale: Scale, seeds: list[int], folder: Path) -> list[Path]:
    """Variance and where it leads to; in a second figure, the variance of each part."""
    wanted = runs(scale, seeds)
    found = finished(wanted, archive)
    settings = [_setting(group, archive) for group in found.values()]
    settings.sort(key=lambda s: (list(METHODS).index(s["method"]), s["latents"]))
    text = f"{scale.network(32)}, τ = {TAU}, {scale.length}: {over_seeds(found, wanted)}"
    numbers = {"tau": TAU, "settings": settings, **inventory(wanted, found)}
    with canvas(2, size=(9, 3.6)) as (figure, (left, right)):
        layout: Any = figure.get_layout_engine()
        layout.set(wspace=0.06)  # for the label between the panels
        _draw_variance(left, settings, "total")
        left.set_ylabel("log₁₀ variance of the gradient")
        _draw_ends(right, settings)
        figure.suptitle(text, fontsize=9)
        figure.legend(*left.get_legend_handles_labels(), loc="outside right center")
        write_labels(right, [_label(setting) for setting in settings])
        paths = save(figure, folder, "fig4", numbers)
    with canvas(3, size=(10.5, 3.4), sharex=True) as (figure, axes):
        for panel, (part, title) in zip(axes, PARTS.items(), strict=True):
            _draw_variance(panel, settings, part)
            panel.set_title(title)
        axes[0].set_ylabel("log₁₀ variance of the gradient")
        figure.suptitle(text, fontsize=9)
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right center")
        return paths + save(figure, folder, "fig4-variance", numbers)


def _setting(group: list[Run], archive: Archive) -> dict[str, Any]:
    """What is drawn of a method and an M."""
    config = group[0].config
    return {
        "method": config.method,
        "latents": GROUPS[config.network.group],
        "n": len(group),
        "log10_variance": {part: through_training(group, archive, _log_variance(part)) for part in PARTS},
        "end": at_end(group, archive, "discrete"),
    }


def _log_variance(part: str) -> Callable[[Run, Event], float | None]:
    def value(run: Run, event: Event) -> float | None:
        variance = event.get("gradient_variance", {}).get(part)
        return math.log10(variance) if variance else None

    return value


def _draw_variance(axes: "Axes", settings: list[dict[str, Any]], part: str) -> None:
    for setting in settings:
        method, latents = setting["method"], setting["latents"]
        curve = setting["log10_variance"][part]
        if curve is not None:
            style = {"color": COLORS[method], "linestyle": LINES[latents], "marker": MARKERS[latents]}
            draw_curve(axes, curve, label=f"{METHODS[method]}, M = {latents}", **style)
    count_iterations(axes)


def _draw_ends(axes: "Axes", settings: list[dict[str, Any]]) -> None:
    for setting in settings:
        style = {"color": COLORS[setting["method"]], "marker": MARKERS[setting["latents"]]}
        draw_points(axes, [setting["end"]], **style)
    axes.set(xlabel="MFLOPs an image", ylabel="test accuracy, %, discrete mode")
    axes.margins(0.12)


def _label(setting: dict[str, Any]) -> Label:
    end = setting["end"]
    text = f"{setting['latents']}"
    return Label(end["mflops"].mean, end["accuracy"].mean, text, COLORS[setting["method"]])
