"""Figures of the comparisons, from their results: python -m torchpact_recipes.halting.figures.

``criteria``  accuracy of reviews, and loss of stories, against cost: heads, confidence, students
``diagnose``  what diagnose said beforehand: the loss of each exit against cost, and the best criterion

Panels whose results are missing are left out.
"""

import argparse
import csv
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchpact_recipes.halting.review_criteria import LEARNED, TAUS
from torchpact_recipes.halting.tables import means
from torchpact_recipes.viz.figures import canvas, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Rows = list[dict[str, str]]
Panel = Callable[["Axes"], dict[str, Any]]

COLOURS = {
    "confidence": "#c44e52",
    "patience": "#dd8452",
    "linear + confidence": "#4c72b0",
    "learned confidence": "#937860",
    "mlp": "#8172b3",
    "heads": "#4c72b0",
}
UNSHOWN = [f"{name}, τ = {tau}" for name in LEARNED for tau in TAUS if tau != 0.03]
"""Prices that the figure of cross-fitted criteria leaves out."""
MOST_SHOWN = 105
"""Per cent of the FLOPs that panels of a diagnosis show."""
TITLES = {
    "smollm2": "SmolLM2-135M, next token of reviews",
    "stories": "stories15M, its own stories",
    "reviews": "MiniLM tuned without exits, reviews",
    "exits": "MiniLM tuned with exits, reviews",
}


def read_rows(path: Path) -> Rows:
    """Return the rows of a CSV file; none where there is no file."""
    if not path.is_file():
        return []
    with path.open(newline="") as file:
        return [*csv.DictReader(file)]


def reviews_panel(rows: Rows, curves: Rows) -> Panel:
    """Return the panel of the reviews: the test data, or the validation data where it was not opened."""
    part = "test" if any(row["part"] == "test" for row in rows) else "validation"

    def draw(ax: "Axes") -> dict[str, Any]:
        shown: dict[str, Any] = {}
        found = means(
            [row for row in curves if row["part"] == part], ["criterion", "budget"], ["cost", "accuracy"]
        )
        for criterion in dict.fromkeys(key[0] for key in found):
            line = [(100 * cost, 100 * right) for key, (cost, right) in found.items() if key[0] == criterion]
            shown[criterion] = sorted(line)
            ax.plot(*zip(*shown[criterion], strict=True), ".-", color=COLOURS.get(criterion), label=criterion)
        own = means([row for row in rows if row["part"] == part], ["network"], ["cost", "accuracy"])
        points = {key[0]: (100 * cost, 100 * right) for key, (cost, right) in own.items()}
        students = sorted(xy for name, xy in points.items() if name.startswith("student"))
        exits = sorted(xy for name, xy in points.items() if name.startswith("all leave"))
        ax.plot(*zip(*exits, strict=True), "o--", color="#999999", mfc="none", label="all leave at one exit")
        ax.plot(*zip(*students, strict=True), "s", color="#333333", label="students of 2 and 3 layers")
        ax.plot(*points["whole"], "*", color="#333333", ms=9, label="whole network")
        ax.set(
            xlabel="FLOPs, % of the whole network", ylabel="accuracy, %", title=f"MiniLM, reviews ({part})"
        )
        ax.legend()
        return shown | {"students": students, "all leave at one exit": exits, "whole": points["whole"]}

    return draw


def crossed_panel(rows: Rows) -> Panel:
    """Return the panel of criteria that were cross-fitted on training reviews, one common threshold each."""

    def draw(ax: "Axes") -> dict[str, Any]:
        shown: dict[str, Any] = {}
        fixed = means([row for row in rows if not row["budget"]], ["criterion"], ["cost", "accuracy"])
        exits = sorted((100 * cost, 100 * right) for cost, right in fixed.values())
        ax.plot(*zip(*exits, strict=True), "o--", color="#999999", mfc="none", label="all leave at one exit")
        some = [row for row in rows if row["thresholds"] == "common" and row["criterion"] not in UNSHOWN]
        found = means(some, ["criterion", "budget"], ["cost", "accuracy"])
        for name in dict.fromkeys(key[0] for key in found):
            line = sorted((100 * cost, 100 * right) for key, (cost, right) in found.items() if key[0] == name)
            shown[name] = line
            ax.plot(*zip(*line, strict=True), ".-", color=COLOURS.get(name.split(",")[0]), label=name)
        ax.set(xlabel="FLOPs, % of the whole network", ylabel="accuracy, %")
        ax.set_title("MiniLM, unseen training reviews, cross-fitted")
        ax.legend()
        return shown | {"all leave at one exit": exits}

    return draw


