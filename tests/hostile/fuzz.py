"""``make fuzz``: thousands of hostile cases and of random deployments, with what became of them.

Half of the cases are those of a fixed seed, the others of one drawn anew, which is printed and can be given
again: ``python -m tests.hostile.fuzz --seed N``.
"""

import argparse
import os
import random
import resource
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch

from tests.hostile import deployments
from tests.hostile.damage import CASES, Samples, run_case

FIXED = 0
MOST_MEMORY = 3 << 30
"""Bytes of this process: no case may take memory out of proportion to its file."""


def main() -> int:
    """Run the cases; return 1 if a promise was not kept."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=5600, help="hostile files, records, caches and commands")
    parser.add_argument("--deployments", type=int, default=2000, help="random networks that are deployed")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().getrandbits(32))
    given = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["COLUMNS"] = "100"
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    begin, wrong = time.monotonic(), []
    outcomes: Counter[tuple[str, str]] = Counter()
    print(f"fixed seed {FIXED}, random seed {given.seed}")
    with tempfile.TemporaryDirectory(prefix="torchpact-fuzz-") as folder:
        samples = Samples(Path(folder))
        for number in range(given.cases):
            name = [*CASES][number % len(CASES)]
            seed = FIXED + number if number < given.cases // 2 else given.seed + number
            try:
                outcomes[name, run_case(name, seed, samples)] += 1
            except (Exception, KeyboardInterrupt) as error:
                if isinstance(error, KeyboardInterrupt):
                    raise
                wrong.append(f"{name}, seed {seed}: {type(error).__name__}: {error!s:.500}")
                outcomes[name, "WRONG"] += 1
    for number in range(given.deployments):
        deployments.share_work(1 + number % 3, busy=number % 2 == 1)
        seed = FIXED + number if number < given.deployments // 2 else given.seed + number
        try:
            outcomes["deployed", deployments.case(random.Random(seed))] += 1
        except Exception as error:
            wrong.append(f"deployment, seed {seed}: {type(error).__name__}: {error!s:.500}")
            outcomes["deployed", "WRONG"] += 1
    for (name, outcome), count in sorted(outcomes.items()):
        print(f"{count:6}  {name}: {outcome}")
    peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(f"{sum(outcomes.values()):6}  cases in {time.monotonic() - begin:.0f} s, {len(wrong)} wrong")
    print(f"most memory: {peak / 2**20:.0f} MiB")
    for line in wrong[:20]:
        print(line, file=sys.stderr)
    return int(bool(wrong) or peak > MOST_MEMORY)


if __name__ == "__main__":
    raise SystemExit(main())
