"""The report of torchpact adapt: what halting costs and loses beside its alternatives, as one page."""

import html
import io
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from torchpact.files import write_whole
from torchpact_recipes.viz.figures import canvas

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NOTHING = 0.005
"""Differences below this share of the largest loss are called none."""
_LOOKS = {
    "heads": ("#4c72b0", "o-", "trained heads"),
    "confidence": ("#c44e52", "s-", "calibrated confidence"),
    "patience": ("#dd8452", "^-", "patience"),
    "random": ("#937860", "x--", "random, with the heads' histogram"),
    "oracle": ("#55a868", ":", "oracle, in hindsight"),
    "layer": ("#999999", ".--", "all leave after one layer"),
    "fewer layers": ("#333333", "D", "fewer layers, distilled alone"),
}


class Way(NamedTuple):
    """A way to spend less, and what it gives on the test batches."""

    criterion: str
    budget: float
    """The share of the FLOPs that was asked for."""
    cost: float
    loss: float
    ms: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Report:
    """All that the page says."""

    network: str
    data: str
    budget: float
    ways: tuple[Way, ...]
    ms: float
    """Of the test's first batch, deployed, at the budget."""
    ms_full: float
    """The same, where nothing halts."""
    measured: str
    table: str
    """Where positions halt, by block."""
    summary: str
    examples: int
    kind: str = "texts"
    """What the data is: "texts" or "images"."""

    def own(self) -> Way:
        """Return what the heads give at the budget."""
        return next(way for way in self.ways if way.criterion == "heads" and way.budget == self.budget)

    def verdict(self) -> str:
        """Return which way of those that can be executed loses least within the budget."""
        own = self.own()
        most = max(way.loss for way in self.ways)
        room = 1.005 * max(self.budget, own.cost)
        rivals = [way for way in self.ways if way.criterion != "oracle" and way.cost <= room]
        best = min(rivals, key=lambda way: way.loss)
        said = (
            f"At a budget of {self.budget:.0%} of the FLOPs the network costs {own.cost:.1%} and loses "
            f"{own.loss:.3g} on {self.examples} test examples."
        )
        if own.loss - best.loss <= NOTHING * most:
            return f"{said} Nothing else that was tried loses less at this cost."
        name = best.note or _name(best.criterion)
        return (
            f"{said} {name[0].upper()}{name[1:]} loses less, {best.loss:.3g} at {best.cost:.1%}: use that "
            "instead, or train longer."
        )

    def markdown(self) -> str:
        """Return the verdict and the ways at the budget, for a model card."""
        rows = [way for way in self.ways if way.budget == self.budget or way.criterion not in _FOLLOWING]
        lines = [
            "## Measured",
            "",
            self.verdict(),
            f"Deployed, a batch takes {self.ms:.3g} ms, {self.ms_full:.3g} ms where nothing halts "
            f"({self.measured}).",
            "",
            "| way | FLOPs | loss |",
            "|---|---|---|",
            *(f"| {way.note or _name(way.criterion)} | {way.cost:.1%} | {way.loss:.4g} |" for way in rows),
            "",
            f"Loss is the difference to the original network on {self.kind} of {self.data} that were "
            "neither trained on nor calibrated on.",
        ]
        return "\n".join(lines) + "\n"

    def to_json(self) -> str:
        """Return all of it as JSON."""
        return json.dumps({**asdict(self), "ways": [way._asdict() for way in self.ways]}, indent=1)


_FOLLOWING = ("heads", "confidence", "patience", "random", "oracle")


def _kind(criterion: str) -> str:
    return "layer" if criterion.startswith("layer ") else criterion


def _name(criterion: str) -> str:
    return f"all leave after {criterion}" if _kind(criterion) == "layer" else _LOOKS[criterion][2]


def write_report(report: Report, path: Path) -> Path:
    """Write the page: one file that asks nothing of any network.

    Args:
        report: What it says.
        path: Its name.

    """
    title = html.escape(f"{report.network} at {report.budget:.0%} of its FLOPs")
    rows = "".join(
        f"<tr><td>{html.escape(way.note or _name(way.criterion))}</td><td>{way.budget:.0%}</td>"
        f"<td>{way.cost:.1%}</td><td>{way.loss:.4g}</td>"
        f"<td>{'' if way.ms is None else f'{way.ms:.3g}'}</td></tr>"
        for way in report.ways
    )
    page = _PAGE.format(
        title=title,
        verdict=html.escape(report.verdict()),
        figure=_figure(report),
        rows=rows,
        table=html.escape(report.table),
        summary=html.escape(report.summary),
        ms=f"{report.ms:.3g}",
        ms_full=f"{report.ms_full:.3g}",
        measured=html.escape(report.measured),
        data=html.escape(report.data),
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, page.encode(errors="backslashreplace"))
    return path


def _figure(report: Report) -> str:
    """Return the curves as SVG."""
    timed = [way for way in report.ways if way.ms is not None]
    with canvas(2 if timed else 1, size=(9.6 if timed else 5.4, 3.6)) as (figure, axes):
        _curves(axes[0], report.ways, report.budget)
        if timed:
            points = sorted((way.ms or 0.0, way.loss) for way in timed)
            axes[1].plot(*zip(*points, strict=True), "o-", color=_LOOKS["heads"][0])
            axes[1].axvline(report.ms_full, color="#999999", lw=1, ls="--")
            axes[1].annotate(
                "nothing halts", (report.ms_full, max(loss for _, loss in points)), fontsize=7, ha="right"
            )
            axes[1].set_xlabel("ms a batch, deployed")
            axes[1].set_ylabel("loss")
            axes[1].set_ylim(bottom=0)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def _curves(ax: "Axes", ways: Sequence[Way], budget: float) -> None:
    for kind, (colour, style, label) in _LOOKS.items():
        own = [way for way in ways if _kind(way.criterion) == kind]
        points = sorted((100 * way.cost, way.loss) for way in own)
        if points:
            ax.plot(*zip(*points, strict=True), style, color=colour, label=label)
    ax.axvline(100 * budget, color="#cccccc", lw=1)
    ax.set_xlabel("FLOPs, % of the original")
    ax.set_ylabel("loss")
    ax.set_ylim(bottom=0)
    ax.legend(fontsize=7)


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }}
svg {{ max-width: 100%; height: auto; }}
table {{ border-collapse: collapse; }}
td, th {{ padding: .2rem .8rem; border-bottom: 1px solid #ddd; text-align: right; }}
td:first-child, th:first-child {{ text-align: left; }}
pre {{ overflow-x: auto; background: #f6f6f6; padding: .8rem; }}
</style></head><body>
<h1>{title}</h1>
<p>{verdict}</p>
<p>Deployed, a batch takes {ms} ms, {ms_full} ms where nothing halts ({measured}).</p>
<h2>Quality against cost</h2>
{figure}
<p>Loss is the difference to the original network, on batches of {data} that were neither trained nor
calibrated on. FLOPs of confidence and patience include the read-outs that they evaluate. The oracle
chooses in hindsight; nothing reaches it.</p>
<h2>Where the compute goes</h2>
<pre>{table}</pre>
<pre>{summary}</pre>
<h2>All that was measured</h2>
<table><tr><th>way</th><th>asked</th><th>FLOPs</th><th>loss</th><th>ms</th></tr>{rows}</table>
</body></html>
"""