def stories_panel(rows: Rows) -> Panel:
    """Return the panel of the stories."""

    def draw(ax: "Axes") -> dict[str, Any]:
        own = means(rows, ["network"], ["layers", "excess"])
        points = {key[0]: tuple(xy) for key, xy in own.items()}
        heads = sorted(xy for name, xy in points.items() if name.startswith("heads"))
        exits = sorted(xy for name, xy in points.items() if name.startswith("all leave"))
        students = sorted(xy for name, xy in points.items() if name.startswith("student"))
        ax.plot(*zip(*heads, strict=True), ".-", color=COLOURS["heads"], label="heads on the state")
        ax.plot(*zip(*exits, strict=True), "o--", color="#999999", mfc="none", label="all leave at one exit")
        if students:
            ax.plot(*zip(*students, strict=True), "s", color="#333333", label="students, distilled")
        for name, marker in (("confidence", "D"), ("patience", "v"), ("random", "x"), ("oracle", "^")):
            if name in points:
                ax.plot(*points[name], marker, color=COLOURS.get(name, "#55a868"), label=name)
        ax.axhline(0, color="#333333", lw=0.8)
        most = max([excess for layers, excess in heads if layers > 3] or [1.0])
        ax.set_ylim(min(-0.3, points.get("oracle", (0, 0))[1] - 0.05), max(0.2, 1.3 * most))
        ax.set(
            xlabel="layers of a token", ylabel="loss above the original, nats", title="stories15M, next token"
        )
        ax.legend()
        return {name: list(xy) for name, xy in points.items()}

    return draw


def diagnosis_panel(name: str, found: dict[str, Any]) -> Panel:
    """Return the panel of a diagnosis, from its JSON."""

    def draw(ax: "Axes") -> dict[str, Any]:
        rows, block = found["rows"], found["blocks"][0]
        costs = [100 * row["cost"] for row in rows]
        best = [row["loss"] if row["readout"] is None else min(row["loss"], row["readout"]) for row in rows]
        best[-1] = rows[-1]["loss"]
        ax.plot(costs, best, "o--", color="#999999", mfc="none", label="all leave at one exit")
        for gain in block["gains"]:
            line = [(100 * cost, loss) for cost, loss in gain["curve"]]
            label = {"confidence": "calibrated confidence", "linear": "linear on the state"}[
                gain["criterion"]
            ]
            colour = COLOURS["confidence" if gain["criterion"] == "confidence" else "heads"]
            most = max(cost for cost, _ in line)
            label += f", up to {most:.0f} %" if most > MOST_SHOWN else ""
            ax.plot(*zip(*line, strict=True), ".-", color=colour, label=label)
        ax.plot(
            *zip(*((100 * c, x) for c, x in block["oracle"]), strict=True),
            ":",
            color="#55a868",
            label="oracle",
        )
        ax.set(xlabel="FLOPs, % of the original", ylabel="loss, nats", title=TITLES[name])
        ax.set_xlim(0, MOST_SHOWN)
        low, high = ax.get_ylim()
        ax.set_ylim(low, high + 0.3 * (high - low))  # room for the legend
        ax.legend(loc="upper right")
        return {"exits": list(zip(costs, best, strict=True)), "verdict": found["verdict"]}

    return draw


def draw(panels: Sequence[Panel], folders: Sequence[Path], name: str) -> None:
    """Draw panels, two in a row, and save the figure in each folder.

    Args:
        panels: The panels.
        folders: The first gets PNG, PDF and JSON, the others the PNG.
        name: Of the files.

    """
    columns = min(len(panels), 2)
    rows = -(-len(panels) // columns)
    with canvas(columns, rows, size=(4.6 * columns, 3.6 * rows)) as (figure, axes):
        numbers = {str(index): panel(ax) for index, (panel, ax) in enumerate(zip(panels, axes, strict=False))}
        for ax in axes[len(panels) :]:
            ax.set_axis_off()
        save(figure, folders[0], name, numbers)
    for folder in folders[1:]:
        (folder / f"{name}.png").write_bytes((folders[0] / f"{name}.png").read_bytes())


def main() -> None:
    """Draw the figures of the results that are there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path("results/halting"))
    parser.add_argument("--docs", type=Path, default=Path("docs/images"))
    options = parser.parse_args()
    results, folders = options.results, [options.results, options.docs]
    reviews, stories = read_rows(results / "reviews.csv"), read_rows(results / "stories.csv")
    panels = [reviews_panel(reviews, read_rows(results / "reviews_curves.csv"))] if reviews else []
    crossed = read_rows(results / "reviews_crossed.csv")
    panels += [crossed_panel(crossed)] if crossed and not reviews else []
    panels += [stories_panel(stories)] if stories else []
    if panels:
        draw(panels, folders, "halting-criteria")
    files = {name: results / f"diagnosis_{name}.json" for name in TITLES}
    known = {name: json.loads(file.read_text()) for name, file in files.items() if file.is_file()}
    if known:
        draw([diagnosis_panel(name, each) for name, each in known.items()], folders, "halting-diagnose")


if __name__ == "__main__":
    main()
