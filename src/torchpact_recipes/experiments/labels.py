"""Labels beside the points of a plot, where they cover nothing."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_DIRECTIONS = 16
_DISTANCES = (5, 9, 14, 20, 28, 38)
"""In points; from the second on a line leads from the label to its point."""

_MARGIN = 2
"""Points to leave between a label and what is drawn."""


@dataclass(frozen=True)
class Label:
    """A text for the point at x, y."""

    x: float
    y: float
    text: str
    color: str


def write_labels(axes: "Axes", labels: Sequence[Label], size: float = 7.5) -> None:
    """Write each label as near to its point as it covers no line, no point and no other label.

    To be called when all else is drawn: the limits of the axes stay as they are found.
    """
    from matplotlib.text import Text

    axes.set_xlim(axes.get_xlim())
    axes.set_ylim(axes.get_ylim())
    figure: Any = axes.get_figure()
    figure.draw_without_rendering()  # settles where the axes are
    point = figure.dpi / 72
    drawn, taken = _drawn(axes, point), _legend(axes)
    frame = np.array(axes.get_window_extent().extents)
    centers = axes.transData.transform([(label.x, label.y) for label in labels])
    for center, label in zip(centers, labels, strict=True):
        text = axes.annotate(
            label.text,
            (label.x, label.y),
            (0, 0),
            textcoords="offset points",
            ha="center",
            va="center",
            color=label.color,
            fontsize=size,
            arrowprops={"arrowstyle": "-", "color": label.color, "lw": 0.5, "shrinkA": 0, "shrinkB": 2},
        )
        arrow: Any = text.arrow_patch
        extent = Text.get_window_extent(text)  # without its arrow
        half = np.array([extent.width, extent.height]) / 2
        alike = centers[[other.color == label.color for other in labels]]
        best = (math.inf, np.zeros(2), 0, frame)
        for rank, distance in enumerate(_DISTANCES):
            for k in range(_DIRECTIONS):
                angle = 2 * math.pi * k / _DIRECTIONS
                direction = np.array([math.cos(angle), math.sin(angle)])
                offset = direction * (distance * point + half)
                box = np.concatenate([center + offset - half, center + offset + half])
                cost = (
                    rank
                    + _cost(box, drawn, taken, frame, _MARGIN * point)
                    + 5 * _ambiguous(center, offset, alike)
                )
                if cost < best[0]:
                    best = (cost, offset / point, rank, box)
        text.set_position((float(best[1][0]), float(best[1][1])))
        arrow.set_visible(best[2] >= 1)
        taken.append(best[3])


def _cost(box: Any, drawn: Any, taken: list[Any], frame: Any, margin: float) -> float:
    inside = ((drawn > box[:2] - margin) & (drawn < box[2:] + margin)).all(1).sum()
    overlaps = sum(bool((box[:2] < other[2:]).all() and (other[:2] < box[2:]).all()) for other in taken)
    outside = bool((box[:2] < frame[:2]).any() or (box[2:] > frame[2:]).any())
    return float(2 * inside + 100 * overlaps + 1000 * outside)


def _ambiguous(center: Any, offset: Any, alike: Any) -> bool:
    """Whether a label is nearer to another point of its colour than to its own."""
    return bool((np.hypot(*(alike - center - offset).T) < np.hypot(*offset) - 1).any())


def _drawn(axes: "Axes", point: float) -> Any:
    """Pixels that lines, markers and error bars run through, two points apart."""
    found = [np.empty((0, 2))]
    segments = [line.get_xydata() for line in axes.lines]
    for line in axes.lines:
        if line.get_marker() not in ("None", "", None):
            radius = line.get_markersize() / 2 * point
            centers = axes.transData.transform(np.reshape(line.get_xydata(), (-1, 2)))
            found += [centers + radius * np.array(side) for side in ((-1, 0), (1, 0), (0, -1), (0, 1))]
    for collection in axes.collections:
        segments += getattr(collection, "get_segments", list)()
    for segment in segments:
        corners = axes.transData.transform(np.asarray(segment, dtype=float))
        found.append(corners)
        for a, b in itertools.pairwise(corners):
            count = int(np.hypot(*(b - a)) // (2 * point))
            found.append(a + (b - a) * np.linspace(0, 1, count + 2)[1:-1, None])
    return np.concatenate(found)


def _legend(axes: "Axes") -> list[Any]:
    legend = axes.get_legend()
    return [] if legend is None else [np.array(legend.get_window_extent().extents)]
