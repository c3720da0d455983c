"""Deployed recurrent layers, thresholded, against running all steps on all examples: what early exit saves.

    python benchmarks/rnn.py [--device cuda] [--out FILE]

Without ``--out`` that is benchmarks/rnn.csv, and benchmarks/rnn_gpu.csv on a GPU.

``speedup`` is against the best that there is without these kernels, the faster of two that run L steps on
everything: the bare cell in a loop, and torch's own LSTM on inputs that are repeated L times (oneDNN's on a
CPU, cuDNN's on a GPU). ``deployed_ms`` is ``torchpact.deploy(layer, inputs)``, ``masked_ms`` the layer
itself, which computes all examples until all have halted. ``theory`` is L divided by the mean number of
steps, and ``of_theory`` the speed-up divided by it. It can exceed 1, where our kernels are faster for the
same steps. ``of_theory_over_itself`` is the same against a deployed layer that never halts, which runs the
very kernels of one that does (``always_ms``): what early exit brings by itself. A sequence cannot be read
faster than one iteration after the other: where a GPU has so little to do that an iteration takes as long for
fewer rows, this cannot exceed ``limit``, the mean number of steps divided by ``most_steps``, that of the
sequence that takes most.

All candidates of a row take turns, so that other work on the machine hits all alike, and medians are
compared. Before that, what they return is. Weights and inputs are random; the halting unit has large weights,
so that whether a state halts is close to a coin of its bias, and examples halt at different steps.
"""

import argparse
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from table import write_csv
from torch import Tensor, nn
from torch.nn import functional as F

import torchpact as tp
from torchpact.core.state import State
from torchpact.engines.timing import interleaved
from torchpact.models import HaltingUnit, never_halt

MAX_STEPS = 10
Result = tuple[Tensor, State, tp.Ponder]


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
    network = nn.LSTM(cell.input_size, cell.hidden_size).to(cell.weight_ih)
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


def check_alike(one: Tensor, other: Tensor, tolerance: float, least: float = 1.0) -> None:
    """Refuse results of which less than a share are equal."""
    share = ((one - other).abs() < tolerance).double().mean().item()
    if not share >= least:
        raise SystemExit(f"expected equal outputs, got {share:.2%} of them")


def check_decided(one: Result, other: Result, tolerance: float) -> None:
    """Refuse results that differ before rounding has decided otherwise, and decisions that often differ."""
    same = (one[2].steps == other[2].steps).t().cumprod(0).bool()
    if same.double().mean() < 0.95:
        raise SystemExit(f"expected equal decisions, got {same.double().mean():.1%} of them")
    check_alike(one[0][same], other[0][same], tolerance)


def check_steps(one: Tensor, other: Tensor) -> None:
    """Refuse decisions that differ on average: in lower precision rounding decides here and there."""
    means = [steps.double().mean().item() for steps in (one, other)]
    if abs(means[0] - means[1]) > 0.1 * means[1]:
        raise SystemExit("expected steps alike, got {:.2f} and {:.2f} on average".format(*means))


class Setting(NamedTuple):
    """What a row is about."""

    device: str
    precision: str
    time: int
    hidden: int
    batch: int


@torch.no_grad()
def measure(setting: Setting, bias: float, seconds: float, least: int) -> dict[str, object]:
    device, precision, time, hidden, batch = setting
    kind = torch.bfloat16 if precision == "bf16" else torch.float32
    torch.manual_seed(0)
    cell, head = nn.LSTMCell(65, hidden).to(device, kind), coin(hidden, bias).to(device, kind)
    inputs = torch.randn(time, batch, 64).to(device, kind)

    def layer(halting: Callable[[State], Tensor]) -> tp.AdaptiveRNN:
        return tp.AdaptiveRNN(cell, MAX_STEPS, halting=halting, mode="thresholded").eval()

    dense = layer(head)
    deployed, always = tp.deploy(dense, inputs), tp.deploy(layer(never_halt), inputs)
    network = as_network(cell)
    result, expected = deployed(inputs), dense(inputs)
    if precision == "single":
        check_decided(result, expected, 1e-3)
    elif batch >= 64:
        check_steps(result[2].steps, expected[2].steps)
    for other in (repeated(network, inputs), always(inputs)[0]):
        limits = (1e-3, 1.0) if precision == "single" else (5e-2, 0.95)
        check_alike(other, bare_loop(cell, inputs), *limits)
    candidates = {
        "loop": lambda: bare_loop(cell, inputs),
        "torch": lambda: repeated(network, inputs),
        "always": lambda: always(inputs),
        "masked": lambda: dense(inputs),
        "deployed": lambda: deployed(inputs),
    }
    if device != "cpu":
        del candidates["masked"]  # which takes most of the time, and is no alternative
    times = interleaved(candidates, seconds=seconds, least=least)
    steps = result[2].steps.double().mean(1)
    mean, most = steps.mean().item(), steps.max().item()
    theory, speedup = MAX_STEPS / mean, min(times["loop"], times["torch"]) / times["deployed"]
    return {
        **setting._asdict(),
        "mean_steps": round(mean, 2),
        "most_steps": round(most, 2),
        **{f"{name}_ms": round(1000 * each, 3) for name, each in times.items()},
        "speedup": round(speedup, 2),
        "theory": round(theory, 2),
        "of_theory": round(speedup / theory, 2),
        "of_theory_over_itself": round(times["always"] / times["deployed"] / theory, 2),
        "limit": round(mean / most, 2),
    }


def set_precision(precision: str) -> None:
    """All alternatives in the same: full single precision, or that of tensor cores."""
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"


def main() -> None:
    parser = argparse.ArgumentParser(description="what early exit saves")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--precision", nargs="*", default=["single"], choices=["single", "tf32", "bf16"])
    parser.add_argument("--time", type=int, nargs="*", help="time steps; by default 20, on a GPU 20 and 100")
    parser.add_argument("--hidden", type=int, nargs="*", help="by default 128 and 512, on a GPU also 1500")
    parser.add_argument("--batch", type=int, nargs="*", help="by default 1, 64 and 512, on a GPU also 4096")
    parser.add_argument("--bias", type=float, nargs="*", default=[0.0, -100.0], help="of the coin")
    parser.add_argument("--seconds", type=float, default=5.0, help="for each row")
    parser.add_argument("--least", type=int, default=7, help="times that each is measured")
    parser.add_argument("--out", type=Path, help="by default rnn.csv beside this file, rnn_gpu.csv on a GPU")
    parser.add_argument("--threads", type=int, default=1, help="of the CPU")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    on_cpu = arguments.device == "cpu"
    out = arguments.out or Path(__file__).with_name("rnn.csv" if on_cpu else "rnn_gpu.csv")
    settings = itertools.product(
        [arguments.device],
        arguments.precision,
        arguments.time or ([20] if on_cpu else [20, 100]),
        arguments.hidden or ([128, 512] if on_cpu else [128, 512, 1500]),
        arguments.batch or ([1, 64, 512] if on_cpu else [1, 64, 512, 4096]),
        arguments.bias,
    )
    rows: list[dict[str, object]] = []
    for *setting, bias in settings:
        set_precision(setting[1])
        rows.append(measure(Setting(*setting), bias, arguments.seconds, arguments.least))
        print(*rows[-1].values(), sep="\t", flush=True)
        write_csv(out, rows)


if __name__ == "__main__":
    main()
