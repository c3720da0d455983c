"""Draws what benchmarks measured, where tables would be long: python docs/plots.py writes docs/images/bench.

Each figure is drawn from CSV files, whose digest it carries: ``--check`` only compares that. Points above the
diagonal gain more than FLOPs promise, those below less; under 1 the deployed network is slower than the best
dense alternative.
"""

import argparse
import csv
import hashlib
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib as mpl
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter

ROOT = Path(__file__).resolve().parent.parent
IMAGES = ROOT / "docs" / "images" / "bench"
COLORS = (
    *("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"),
    *("#000000", "#882255", "#999933", "#332288", "#117733", "#aa4499"),
)
MARKERS = ("o", "s", "^", "D", "v", "P")
TICKS = (0.25, 0.5, 0.75, 1, 1.5, 2, 3, 4, 5, 6, 8)

Row = dict[str, str]
Key = Callable[[Row], str]


class Plot(NamedTuple):
    """A figure: what it is drawn from, and how."""

    sources: tuple[str, ...]
    draw: Callable[[list[Row]], Figure]


def rows_of(names: Sequence[str]) -> list[Row]:
    rows: list[Row] = []
    for name in names:
        with (ROOT / "benchmarks" / f"{name}.csv").open(newline="") as file:
            rows += csv.DictReader(file)
    return rows


def digest(names: Sequence[str]) -> str:
    sums = [hashlib.sha256((ROOT / "benchmarks" / f"{name}.csv").read_bytes()).hexdigest() for name in names]
    return hashlib.sha256("".join(sums).encode()).hexdigest()


def against_theory(
    panel: Key,
    color: Key,
    marker: Key,
    *,
    promised: str = "flops_speedup",
    measured: str = "speedup",
    promise: str = "speed-up that FLOPs promise",
    gain: str = "measured speed-up over the fastest dense alternative",
) -> Callable[[list[Row]], Figure]:
    """Measured speed-ups over promised ones, on logarithmic axes, a panel for each value of ``panel``."""

    def draw(rows: list[Row]) -> Figure:
        rows = [row for row in rows if row[promised] and row[measured]]
        panels, colors, markers = (list(dict.fromkeys(map(key, rows))) for key in (panel, color, marker))
        figure, axes = plt.subplots(
            1, len(panels), figsize=(4.1 * len(panels) + 1.6, 4.2), layout="constrained", squeeze=False
        )
        numbers = [float(row[column]) for row in rows for column in (promised, measured)]
        limits = min(numbers) * 0.9, max(numbers) * 1.12
        for axis, title in zip(axes[0], panels, strict=True):
            _theory(axis, limits)
            axis.set_title(title, fontsize=10)
            for row in rows:
                if panel(row) != title:
                    continue
                axis.plot(
                    float(row[promised]),
                    float(row[measured]),
                    linestyle="",
                    marker=MARKERS[markers.index(marker(row)) % len(MARKERS)],
                    color=COLORS[colors.index(color(row)) % len(COLORS)],
                    markersize=6,
                    alpha=0.8,
                    markeredgewidth=0,
                )
        figure.supxlabel(promise, fontsize=10)
        figure.supylabel(gain, fontsize=10)
        hues = [_handle("o", c) for c in COLORS] if len(colors) > 1 else []
        shapes = [_handle(m, "0.35") for m in MARKERS] if len(markers) > 1 else []
        shown = [*zip(hues, colors, strict=False), *zip(shapes, markers, strict=False)]
        handles, labels = zip(*shown, strict=True)
        figure.legend(handles, labels, loc="outside right upper", frameon=False, fontsize=8)
        return figure

    return draw


def _handle(marker: str, color: str) -> mpl.lines.Line2D:
    return mpl.lines.Line2D([], [], linestyle="", marker=marker, color=color, markeredgewidth=0)


def _theory(axis: Axes, limits: tuple[float, float]) -> None:
    axis.plot(limits, limits, color="0.6", linewidth=1, zorder=0)
    axis.axhline(1, color="0.85", linewidth=0.8, zorder=0)
    axis.text(0.97, 0.9, "theory", transform=axis.transAxes, fontsize=8, color="0.45", ha="right", va="top")
    axis.set(xscale="log", yscale="log", xlim=limits, ylim=limits, aspect="equal")
    for side in (axis.xaxis, axis.yaxis):
        side.set_major_locator(FixedLocator(TICKS))
        side.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}×"))
        side.set_minor_formatter(NullFormatter())
        side.set_tick_params(labelsize=8, which="both", length=2)


