"""How figures look and how they are saved. matplotlib is only imported when one is drawn."""

import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torchpact.files import write_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DOTS = 200
"""An inch of a PNG."""

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
    "savefig.dpi": DOTS,
    "pdf.fonttype": 42,  # text stays text
}


@contextmanager
def blank(size: tuple[float, float], layout: Literal["constrained"] | None = None) -> Iterator["Figure"]:
    """An empty figure of ``size`` inches, in our style."""
    try:
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError(
            "expected the package matplotlib to be installed (from a clone: "
            'pip install "./src/torchpact_recipes[plot]")'
        ) from None
    # not by pyplot, whose figures and style are everybody's
    with matplotlib.rc_context(_STYLE):
        # as fine as it is saved: texts that are measured before would else be of another width
        figure = Figure(figsize=size, dpi=DOTS, layout=layout)
        FigureCanvasAgg(figure)
        yield figure


@contextmanager
def canvas(
    columns: int = 1, rows: int = 1, *, size: tuple[float, float], **options: Any
) -> Iterator[tuple["Figure", list["Axes"]]]:
    """A figure of ``size`` inches and its axes, row by row, in our style."""
    with blank(size, layout="constrained") as figure:
        axes = figure.subplots(rows, columns, squeeze=False, **options)
        yield figure, list(axes.flat)


def save(figure: "Figure", folder: Path, name: str, numbers: dict[str, Any] | None = None) -> list[Path]:
    """Write a figure as PNG and PDF, and the numbers it shows, if given, as JSON; return the paths."""
    contents = {}
    for suffix, metadata in (("png", {"Software": None}), ("pdf", {"CreationDate": None})):
        buffer = io.BytesIO()
        # no dates or versions: the same results give the same file
        figure.savefig(buffer, format=suffix, metadata=metadata)
        contents[suffix] = buffer.getvalue()
    if numbers is not None:
        text = json.dumps(numbers, indent=1, ensure_ascii=False, default=_plain)
        contents["json"] = f"{text}\n".encode(errors="backslashreplace")
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.{suffix}" for suffix in contents]
    for path, data in zip(paths, contents.values(), strict=True):
        write_whole(path, data)
    return paths


def _plain(value: object) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    raise TypeError(f"expected something JSON can hold, got {value!r}")
