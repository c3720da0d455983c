"""All finished runs of a scale as a table, seeds together."""

import csv
import io
from collections import defaultdict
from pathlib import Path
from typing import Any

from torchpact.files import write_whole
from torchpact_recipes.experiments.archive import Archive
from torchpact_recipes.experiments.gather import Spread, spread
from torchpact_recipes.experiments.runs import Run, Scale

_ORDER = ("plain", "relaxed", "reinforce", "act", "random")


def runs(scale: Scale, seeds: list[int]) -> list[Run]:
    """None of its own: it shows what there is."""
    return []


def rows(archive: Archive) -> list[dict[str, Any]]:
    """One row for every setting and mode of evaluation, of whatever seeds are finished."""
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for name, record in archive.everything().items():
        groups[name.rpartition("-seed")[0]].append(record)
    if not groups:
        raise ValueError(f"expected finished runs in {archive.results}, got none")

    def order(item: tuple[str, list[dict[str, Any]]]) -> tuple[Any, ...]:
        config = item[1][0]["config"]
        return config["network"]["units"], _ORDER.index(config["method"]), -config["tau"], item[0]

    table = []
    for setting, records in sorted(groups.items(), key=order):
        for mode in records[0]["results"]:
            measured = [record["results"][mode] for record in records]
            blocks = zip(*(m["steps"] for m in measured), strict=True)
            table.append(
                {
                    "run": setting,
                    "evaluated": mode,
                    "accuracy": spread([100 * m["accuracy"] for m in measured]),
                    "mflops": spread([m["flops"] / 1e6 for m in measured]),
                    "nll": spread([m["nll"] for m in measured]),
                    "steps": [spread(block).mean for block in blocks],
                }
            )
    return table


def markdown(table: list[dict[str, Any]]) -> str:
    """The table as people read it, in a terminal too."""
    names = ("run", "evaluated", "accuracy, %", "MFLOPs", "steps by block", "seeds")
    lines = [names] + [
        (
            row["run"],
            row["evaluated"],
            str(row["accuracy"]),
            _short(row["mflops"]),
            " / ".join(f"{steps:.2f}" for steps in row["steps"]) or "all",
            str(row["accuracy"].n),
        )
        for row in table
    ]
    widths = [max(len(line[column]) for line in lines) for column in range(len(names))]
    padded = [[cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in lines]
    padded.insert(1, ["-" * width for width in widths])
    return "".join(f"| {' | '.join(line)} |\n" for line in padded)


def draw(archive: Archive, scale: Scale, seeds: list[int], folder: Path) -> list[Path]:
    """The table as Markdown, which is printed too, and with more columns as CSV."""
    made = files(rows(archive))
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in made.items():
        write_whole(folder / name, text.encode())
    print(made["summary.md"])
    return [folder / name for name in made]


def files(table: list[dict[str, Any]]) -> dict[str, str]:
    """What is written of the table, by the names of the files."""
    buffer = io.StringIO()
    lines = [_flat(row) for row in table]
    writer = csv.DictWriter(buffer, fieldnames=list(lines[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return {"summary.md": markdown(table), "summary.csv": buffer.getvalue()}


def _short(value: Spread) -> str:
    return f"{value.mean:.1f}" + ("" if value.sd is None else f" ± {value.sd:.1f}")


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    """A row of numbers alone: mean and deviation apart."""
    flat = {"run": row["run"], "evaluated": row["evaluated"], "seeds": row["accuracy"].n}
    for name in ("accuracy", "mflops", "nll"):
        value = row[name]
        flat |= {name: f"{value.mean:.6g}", f"{name}_sd": "" if value.sd is None else f"{value.sd:.3g}"}
    return flat | {"steps": " ".join(f"{steps:.4g}" for steps in row["steps"])}