def dots(
    label: Key, value: str, color: Key, *, xlabel: str, line: float | None = None
) -> Callable[[list[Row]], Figure]:
    """A line for each label, with a dot for each row."""

    def draw(rows: list[Row]) -> Figure:
        labels, colors = (list(dict.fromkeys(map(key, rows))) for key in (label, color))
        figure, axis = plt.subplots(figsize=(7.2, 0.27 * len(labels) + 1.1), layout="constrained")
        for row in rows:
            hue = COLORS[colors.index(color(row)) % len(COLORS)]
            axis.plot(float(row[value]), labels.index(label(row)), "o", color=hue, markersize=6, alpha=0.85)
        axis.set_yticks(range(len(labels)), labels, fontsize=8)
        axis.invert_yaxis()
        axis.grid(axis="y", color="0.92")
        axis.set_xlabel(xlabel, fontsize=9)
        axis.tick_params(labelsize=8)
        if line is not None:
            axis.axvline(line, color="0.6", linewidth=1, zorder=0)
        figure.legend(
            [_handle("o", c) for c, _ in zip(COLORS, colors, strict=False)],
            colors,
            loc="outside right upper",
            frameon=False,
            fontsize=8,
        )
        return figure

    return draw


def _images(row: Row) -> str:
    return "1 image" if row["batch"] == "1" else f"{int(row['batch']):,} images"


PRECISIONS = {"fp32": "fp32", "bf16": "bfloat16", "float32": "fp32", "bfloat16": "bfloat16"}

PLOTS: dict[str, Plot] = {
    "engines_cpu": Plot(
        ("engines_cpu",),
        against_theory(lambda r: PRECISIONS[r["precision"]], lambda r: r["network"], _images),
    ),
    "bottlenecks_cpu": Plot(
        ("bottlenecks_cpu",),
        against_theory(lambda r: "ResNet-50-like", lambda r: PRECISIONS[r["precision"]], _images),
    ),
    "blocks_cpu": Plot(
        ("blocks_cpu",), against_theory(lambda r: PRECISIONS[r["precision"]], lambda r: r["work"], _images)
    ),
    "by_position": Plot(
        ("by_position",),
        against_theory(
            lambda r: {"train": "a training step", "evaluate": "evaluation"}[r["does"]],
            lambda r: r["tokens"],
            lambda r: "",
        ),
    ),
    "transformer": Plot(
        ("transformer",),
        against_theory(
            lambda r: {"train": "a training step", "evaluate": "evaluation"}[r["does"]],
            lambda r: r["tokens"],
            lambda r: "",
        ),
    ),
    "attention_layers": Plot(
        ("attention_layers",),
        against_theory(
            lambda r: PRECISIONS[r["dtype"]],
            lambda r: r["layers"],
            lambda r: r["tokens"],
            promised="theory",
            promise="speed-up that FLOPs (decoding: bytes of weights) promise",
            gain="measured speed-up over the best of PyTorch",
        ),
    ),
    "bench_h200": Plot(
        ("bench_h200",),
        against_theory(
            lambda r: "networks" if "ResNet" in r["work"] else "blocks", lambda r: r["work"], _images
        ),
    ),
    "rnn_gpu": Plot(
        ("rnn_gpu",),
        against_theory(
            lambda r: f"{r['time']} time steps",
            lambda r: f"batch {r['batch']}",
            lambda r: f"{r['hidden']} units, {r['precision']}",
            promised="theory",
            promise="speed-up that steps promise",
            gain="measured speed-up over torch's recurrent layer",
        ),
    ),
    "narrow_conv": Plot(
        ("narrow_conv",),
        dots(
            lambda r: f"{r['channels']} channels, {r['size']}×{r['size']}, batch {r['batch']}",
            "ratio",
            lambda r: r["what"],
            xlabel="time of ours divided by cuDNN's",
            line=1,
        ),
    ),
    "evaluation": Plot(
        ("evaluation",),
        dots(
            lambda r: f"{r['network']}, {_images(r)}",
            "speed_to_plain",
            lambda r: r["mode"],
            xlabel="images a second, divided by the plain network's",
            line=1,
        ),
    ),
}


def drawn_from(path: Path) -> str | None:
    """The digest of what a figure was drawn from."""
    found = re.search(r"sources (\w{64})", path.read_text()) if path.exists() else None
    return found[1] if found else None


def main() -> None:
    parser = argparse.ArgumentParser(description="figures of benchmarks")
    parser.add_argument("--check", action="store_true", help="only say whether they are up to date")
    arguments = parser.parse_args()
    mpl.rcParams.update({"svg.hashsalt": "torchpact", "svg.fonttype": "path"})
    IMAGES.mkdir(parents=True, exist_ok=True)
    for name, plot in PLOTS.items():
        path, wanted = IMAGES / f"{name}.svg", digest(plot.sources)
        if arguments.check and drawn_from(path) != wanted:
            raise SystemExit(f"{path.relative_to(ROOT)} is not of today's CSV file: run python docs/plots.py")
        if not arguments.check:
            figure = plot.draw(rows_of(plot.sources))
            figure.savefig(path, metadata={"Date": None, "Description": f"sources {wanted}"})
            plt.close(figure)


if __name__ == "__main__":
    main()
