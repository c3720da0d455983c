"""How figures look and how they are saved. matplotlib is only imported when one is drawn."""

import io
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchpact._files import write_whole
from torchpact.experiments.gather import Curve, Spread

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which people who see fewer can tell apart
COLORS = {"relaxed": "#0072B2", "act": "#D55E00", "reinforce": "#CC79A7", "plain": "#000000"}
MODE_COLORS = {"relaxed": "#E69F00", "discrete": "#0072B2", "thresholded": "#009E73"}
"""Where all lines are of one method."""
GREY = "#888888"

METHODS = {"relaxed": "PSACT", "act": "SACT", "reinforce": "REINFORCE", "plain": "plain ResNet"}
"""What the paper calls a network trained by a method."""

LINES = {"relaxed": "--", "discrete": "-", "thresholded": ":", "act": "-", "plain": ""}
MARKERS = {"relaxed": "^", "discrete": "o", "thresholded": "s", "act": "o", "plain": "*"}
"""By mode of evaluation."""

_STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "lines.linewidth": 1.4,
    "lines.markersize": 4.5,
    "errorbar.capsize": 2,
    "savefig.dpi": 200,
    "pdf.fonttype": 42,  # text stays text
}


@contextmanager
def canvas(
    columns: int = 1, rows: int = 1, *, size: tuple[float, float], **options: Any
) -> Iterator[tuple["Figure", list["Axes"]]]:
    """A figure of ``size`` inches and its axes, row by row, in our style."""
    try:
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError(
            "expected the package matplotlib to be installed (pip install torchpact[plot])"
        ) from None
    # not by pyplot, whose figures and style are everybody's
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=size, layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots(rows, columns, squeeze=False, **options)
        yield figure, list(axes.flat)


def save(figure: "Figure", folder: Path, name: str, numbers: dict[str, Any]) -> list[Path]:
    """Write a figure as PNG and PDF, and the numbers it shows as JSON; return the paths."""
    contents = {}
    for suffix, metadata in (("png", {"Software": None}), ("pdf", {"CreationDate": None})):
        buffer = io.BytesIO()
        # no dates or versions: the same results give the same file
        figure.savefig(buffer, format=suffix, metadata=metadata)
        contents[suffix] = buffer.getvalue()
    text = json.dumps(numbers, indent=1, ensure_ascii=False, default=_plain)
    contents["json"] = f"{text}\n".encode()
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.{suffix}" for suffix in contents]
    for path, data in zip(paths, contents.values(), strict=True):
        write_whole(path, data)
    return paths


def _plain(value: object) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    raise TypeError(f"expected something JSON can hold, got {value!r}")


def draw_curve(axes: "Axes", curve: Curve, **style: Any) -> None:
    """A mean through training, with a band of one standard deviation."""
    axes.plot(curve.iterations, curve.mean, **style)
    if curve.sd is not None:
        low = [m - s for m, s in zip(curve.mean, curve.sd, strict=True)]
        high = [m + s for m, s in zip(curve.mean, curve.sd, strict=True)]
        axes.fill_between(curve.iterations, low, high, color=style["color"], alpha=0.15, linewidth=0)


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
