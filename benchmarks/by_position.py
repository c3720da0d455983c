"""Steps that compute open positions only, beside those that mask: an MLP on tokens, trained and evaluated.

    python benchmarks/by_position.py [--device cpu] [--seconds 5] [--out benchmarks/by_position.csv]

A block of four steps u + f(u)·a, of which the last three have a gate that is open for a share of the tokens.
``masked`` computes f everywhere, eager or by torch.compile, whichever is faster, and ``rows`` where the gate
is open: ``tp.Residual(f, by_position=True)``. Training is a forward and a backward pass. All take turns, and
medians are compared. ``of_theory`` is the measured speed-up over the better masked one divided by the one
that FLOPs promise.
"""

import statistics
from collections.abc import Callable, Sequence
from functools import partial

import torch
from options import parser_for
from table import write_csv
from torch import Tensor, nn

import torchpact as tp
from torchpact.engines.timing import in_turns

STEPS = 4


class Steps(nn.Module):
    """The loop of a block, but with gates that are given."""

    def __init__(self, functions: Sequence[nn.Module], by_position: bool) -> None:
        super().__init__()
        self.units = nn.ModuleList(tp.Residual(f, by_position=by_position) for f in functions)

    def forward(self, u: Tensor, gate: Tensor) -> Tensor:
        """Return the last state."""
        for number, unit in enumerate(self.units):
            u = unit(u, gate=gate if number else None)
        return u


def train(net: Callable[..., Tensor], u: Tensor, gate: Tensor) -> None:
    net(u, gate).square().mean().backward()


def evaluate(net: Callable[..., Tensor], u: Tensor, gate: Tensor) -> None:
    with torch.no_grad():
        net(u, gate)


def main() -> None:
    parser = parser_for("steps that compute open positions only", __file__, seconds=5.0)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    rows = []
    for batch, tokens, size in ((8, 196, 384), (16, 64, 128)):
        functions = [
            nn.Sequential(nn.LayerNorm(size), nn.Linear(size, 4 * size), nn.GELU(), nn.Linear(4 * size, size))
            for _ in range(STEPS)
        ]
        masked, ours = (Steps(functions, by).to(arguments.device) for by in (False, True))
        ways: dict[str, Callable[..., Tensor]] = {"masked": masked, "rows": ours}
        if arguments.compile:
            ways["masked compiled"] = torch.compile(masked)
        for share in (0.1, 0.25, 0.5, 1.0):
            u = torch.randn(batch, tokens, size, device=arguments.device)
            gate = (torch.rand(batch, tokens, 1, device=arguments.device) < share).float()
            theory = STEPS / (1 + (STEPS - 1) * float(gate.mean()))
            for what in (train, evaluate):
                calls = {name: partial(what, net, u, gate) for name, net in ways.items()}
                times = in_turns(calls, seconds=arguments.seconds, least=5, most=400)
                ms = {name: 1e3 * statistics.median(each) for name, each in times.items()}
                best = min((name for name in ms if name != "rows"), key=ms.__getitem__)
                speedup = ms[best] / ms["rows"]
                row: dict[str, object] = {
                    "tokens": f"{batch}×{tokens}×{size}",
                    "does": what.__name__,
                    "open": share,
                }
                row |= {"best": best, "best_ms": round(ms[best], 3), "rows_ms": round(ms["rows"], 3)}
                row |= {"speedup": round(speedup, 2), "flops_speedup": round(theory, 2)}
                row |= {"of_theory": round(speedup / theory, 2)}
                rows.append(row)
                print(*row.values(), sep="\t", flush=True)
                write_csv(arguments.out, rows)


if __name__ == "__main__":
    main()
