"""Two versions of torchpact beside each other: calls of deployed networks, steps of training.

    python benchmarks/versions.py OLD/src NEW/src [--rounds 15] [--only resnet32-1 …] [--out
    benchmarks/versions.csv]

Each version runs in a process of its own, from its source folder; the two take turns, case by case, so that
other work on the machine hits both alike. A turn is the median of the calls of a quarter of a second; the
table has the medians over turns, in milliseconds, and their ratio, old over new: above 1 the new one is
faster. Recurrent layers are called as they are in versions that have no deployment for them.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

CASES = (
    "resnet32-1", "resnet32-64", "resnet110-1", "units-1", "shared-1", "examples-512",
    "loop-1", "loop-train", "resnet-train", "transformer-train", "transformer-8", "rnn-1", "rnn-32",
)  # fmt: skip


def cases() -> dict[str, Callable[[], Callable[[], object]]]:
    """Return what makes the call of each case."""
    import torch
    from torch import nn

    import torchpact as tp

    def seeded(function: Callable[[], Any]) -> Any:
        torch.manual_seed(0)
        return function()

    def zoo(make: Callable[..., Any], name: str, batch: int) -> Callable[[], object]:
        net, x = make(mode="thresholded", pretrained=name), seeded(lambda: torch.randn(batch, 3, 32, 32))
        fast = tp.deploy(net, x, engines=["native"], details=False)
        return lambda: fast(x)

    def units(batch: int) -> Callable[[], object]:
        steps = [tp.models.ResidualUnit(16, 16) for _ in range(4)]
        heads = [tp.models.HaltingHead(16, bias=0.0) for _ in steps[1:]]
        block = tp.AdaptiveBlock(steps, heads, mode="thresholded").eval()
        u = torch.randn(batch, 16, 8, 8)
        fast = tp.deploy(block, u, engines=["native"])
        return lambda: fast(u)

    def plain(size: int, positions: bool = False) -> Any:
        step = nn.Sequential(nn.Linear(size, 2 * size), nn.Tanh(), nn.Linear(2 * size, size))
        head = nn.Linear(size, 1)
        nn.init.normal_(head.weight, 0, 0.3)
        return tp.AdaptiveBlock(tp.Residual(step), head, max_steps=6, mode="thresholded").eval()

    def compacted(size: int, batch: int) -> Callable[[], object]:
        block, u = plain(size), torch.randn(max(batch, 2), size)
        fast = tp.deploy(block, u, engines=["compact"])
        u = u[:batch]
        return lambda: fast(u)

    def loop() -> Callable[[], object]:
        block, u = plain(16), torch.randn(1, 16)

        def call() -> None:
            with torch.no_grad():
                block(u)

        return call

    def loop_train() -> Callable[[], object]:
        block, u = plain(16), torch.randn(8, 16)

        def call() -> None:
            output, ponder = block(u, mode="relaxed")
            tp.map_loss(output.square().sum(1), ponder, tau=0.01).backward()

        return call

    def resnet_train() -> Callable[[], object]:
        net, x = tp.models.psact_resnet32(), torch.randn(8, 3, 32, 32)

        def call() -> None:
            logits, ponders = net(x)
            tp.map_loss(logits.square().sum(1), ponders, tau=0.01).backward()

        return call

    def transformer(train: bool) -> Callable[[], object]:
        layers = [tp.models.TransformerUnit(192, heads=6) for _ in range(4)]
        head = nn.Linear(192, 1)
        nn.init.normal_(head.weight, 0, 0.5)
        nn.init.constant_(head.bias, 1.0)
        block = tp.AdaptiveBlock(layers, head, mode="thresholded").eval()
        u = torch.randn(8, 96, 192)
        if not train:
            fast = tp.deploy(block, u)
            return lambda: fast(u)

        def call() -> None:
            output, _ = block(u)
            output.square().mean().backward()

        return call

    def rnn(batch: int) -> Callable[[], object]:
        layer = tp.AdaptiveRNN(
            nn.LSTMCell(33, 128), 5, halting_bias=0.0, mode="thresholded", batch_first=True
        )
        x = torch.randn(batch, 16, 32)
        fast: Any = layer
        with suppress(TypeError):  # of versions in which the layer itself calls the kernels
            fast = tp.deploy(layer, x)

        def call() -> None:
            with torch.no_grad():
                fast(x)

        return call

    made: dict[str, Callable[[], Callable[[], object]]] = {
        "resnet32-1": lambda: zoo(tp.models.psact_resnet32, "tau0.05", 1),
        "resnet32-64": lambda: zoo(tp.models.psact_resnet32, "tau0.05", 64),
        "resnet110-1": lambda: zoo(tp.models.psact_resnet110, "tau0.01", 1),
        "units-1": lambda: units(1),
        "shared-1": lambda: compacted(64, 1),
        "examples-512": lambda: compacted(256, 512),
        "loop-1": loop,
        "loop-train": loop_train,
        "resnet-train": resnet_train,
        "transformer-train": lambda: transformer(True),
        "transformer-8": lambda: transformer(False),
        "rnn-1": lambda: rnn(1),
        "rnn-32": lambda: rnn(32),
    }
    return {name: lambda make=make: seeded(make) for name, make in made.items()}  # type: ignore[misc]


def work(pipe: IO[str]) -> None:
    """Make the calls that are asked for on standard input, a name a line, and tell their seconds."""
    warnings.simplefilter("ignore")
    known, calls = cases(), {}
    for line in sys.stdin:
        name = line.strip()
        if name not in calls:
            calls[name] = known[name]()
            calls[name]()
        times: list[float] = []
        begin = time.perf_counter()
        while len(times) < 3 or time.perf_counter() - begin < 0.25:
            start = time.perf_counter()
            calls[name]()
            times.append(time.perf_counter() - start)
        print(statistics.median(times), file=pipe, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="two versions of torchpact beside each other")
    parser.add_argument("old", type=Path, nargs="?")
    parser.add_argument("new", type=Path, nargs="?")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", nargs="*", choices=CASES, default=CASES)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        work(sys.stdout)
        return
    workers = [
        subprocess.Popen(
            [sys.executable, __file__, "--work"],
            env={**os.environ, "PYTHONPATH": str(source.resolve())},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for source in (arguments.old, arguments.new)
    ]

    def turn(worker: "subprocess.Popen[str]", name: str) -> float:
        assert worker.stdin is not None
        assert worker.stdout is not None
        print(name, file=worker.stdin, flush=True)
        return float(worker.stdout.readline())

    rows = []
    for name in arguments.only:
        times: list[list[float]] = [[], []]
        for number in range(arguments.rounds + 1):
            order = (0, 1) if number % 2 else (1, 0)
            for index in order:
                seconds = turn(workers[index], name)
                if number:  # the first turn warms up
                    times[index].append(seconds)
        old, new = (1e3 * statistics.median(each) for each in times)
        rows.append(
            {"case": name, "old_ms": round(old, 4), "new_ms": round(new, 4), "ratio": round(old / new, 3)}
        )
        print(*rows[-1].values(), sep="\t", flush=True)
    for worker in workers:
        assert worker.stdin is not None
        worker.stdin.close()
    if arguments.out is not None:
        from table import write_csv

        write_csv(arguments.out, rows)


if __name__ == "__main__":
    main()
