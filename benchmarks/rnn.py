"""Thresholded recurrent layers against running all steps on all examples: what leaving the batch saves.

    python benchmarks/rnn.py [--device cuda] [--out benchmarks/rnn.csv]

The alternative is the fastest of three that run L steps on everything: the bare cell in a loop, torch's own
LSTM on inputs that are repeated L times (oneDNN's on a CPU, cuDNN's on a GPU), and an adaptive layer that
never halts, which on a CPU is the same kernel as one that does. All candidates of a row take turns, so that
other work on the machine hits all alike, and medians are compared. ``theory`` is L divided by the mean number
of steps, and ``of_theory`` the measured speed-up divided by it. Weights and inputs are random; the halting
unit has large weights, so that whether a state halts is close to a coin of its bias, and examples leave the
batch at different steps.
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


def as_network(cell: nn.LSTMCell) -> nn.LSTM:
    """The network of torch with the weights of a cell."""
    network = nn.LSTM(cell.input_size, cell.hidden_size).to(cell.weight_ih.device)
    for name, weight in cell.named_parameters():
        getattr(network, f"{name}_l0").data.copy_(weight)
    return network


def repeated(network: nn.LSTM, inputs: Tensor) -> Tensor:
    """All steps of all time steps, as a longer sequence."""
    first, again = F.pad(inputs, (0, 1), value=1.0).unsqueeze(1), F.pad(inputs, (0, 1)).unsqueeze(1)
    steps = torch.cat([first, again.expand(-1, MAX_STEPS - 1, -1, -1)], 1).flatten(0, 1)
    output: Tensor = network(steps)[0]
    return output[MAX_STEPS - 1 :: MAX_STEPS]


def coin(hidden: int, bias: float) -> HaltingUnit:
    head = HaltingUnit(hidden)
    nn.init.normal_(head.linear.weight, std=100.0)
    nn.init.constant_(head.linear.bias, bias)
    return head


def check_alike(one: Tensor, other: Tensor, tolerance: float) -> None:
    """Refuse results that differ, but for a few where rounding decided when to halt."""
    share = ((one - other).abs() < tolerance).double().mean().item()
    if share < 0.99:
        raise SystemExit(f"expected equal outputs, got {share:.1%} of them")


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
    network = as_network(cell)
    output, _, ponder = compact(inputs)
    check_alike(output, dense(inputs)[0], 1e-3)
    for other in (repeated(network, inputs), always(inputs)[0]):
        check_alike(other, bare_loop(cell, inputs), 1e-3)
    times = interleaved(
        {
            "loop": lambda: bare_loop(cell, inputs),
            "torch": lambda: repeated(network, inputs),
            "always": lambda: always(inputs),
            "masked": lambda: dense(inputs),
            "compact": lambda: compact(inputs),
        },
        seconds=seconds,
        least=7,
    )
    best = min(times["loop"], times["torch"], times["always"])
    steps = ponder.steps.double().mean().item()
    theory, speedup = MAX_STEPS / steps, best / times["compact"]
    return {
        "hidden": hidden,
        "batch": batch,
        "mean_steps": round(steps, 2),
        "loop_ms": round(1000 * times["loop"], 2),
        "torch_ms": round(1000 * times["torch"], 2),
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
    parser.add_argument("--threads", type=int, default=1, help="of the CPU")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.backends.cudnn.allow_tf32 = False  # all alternatives in full single precision
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
