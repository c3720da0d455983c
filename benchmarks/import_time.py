"""What ``import torchpact`` takes beside ``import torch``, in processes of their own that take turns.

    python benchmarks/import_time.py [--rounds 15]

Prints the median seconds of both and the median of the ratios, each of two processes that ran one after the
other. The first round is not counted: files come from the disk then.
"""

import argparse
import random
import statistics
import subprocess
import sys

WORK = "import time; start = time.perf_counter(); import {}; print(time.perf_counter() - start)"


def seconds(module: str) -> float:
    """Return the seconds that a new process takes to import a module."""
    done = subprocess.run(
        [sys.executable, "-c", WORK.format(module)], capture_output=True, text=True, check=True
    )
    return float(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description="what importing torchpact takes beside torch")
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    order, times = random.Random(0), []
    for _ in range(rounds + 1):
        modules = order.sample(["torch", "torchpact"], 2)
        times.append({module: seconds(module) for module in modules})
    counted = times[1:]
    for module in ("torch", "torchpact"):
        print(f"import {module}: {statistics.median(each[module] for each in counted):.3f} s")
    ratio = statistics.median(each["torchpact"] / each["torch"] for each in counted)
    print(f"ratio: {ratio:.2f}")


if __name__ == "__main__":
    main()
