"""What the figures of experiments have in common: colours, lines, curves and points."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torchpact_recipes.experiments.gather import Curve, Spread
from torchpact_recipes.viz.figures import canvas, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours, which people who see fewer can tell apart
COLORS = {"relaxed": "#0072B2", "act": "#D55E00", "reinforce": "#CC79A7", "plain": "#000000"}
MODE_COLORS = {"relaxed": "#E69F00", "discrete": "#0072B2", "thresholded": "#009E73"}
"""Where all lines are of one method."""
GREY = "#888888"

LINES = {"relaxed": "--", "discrete": "-", "thresholded": ":", "act": "-", "plain": ""}
MARKERS = {"relaxed": "^", "discrete": "o", "thresholded": "s", "act": "o", "plain": "*"}
"""By mode of evaluation."""

__all__ = [
    "COLORS", "GREY", "LINES", "MARKERS", "MODE_COLORS",
    "canvas", "count_iterations", "draw_curve", "draw_points", "save",
]  # fmt: skip


def draw_curve(axes: "Axes", curve: Curve, **style: Any) -> None:
    """A mean through training, with a band of one standard deviation."""
    axes.plot(curve.iterations, curve.mean, **style)
    if curve.sd is not None:
        low = [m - s for m, s in zip(curve.mean, curve.sd, strict=True)]
        high = [m + s for m, s in zip(curve.mean, curve.sd, strict=True)]
        axes.fill_between(curve.iterations, low, high, color=style["color"], alpha=0.1, linewidth=0)
        edge = {name: style[name] for name in ("color", "linestyle") if name in style}
        for side in (low, high):  # of bands that lie upon each other, too
            axes.plot(curve.iterations, side, alpha=0.45, linewidth=0.6, **edge)


def draw_points(
    axes: "Axes", points: Sequence[dict[str, Spread]], label: str | None = None, **style: Any
) -> None:
    """Accuracy against FLOPs, with bars of one standard deviation in both directions."""
    axes.errorbar(
        [p["mflops"].mean for p in points],
        [p["accuracy"].mean for p in points],
        xerr=[p["mflops"].sd or 0.0 for p in points],
        yerr=[p["accuracy"].sd or 0.0 for p in points],
        elinewidth=0.8,
        **style,
    )
    if label is not None:
        axes.plot([], [], label=label, **style)  # a legend without bars


def count_iterations(axes: "Axes") -> None:
    """An axis of iterations, in thousands where there are many."""
    axes.set_xlabel("iteration")
    axes.set_xlim(left=0)
    axes.locator_params("x", integer=True, nbins=5)
    if axes.get_xlim()[1] > 5000:
        axes.xaxis.set_major_formatter(lambda value, _: f"{value / 1000:g}k" if value else "0")
