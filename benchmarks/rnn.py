"""Thresholded recurrent layers against running all steps on all examples: what leaving the batch saves.

    python benchmarks/rnn.py [--device cuda] [--out benchmarks/rnn.csv]

The alternative is the faster of two: the bare cell in a loop, L times a time step, and a layer that never
halts. All candidates of a row take turns, so that other work on the machine hits all alike, and medians are
compared. ``theory`` is L divided by the mean number of steps, and ``of_theory`` the measured speed-up divided
by it. Weights and inputs are random; the halting unit has large weights, so that whether a state halts is
close to a coin of its bias, and examples leave the batch at different steps.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from table import write_csv
from torch import Tensor, nn
from torch.nn import functional as F

import torchpact as tp
from torchpact._state import State
from torchpact.engines.timing import interleaved
from torchpact.models import HaltingUnit, never_halt

MAX_STEPS = 10


def bare_loop(cell: nn.LSTMCell, inputs: Tensor) -> Tensor:
    """All steps of all time steps, without anything else."""
    state, outputs = None, []
    for first, again in zip(F.pad(inputs, (0, 1), value=1.0), F.pad(inputs, (0, 1)), strict=True):
        state = cell(first, state)
        for _ in range(MAX_STEPS - 1):
            state = cell(again, state)
        outputs.append(state[0])
    return torch.stack(outputs)


def coin(hidden: int, bias: float) -> HaltingUnit:
    head = HaltingUnit(hidden)
    nn.init.normal_(head.linear.weight, std=100.0)
    nn.init.constant_(head.linear.bias, bias)
    return head


@torch.no_grad()
def measure(
    hidden: int, batch: int, bias: float, time: int, device: str, seconds: float
) -> dict[str, object]:
    torch.manual_seed(0)
    cell, head = nn.LSTMCell(65, hidden).to(device), coin(hidden, bias).to(device)
    inputs = torch.randn(time, batch, 64, device=device)

    def layer(compact: bool, halting: Callable[[State], Tensor] = head) -> tp.AdaptiveRNN:
        return tp.AdaptiveRNN(cell, MAX_STEPS, halting=halting, mode="thresholded", compact=compact)

    compact, dense, always = layer(True), layer(False), layer(True, never_halt)
    output, _, ponder = compact(inputs)
    torch.testing.assert_close(output, dense(inputs)[0], rtol=1e-4, atol=1e-4)
    times = interleaved(
        {
            "loop": lambda: bare_loop(cell, inputs),
            "always": lambda: always(inputs),
            "masked": lambda: dense(inputs),
            "compact": lambda: compact(inputs),
        },
        seconds=seconds,
    )
    best = min(times["loop"], times["always"])
    steps = ponder.steps.double().mean().item()
    theory, speedup = MAX_STEPS / steps, best / times["compact"]
    return {
        "hidden": hidden,
        "batch": batch,
        "mean_steps": round(steps, 2),
        "loop_ms": round(1000 * times["loop"], 2),
        "always_ms": round(1000 * times["always"], 2),
        "masked_ms": round(1000 * times["masked"], 2),
        "compact_ms": round(1000 * times["compact"], 2),
        "speedup": round(speedup, 2),
        "theory": round(theory, 2),
        "of_theory": round(speedup / theory, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="what leaving the batch saves")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--hidden", type=int, nargs="*", default=[128, 512])
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 64, 512])
    parser.add_argument("--bias", type=float, nargs="*", default=[0.0, -100.0], help="of the coin")
    parser.add_argument("--time", type=int, default=20, help="time steps")
    parser.add_argument("--seconds", type=float, default=5.0, help="for each row")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".csv"))
    arguments = parser.parse_args()
    rows: list[dict[str, object]] = []
    for hidden in arguments.hidden:
        for batch in arguments.batch:
            for bias in arguments.bias:
                row = measure(hidden, batch, bias, arguments.time, arguments.device, arguments.seconds)
                rows.append({"device": arguments.device, **row})
                print(*rows[-1].values(), sep="\t", flush=True)
    write_csv(arguments.out, rows)


if __name__ == "__main__":
    main()
