"""The figure of the autoencoder, and its tables."""

import csv
import io
import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchpact.checks import MALFORMED, one_line
from torchpact.files import write_whole
from torchpact_recipes.experiments.archive import Archive
from torchpact_recipes.experiments.gather import finished, inventory, over_seeds, spread
from torchpact_recipes.experiments.plotting import COLORS, canvas, save
from torchpact_recipes.experiments.vae.measure import Choice, choose, lines_file, result_of
from torchpact_recipes.experiments.vae.training import VaeRun

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOR = {"fixed": COLORS["plain"], "relaxed": COLORS["relaxed"], "act": COLORS["act"]}
LABEL = {"fixed": "fixed number", "relaxed": "PACT, thresholded", "act": "ACT"}
SHORT = {"relaxed": "PACT", "act": "ACT"}
MARKER = {"fixed": "*", "relaxed": "s", "act": "o"}


def draw(wanted: Sequence[VaeRun], archive: Archive, folder: Path) -> list[Path]:
    """Draw bounds against steps, objectives on lines and their derivatives; write both tables.

    Raises:
        ValueError: Runs or lines are missing.

    """
    found, choice = finished(wanted, archive), choose(wanted, archive)
    lines = _lines(archive, choice)
    rows = [_row(group, found[choice.fixed], archive, choice) for group in found.values()]
    rows.sort(key=lambda row: (list(LABEL).index(row["method"]), row["tau"], row["steps"].mean))
    numbers = {"settings": rows, "chosen": choice, **inventory(wanted, found)}
    with canvas(2, 2, size=(9, 6.6)) as (figure, (bounds, one, act, pact)):
        _draw_bounds(bounds, rows)
        for method in ("relaxed", "act"):
            _draw_one(one, lines[method], method)
        one.axhline(0, color="#cccccc", linewidth=0.6, zorder=0)
        one.set(xlabel="t: change of all parameters, %", ylabel="objective − that at t = 0, nats")
        one.set_title("One image on a line in parameter space, noise fixed")
        one.legend()
        for axes, method in ((act, "act"), (pact, "relaxed")):
            _draw_derivatives(axes, lines[method], method)
        figure.suptitle(f"Fashion-MNIST, {over_seeds(found, wanted)}", fontsize=9)
        paths = save(figure, folder, "vae", numbers)
    tables = {"vae.csv": _bounds_table(rows), "vae-lines.csv": _lines_table(lines)}
    for name, table in tables.items():
        write_whole(folder / name, _as_csv(table))
        paths.append(folder / name)
    return paths


def _lines(archive: Archive, choice: Choice) -> dict[str, Any]:
    """What was measured on lines through the networks that are chosen."""
    path = lines_file(archive)
    try:
        lines: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        measured = Choice(choice.fixed, *(lines[m]["run"].rpartition("-seed")[0] for m in SHORT))
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file; it is made with the last of the runs") from None
    except MALFORMED as error:
        raise ValueError(f"{path}: expected what was measured on lines, got {one_line(error)}") from None
    if measured != choice:
        raise ValueError(f"{path}: expected lines of {choice.relaxed} and {choice.act}; move the file away")
    return lines


def _row(group: Sequence[VaeRun], best: Sequence[VaeRun], archive: Archive, choice: Choice) -> dict[str, Any]:
    """What a setting came to; the difference to the best fixed number is seed by seed."""
    config = group[0].config
    test = {run.config.seed: result_of(run, archive, "test") for run in group}
    other = {run.config.seed: result_of(run, archive, "test")["elbo"] for run in best}
    differences = [found["elbo"] - other[seed] for seed, found in test.items() if seed in other]
    return {
        "setting": group[0].setting,
        "method": config.method,
        "tau": config.tau,
        "chosen": group[0].setting in (choice.fixed, choice.relaxed, choice.act),
        "steps": spread([found["steps"] for found in test.values()]),
        "elbo": spread([found["elbo"] for found in test.values()]),
        "validation": spread([result_of(run, archive, "validation")["elbo"] for run in group]),
        "difference": spread(differences) if differences else None,
        "share": [
            sum(shares) / len(test) for shares in zip(*(f["share"] for f in test.values()), strict=True)
        ],
    }


