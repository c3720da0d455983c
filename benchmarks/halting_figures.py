"""Figures of the pages on budgets and dead heads, from the CSV files of three benchmarks.

    python benchmarks/halting_figures.py

Draws docs/images/budgets.png of budgets.csv, heads-alive.png of heads_alive.csv and objectives.csv, and
frozen.png of frozen_exits.csv, as far as these are there.
"""

from pathlib import Path

import matplotlib.pyplot as plt
from frozen_exits import Row
from table import read_rows

HERE = Path(__file__).parent
IMAGES = HERE.parent / "docs" / "images"


def rows_of(name: str) -> list[Row]:
    """Return the rows of a benchmark."""
    return read_rows(HERE / f"{name}.csv")


def column(rows: list[Row], name: str) -> list[float]:
    """Return the numbers of a column."""
    return [float(row[name]) for row in rows]


def budgets() -> None:
    """Used over asked, by the budget asked for."""
    rows = rows_of("budgets")
    units = [unit for unit in ("flops", "ms") if any(row["unit"] == unit for row in rows)]
    figure, axes = plt.subplots(
        1, len(units), figsize=(4.6 * len(units), 3.4), layout="constrained", squeeze=False
    )
    for axis, unit in zip(axes[0], units, strict=True):
        own = [row for row in rows if row["unit"] == unit]
        axis.axhspan(0.95 if unit == "flops" else 0, 1.02 if unit == "flops" else 1.10, color="0.92")
        axis.axhline(1, color="0.6", linewidth=0.8)
        for case in dict.fromkeys(row["case"] for row in own):
            of_case = [row for row in own if row["case"] == case]
            most = max(column(of_case, "budget"))
            shown = column(of_case, "budget")
            shown = shown if unit == "flops" else [each / most for each in shown]
            axis.plot(shown, column(of_case, "ratio"), "o-", markersize=3.5, linewidth=1, label=case)
        what = "share of the FLOPs" if unit == "flops" else "milliseconds / the largest budget"
        axis.set(xlabel=f"asked for: {what}", ylabel="used / asked for, on new data")
        axis.set_ylim(min(0.9, *column(own, "ratio")) - 0.02, max(1.12, *column(own, "ratio")) + 0.02)
        axis.legend(frameon=False, fontsize=8)
    figure.savefig(IMAGES / "budgets.png", dpi=150)


def heads_alive() -> None:
    """Left: how many decisions leave the commonest depth, by objective. Right: loss beside random halting."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.2, 3.4), layout="constrained")
    runs = [
        row
        for row in rows_of("objectives")
        if (row["part"], row["per"], row["exits"]) == ("heads", "example", "every")
        and "(" not in row["objective"]
    ]
    names = list(dict.fromkeys(row["objective"] for row in runs))
    for place, name in enumerate(names):
        values = sorted(float(row["alive"]) for row in runs if row["objective"] == name)
        spread = [place + 0.5 * (i / max(len(values) - 1, 1) - 0.5) for i in range(len(values))]
        left.plot(spread, values, "o", markersize=3.5)
    left.axhline(0.05, color="0.6", linewidth=0.8, linestyle="--")
    left.set_xticks(range(len(names)), names, fontsize=8)
    left.set(ylabel="decisions that leave the commonest depth", title="one decision a string, all runs")
    rows = [row for row in rows_of("heads_alive") if row["bound"] == "calibrated"]
    groups = list(dict.fromkeys((row["per"], row["objective"]) for row in rows))
    for place, group in enumerate(groups):
        own = [row for row in rows if (row["per"], row["objective"]) == group]
        for key, color in (("random_loss", "0.6"), ("loss", "tab:blue")):
            right.plot([place] * len(own), column(own, key), "o", color=color, markersize=4)
    right.plot([], [], "o", color="0.6", label="random halting, same histogram")
    right.plot([], [], "o", color="tab:blue", label="the criterion")
    right.set_yscale("log")
    labels = [f"{objective}\n{'position' if per == 'pixel' else 'string'}" for per, objective in groups]
    right.set_xticks(range(len(groups)), labels, fontsize=7)
    right.set(ylabel="loss, nats a position", title="calibrated to half of the FLOPs")
    right.legend(frameon=False, fontsize=8)
    figure.savefig(IMAGES / "heads-alive.png", dpi=150)


def frozen() -> None:
    """Accuracy by cost of a frozen ResNet-32 per image, means over seeds."""
    rows = [row for row in rows_of("frozen_exits") if row["validation"] == "distorted"]
    figure, axis = plt.subplots(figsize=(5.4, 3.6), layout="constrained")

    def means(own: list[Row], key: str) -> list[float]:
        asked = sorted({float(row["budget"]) for row in own})
        each = [[float(row[key]) for row in own if float(row["budget"]) == b and row[key]] for b in asked]
        return [sum(values) / len(values) if values else float("nan") for values in each]

    for criterion, color in (("confidence", "tab:orange"), ("advantage", "tab:blue")):
        own = [row for row in rows if row["criterion"] == criterion]
        cost = means(own, "cost")
        axis.plot(cost, means(own, "accuracy"), "o-", markersize=3.5, color=color, label=criterion)
        if criterion == "confidence":
            axis.plot(cost, means(own, "chance"), "--", color="0.6", label="random, same histogram")
            axis.plot(cost, means(own, "fewer"), ":", color="tab:red", label="fewer units, read out anew")
            axis.axhline(float(own[0]["full"]), color="0.3", linewidth=0.8, label="ResNet-32 itself")
    axis.set(xlabel="share of the FLOPs, on the test set", ylabel="test accuracy, %")
    axis.legend(frameon=False, fontsize=8)
    figure.savefig(IMAGES / "frozen.png", dpi=150)


def main() -> None:
    for name, draw in (("budgets", budgets), ("heads_alive", heads_alive), ("frozen_exits", frozen)):
        if (HERE / f"{name}.csv").exists():
            draw()


if __name__ == "__main__":
    main()
