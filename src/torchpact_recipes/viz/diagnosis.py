"""The figure of a diagnosis: loss against cost, of fixed exits, criteria and the oracle."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torchpact import Diagnosis
from torchpact_recipes.viz.figures import canvas

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOURS = {"confidence": "#c44e52", "linear": "#4c72b0"}
_LABELS = {"confidence": "calibrated confidence", "linear": "linear predictor on the state"}


@contextmanager
def show_diagnosis(found: Diagnosis, title: str = "") -> "Iterator[Figure]":
    """Draw a panel for each block: losses of exits raw and through read-outs, and the frontiers.

    Args:
        found: The diagnosis.
        title: What stands above it.

    """
    panels = len(found.blocks)
    with canvas(panels, size=(4.8 * panels, 3.4)) as (figure, axes):
        for ax, block in zip(axes, found.blocks, strict=True):
            rows = [row for row in found.rows if row.block == block.block]
            costs = [100 * row.cost for row in rows]
            ax.plot(costs, [row.loss for row in rows], "o--", color="#999999", label="exits, own read-out")
            fitted = [(100 * row.cost, row.readout) for row in rows[:-1] if row.readout is not None]
            if fitted:
                ax.plot(
                    *zip(*fitted, strict=True),
                    "s",
                    color="#333333",
                    label="exits, fitted read-out",
                    mfc="none",
                )
            ax.plot(*_percent(block.fixed), color="#333333", lw=1, label="mixtures of fixed exits")
            for gain in block.gains:
                ax.plot(
                    *_percent(gain.curve), ".-", color=_COLOURS[gain.criterion], label=_LABELS[gain.criterion]
                )
            ax.plot(*_percent(block.oracle), ":", color="#55a868", label="oracle, in hindsight")
            ax.set_xlabel("FLOPs, % of the original")
            ax.set_ylabel(f"loss ({found.unit})" if found.unit else "loss")
            left, right = min(costs), max(costs)
            ax.set_xlim(
                left - 0.05 * (right - left), right + 0.15 * (right - left)
            )  # criteria may cost much more
            if panels > 1:
                ax.set_title(block.block)
            shown = [min(row.loss, row.readout if row.readout is not None else row.loss) for row in rows]
            _limit(ax, shown, [row.loss for row in rows], [loss for _, loss in block.oracle])
        axes[0].legend()
        if title:
            figure.suptitle(title)
        yield figure


def _limit(ax: "Axes", shown: list[float], raw: list[float], ideal: list[float]) -> None:
    """Cut off raw losses that would leave no room for all else, and say so."""
    low, high = min([*shown, *ideal]), max(shown)
    span = max(high - low, 1e-9)
    if max(raw) > high + 3 * span:
        ax.set_ylim(low - 0.05 * span, high + 0.6 * span)
        ax.annotate("some raw losses are above", (0.01, 0.99), xycoords="axes fraction", va="top", fontsize=7)


def _percent(points: tuple[tuple[float, float], ...]) -> tuple[list[float], list[float]]:
    return [100 * cost for cost, _ in points], [loss for _, loss in points]
