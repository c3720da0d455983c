"""Summarise finished runs, seeds together, as a table: python experiments/summary.py results/resnet32-fast.

With --markdown the table is one for the documentation.
"""

import argparse
import json
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any


def load(folder: Path) -> dict[tuple[str, float], list[dict[str, Any]]]:
    """Runs that are finished, grouped by method and tau."""
    groups: dict[tuple[str, float], list[dict[str, Any]]] = defaultdict(list)
    for path in sorted(folder.glob("*/run.json")):
        run = json.loads(path.read_text())
        if run["status"] == "finished":
            config = run["config"]
            groups[config["method"], 0.0 if config["method"] == "plain" else config["tau"]].append(run)
    return groups


def rows(folder: Path) -> list[dict[str, str]]:
    order = {"plain": 0, "relaxed": 1, "reinforce": 2, "act": 3}
    table = []
    groups = sorted(load(folder).items(), key=lambda item: (order[item[0][0]], -item[0][1]))
    for (method, tau), runs in groups:
        for mode in runs[0]["results"]:
            measured = [run["results"][mode] for run in runs]
            blocks = zip(*(m["steps"] for m in measured), strict=True)
            table.append(
                {
                    "trained": method,
                    "τ": f"{tau:g}" if method != "plain" else "",
                    "evaluated": mode,
                    "accuracy, %": _spread([100 * m["accuracy"] for m in measured], 2),
                    "MFLOPs": _spread([m["flops"] / 1e6 for m in measured], 1),
                    "steps by block": "  ".join(f"{statistics.mean(block):.2f}" for block in blocks),
                    "seeds": str(len(runs)),
                }
            )
    return table


def _spread(values: list[float], digits: int) -> str:
    mean = f"{statistics.mean(values):.{digits}f}"
    return f"{mean} ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else mean


def main() -> None:
    parser = argparse.ArgumentParser(description="summarise finished runs")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--markdown", action="store_true")
    arguments = parser.parse_args()
    table = rows(arguments.folder)
    if not table:
        raise SystemExit(f"expected finished runs in {arguments.folder}, got none")
    names = list(table[0])
    if arguments.markdown:
        print("| " + " | ".join(names) + " |")
        print("|" + "---|" * len(names))
        for row in table:
            print("| " + " | ".join(row.values()) + " |")
        return
    widths = [max(len(name), *(len(row[name]) for row in table)) for name in names]
    for line in [names, *(list(row.values()) for row in table)]:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


if __name__ == "__main__":
    main()
