"""Speed-up against the share of active pixels, with what FLOPs promise."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchpact_recipes.viz.figures import canvas, save

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito's, which people who see fewer can tell apart."""
GREY = "#888888"


def draw(rows: Sequence[dict[str, Any]], folder: Path, title: str) -> list[Path]:
    """Draw a panel for every batch size: lines are measured, dots what FLOPs promise; return the paths."""
    rows = [row for row in rows if row["masks"].startswith("blobs")]
    batches = sorted({row["batch"] for row in rows})
    works = list(dict.fromkeys(row["work"] for row in rows))
    with canvas(len(batches), size=(3.2 * len(batches) + 1.6, 3.1), sharey=True) as (figure, panels):
        for axes, batch in zip(panels, batches, strict=True):
            for number, work in enumerate(works):
                points = [row for row in rows if (row["batch"], row["work"]) == (batch, work)]
                points.sort(key=_share)
                shares = [_share(row) for row in points]
                style: dict[str, Any] = {
                    "color": COLORS[number % len(COLORS)],
                    "marker": "os^Dv"[number // len(COLORS) % 5],
                }
                axes.plot(shares, [row["speedup"] for row in points], label=work, **style)
                promised = [row["flops_speedup"] for row in points]
                axes.plot(shares, promised, ":", color=style["color"], linewidth=1.2)
            axes.axhline(1, color=GREY, linewidth=0.8, zorder=0)
            axes.set_xticks(sorted({_share(row) for row in rows}))
            axes.set_title(f"batch {batch}")
            axes.set_xlabel("active pixels, %")
            axes.set_xlim(0, 104)
        panels[0].set_ylim(bottom=0)
        panels[0].set_ylabel("times as fast as the best dense")
        panels[0].plot([], [], ":", color=GREY, label="by FLOPs")
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right center")
        figure.suptitle(title, fontsize=9)
        return save(figure, folder, "bench")


def _share(row: dict[str, Any]) -> float:
    """The percents of active pixels.

    >>> _share({"masks": "blobs 25%"})
    25.0
    """
    return float(row["masks"].removeprefix("blobs ").removesuffix("%"))