def _draw_bounds(axes: "Axes", rows: Sequence[dict[str, Any]]) -> None:
    for method, label in LABEL.items():
        those = sorted((row for row in rows if row["method"] == method), key=lambda row: row["steps"].mean)
        steps, bounds = [row["steps"] for row in those], [row["elbo"] for row in those]
        axes.errorbar(
            [s.mean for s in steps],
            [b.mean for b in bounds],
            xerr=[s.sd or 0.0 for s in steps],
            yerr=[b.sd or 0.0 for b in bounds],
            color=COLOR[method],
            marker=MARKER[method],
            linestyle="-" if method == "fixed" else "--",
            elinewidth=0.8,
            label=label,
        )
        for row in those:
            if method != "fixed":
                above = method == "relaxed"
                axes.annotate(
                    f"{row['tau']:g}", (row["steps"].mean, row["elbo"].mean),
                    xytext=(0, 7 if above else -13), textcoords="offset points",
                    ha="center", fontsize=7, color=COLOR[method],
                )  # fmt: skip
    axes.set(xlabel="mean number of steps", ylabel="bound of log p(x) on test images, nats")
    axes.set_title("Bound against steps; beside the points, the price of a step")
    axes.legend(loc="lower right")


def _draw_one(axes: "Axes", found: dict[str, Any], method: str) -> None:
    """The objective of one image; a line that ends where the number of steps changes."""
    one = found["one"]
    t, jumps = [100 * each for each in one["t"]], one["jumps"]
    start = one["objective"][len(t) // 2]
    values = [value - start for value in one["objective"]]
    ends = [100 * jump["t"] for jump in jumps]
    label = f"{SHORT[method]}" + (f": {len(jumps)} jumps" if method == "act" else "")
    for low, high in zip([-float("inf"), *ends], [*ends, float("inf")], strict=True):
        part = [(x, y) for x, y in zip(t, values, strict=True) if low <= x < high]
        if part:
            axes.plot(*zip(*part, strict=True), color=COLOR[method], label=label)
            label = "_"
    for end in ends:
        axes.axvline(end, color=COLOR["act"], linestyle=":", linewidth=0.6)


def _draw_derivatives(axes: "Axes", found: dict[str, Any], method: str) -> None:
    """The derivative of the mean objective by differences, and the mean pathwise derivative."""
    line = found["halting"]
    t, values = line["t"], line["objective"]
    middles = [(a + b) / 2 for a, b in pairwise(t)]
    differences = [
        (after - before) / (b - a)
        for (a, b), (before, after) in zip(pairwise(t), pairwise(values), strict=True)
    ]
    axes.plot(middles, differences, color="black", label="derivative of the mean, by differences")
    axes.plot(t, line["slope"], "--", color=COLOR[method], label="mean pathwise derivative")
    axes.axhline(0, color="#888888", linewidth=0.6)
    axes.set(xlabel="t: added to the biases of all halting heads", ylabel="derivative, nats")
    axes.set_title(f"{SHORT[method]}, mean of {found['images']:,} images")
    axes.legend()


def _bounds_table(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {
            "method": LABEL[row["method"]],
            "τ": f"{row['tau']:g}" if row["method"] != "fixed" else "",
            "steps": f"{row['steps'].mean:.2f}",
            "bound, validation": f"{row['validation'].mean:.2f}",
            "bound, test": str(row["elbo"]),
            "to the best fixed": str(row["difference"]),
            "chosen": "yes" if row["chosen"] else "",
            "seeds": row["elbo"].n,
        }
        for row in rows
    ]


def _lines_table(lines: dict[str, Any]) -> list[dict[str, Any]]:
    """By method and part: the mean size of changes, and of what the pathwise derivative misses."""
    table = []
    for method in ("relaxed", "act"):
        parts: dict[str, list[dict[str, Any]]] = {}
        for change in lines[method]["changes"]:
            parts.setdefault(change["line"], []).append(change)
        for part, changes in parts.items():
            size = _mean([abs(c["change"]) for c in changes])
            missed = _mean([abs(c["change"] - c["pathwise"]) for c in changes])
            bound = _mean([abs(c["elbo_change"]) for c in changes])
            missed_bound = _mean([abs(c["elbo_change"] - c["elbo_pathwise"]) for c in changes])
            table.append(
                {
                    "method": SHORT[method],
                    "parameters": part.rstrip("."),
                    "images whose N changes, %": f"{100 * _mean([c['crossed'] for c in changes]):.1f}",
                    "change of the objective": f"{size:.2g}",
                    "missed": f"{missed:.1g}",
                    "missed, %": f"{100 * missed / size:.2g}",
                    "change of the bound": f"{bound:.2g}",
                    "missed of it, %": f"{100 * missed_bound / bound:.2g}" if bound else "",
                }
            )
    return table


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _as_csv(table: Sequence[dict[str, Any]]) -> bytes:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(table[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(table)
    return text.getvalue().encode()
