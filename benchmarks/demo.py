"""What ``torchpact demo`` measures, seed by seed: the same command that a user runs.

    python benchmarks/demo.py [--seeds 0 1 2] [--anyway] [--out benchmarks/demo.csv]

Each seed is a process of its own, with the default settings of the command. ``points`` is what thresholded
accuracy gains or loses against the network before, in percentage points of the held-out images;
``flops_saved`` is in per cent; ``faster`` is the time of the network run in full divided by that of the
deployed one, measured in turns; ``seconds`` is the demo as a whole. Rows are written as they come.
Where other programs keep the cores busy ``faster`` means nothing: such a machine needs --anyway.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from table import write_csv


def run_demo(seed: int) -> dict[str, Any]:
    """What the command prints as JSON."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torchpact", "demo", "--seed", str(seed), "-o", folder, "--json"]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"seed {seed}: expected the demo to run, got exit code {done.returncode}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def row(seed: int, found: dict[str, Any]) -> dict[str, object]:
    """A line of the table."""
    before, after, times = found["results"]["plain"], found["results"]["thresholded"], found["times"]
    return {
        "seed": seed,
        "accuracy_before": f"{100 * before['accuracy']:.1f}",
        "accuracy_after": f"{100 * after['accuracy']:.1f}",
        "points": f"{100 * (after['accuracy'] - before['accuracy']):+.1f}",
        "flops_saved": f"{100 * (1 - after['flops'] / before['flops']):.0f}",
        "faster": f"{times['plain'] / times['modes']['thresholded']:.2f}",
        "seconds": f"{found['seconds']:.0f}",
        "device": times["device"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="the demo, seed by seed")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".csv"))
    parser.add_argument("--anyway", action="store_true", help="also where other programs run")
    arguments = parser.parse_args()
    load = os.getloadavg()[0]
    if load > 0.5 and not arguments.anyway:
        raise SystemExit(f"expected a machine with nothing else to do, got a load of {load:.1f}")
    rows = []
    for seed in arguments.seeds:
        rows.append(row(seed, run_demo(seed)))
        print("  ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
        write_csv(arguments.out, rows)


if __name__ == "__main__":
    main()
