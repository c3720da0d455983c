"""A stream of inputs through a looped network, beside what else one could do: 10,000 inputs, width 256.

    python benchmarks/stream.py [--networks conv attention] [--rounds 3] [--out benchmarks/stream.csv]

How many steps an example takes is drawn beforehand and told to a counter in its state, so that all ways do
the same work; the head is computed besides, as a learned one is. Uniform: 1 to 64 steps. Skewed: a geometric
distribution of mean 12, cut at 64. Ways, interleaved, medians of the rounds:

    all steps           all 64 steps of every batch, without a head, compiled and eager; the faster counts
    until the last      the block itself: batches that end with their last example
    compact             the engine ``compact``, in batches of 256 or of all 10,000, whichever is faster
    stream              ``tp.stream`` on batches, as it is and with ``compile=True``; and on single examples

``theory`` is (N·L/width) / (N·E[steps]/width + L − E[steps]), the speed-up that full batches promise.
``share`` is the measured speed-up over *all steps* divided by the theory.
"""

import argparse
import math
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from table import read_rows, write_csv
from torch import Tensor, nn

import torchpact as tp
from torchpact.core.call_args import CallArgs
from torchpact.engines.generic.compact import CompactRunner

WIDTH, STEPS = 256, 64
State = tuple[Tensor, Tensor]


class Counted(nn.Module):
    """An update of a looped network, beside a counter of the steps that are left."""

    def __init__(self, update: nn.Module) -> None:
        super().__init__()
        self.update = update

    def forward(self, state: State, told: Tensor) -> State:
        """Return the state after a step."""
        u, left = state
        u = self.update(u, told)
        along: Any = self.update.features
        return u * (u.square().mean(along, keepdim=True) + 1e-6).rsqrt(), left - 1


class Head(nn.Module):
    """Halting logits of a linear head, which changes nothing, and of the counter."""

    def __init__(self, update: nn.Module) -> None:
        super().__init__()
        width, along = update.width, update.features
        self.along: Any = along
        self.linear = nn.Linear(width, 1)  # type: ignore[arg-type]

    def forward(self, state: State) -> Tensor:
        """Return one logit an example."""
        u, left = state
        seen: Tensor = self.linear(u.mean(2 if self.along == 1 else 1))
        return 0.5 - left + 1e-9 * seen.tanh().unsqueeze(2)


def updates(name: str) -> tuple[nn.Module, tuple[int, ...]]:
    """Return an update and the shape of an example."""
    if name == "conv":
        return tp.nn.ConvUpdate(64), (64, 32)
    return tp.nn.AttentionUpdate(64), (16, 64)


def drawn(kind: str, count: int) -> Tensor:
    """Return the numbers of steps of examples."""
    draw = torch.Generator().manual_seed(0)
    if kind == "uniform":
        return torch.randint(1, STEPS + 1, (count,), generator=draw)
    geometric = torch.rand(count, generator=draw).log() / math.log(1 - 1 / 12)
    return geometric.ceil().clamp(1, STEPS).long()


class Network(NamedTuple):
    """A block, and its step as torch.compile makes it."""

    block: tp.AdaptiveBlock
    shape: tuple[int, ...]
    step: Callable[..., State]


def network(name: str) -> Network:
    """Return what all ways run."""
    update, shape = updates(name)
    block = tp.AdaptiveBlock(Counted(update), Head(update), max_steps=STEPS, mode="thresholded").eval()
    block.details = False
    return Network(block, shape, torch.compile(block.steps[0], dynamic=False))


def ways(net: Network, steps: Tensor) -> dict[str, Callable[[], Any]]:
    """Return what is compared."""
    block, shape, compiled = net
    count, step = len(steps), block.steps[0]
    u, left = torch.randn(count, *shape), steps.float().view(-1, 1, 1)
    batches = [((a, b), a) for a, b in zip(u.split(WIDTH), left.split(WIDTH), strict=True)]

    def all_steps(function: Callable[..., State]) -> Callable[[], None]:
        @torch.no_grad()
        def run() -> None:
            for state, told in batches:
                for _ in range(STEPS):
                    state = function(state, told)

        return run

    @torch.no_grad()
    def until_the_last() -> None:
        for state, told in batches:
            block(state, told)

    def compact(size: int) -> Callable[[], None]:
        runner = CompactRunner(block)
        parts = [((a, b), a) for a, b in zip(u.split(size), left.split(size), strict=True)]

        def run() -> None:
            for state, told in parts:
                runner(state, CallArgs((told,)))

        return run

    def stream(compile: bool) -> Callable[[], None]:
        def run() -> None:
            total = 0
            for _, ponder in tp.stream(block, batches, width=WIDTH, batches=True, compile=compile):
                total += int(ponder.steps.sum())
            assert total == int(steps.sum())

        return run

    def singles() -> None:
        items = (((a, b), a) for a, b in zip(u, left, strict=True))
        assert sum(1 for _ in tp.stream(block, items, width=WIDTH)) == count

    return {
        "all steps": all_steps(compiled),
        "all steps, eager": all_steps(step),
        "until the last": until_the_last,
        "compact 256": compact(WIDTH),
        "compact all": compact(count),
        "stream": stream(False),
        "stream compiled": stream(True),
        "stream singles": singles,
    }


def medians(ways: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Return the median seconds of each way; all take turns."""
    order, taken = random.Random(0), {name: [0.0] * 0 for name in ways}
    for _ in range(rounds):
        for name in order.sample([*ways], len(ways)):
            start = time.perf_counter()
            ways[name]()
            taken[name].append(time.perf_counter() - start)
    return {name: statistics.median(each) for name, each in taken.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="a looped network whose batch is kept full")
    parser.add_argument("--networks", nargs="+", default=["conv", "attention"])
    parser.add_argument("--spreads", nargs="+", default=["uniform", "skewed"])
    parser.add_argument("--inputs", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".csv"))
    arguments = parser.parse_args()
    torch.manual_seed(0)
    rows: list[dict[str, object]] = [dict(row) for row in read_rows(arguments.out)]  # of others, too
    for name in arguments.networks:
        net = network(name)
        for kind in arguments.spreads:
            rows = [row for row in rows if (row["network"], row["spread"]) != (name, kind)]
            steps = drawn(kind, arguments.inputs)
            count, mean = len(steps), float(steps.double().mean())
            theory = (count * STEPS / WIDTH) / (count * mean / WIDTH + STEPS - mean)
            for run in ways(net, steps[: 2 * WIDTH]).values():  # compiles
                run()
            seconds = medians(ways(net, steps), arguments.rounds)
            bar = min(seconds["all steps"], seconds["all steps, eager"])
            best_compact = min(seconds["compact 256"], seconds["compact all"])
            row: dict[str, object] = {"network": name, "spread": kind, "inputs": count, "mean": f"{mean:.1f}"}
            row |= {way: f"{each:.3f}" for way, each in seconds.items()}
            row["theory"] = f"{theory:.2f}"
            for way in ("stream", "stream compiled", "stream singles"):
                row[f"share, {way}"] = f"{bar / seconds[way] / theory:.3f}"
            fastest = min(seconds["stream"], seconds["stream compiled"])
            row["over compact"] = f"{best_compact / fastest:.2f}"
            rows.append(row)
            print(*[f"{key}={value}" for key, value in row.items()], sep="\n", flush=True)
            write_csv(arguments.out, rows)


if __name__ == "__main__":
    main()
