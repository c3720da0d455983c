"""Write golden.json anew: ``python -m tests.golden.record``, or with beginnings of names, those cases only.

What is the same within the tolerance stays as it is written; the rest is listed.
"""

import sys
import time

import torch

import torchpact as tp
from tests.golden.cases import CASES
from tests.golden.common import has_compiler
from tests.golden.digest import Digest, difference, digests, read, write


def main(beginnings: list[str]) -> None:
    """Run the cases, and write what came out."""
    torch.set_num_threads(1)
    print(f"recording what {tp.__file__} does")
    before = read()
    after: dict[str, dict[str, Digest]] = {}
    seconds: list[tuple[float, str]] = []
    new: list[str] = []
    for case in CASES:
        chosen = not beginnings or case.name.startswith(tuple(beginnings))
        if not chosen or (case.compiled and not has_compiler()):
            if case.name in before:
                after[case.name] = before[case.name]
            continue
        started = time.perf_counter()
        found = digests(case.run())
        seconds.append((time.perf_counter() - started, case.name))
        if case.name not in before:
            new.append(case.name)
        elif (what := difference(before[case.name], found)) is not None:
            print(f"changed: {case.name}: {what}")
        else:
            found = before[case.name]
        after[case.name] = found
    print(f"new: {', '.join(new) if before else 'all'}")
    for name in before.keys() - after.keys():
        print(f"gone: {name}")
    write(after)
    slowest = ", ".join(f"{name} {t:.1f} s" for t, name in sorted(seconds, reverse=True)[:5])
    print(f"{len(after)} cases; {sum(t for t, _ in seconds):.1f} s, of which {slowest}")


if __name__ == "__main__":
    main(sys.argv[1:])
