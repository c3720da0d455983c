"""Steps that compute open positions only, beside those that mask: an MLP on tokens, trained and evaluated.

    python benchmarks/by_position.py [--device cpu] [--seconds 5] [--out benchmarks/by_position.csv]

A block of four steps u + f(u)·a, of which the last three have a gate that is open for a share of the tokens.
``rows`` is ``tp.Residual(f, by_position=True)``, which computes f where the gate is open, and ``masked`` the
same in dense execution, eager or by torch.compile, whichever is faster. Training is a forward and a backward
pass. All take turns, and medians are compared. ``of_theory`` is the measured speed-up over the better masked
one divided by the one that FLOPs promise.
"""

from collections.abc import Callable

import torch
from gated import Dense, Gated, compared, evaluate, train
from options import parser_for
from table import write_csv
from torch import Tensor, nn

import torchpact as tp

STEPS = 4


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
        units = [tp.Residual(f, by_position=True) for f in functions]
        masked, ours = (made(units).to(arguments.device) for made in (Dense, Gated))
        ways: dict[str, Callable[..., Tensor]] = {"masked": masked, "rows": ours}
        if arguments.compile:
            ways["masked compiled"] = torch.compile(masked)
        for share in (0.1, 0.25, 0.5, 1.0):
            u = torch.randn(batch, tokens, size, device=arguments.device)
            gate = (torch.rand(batch, tokens, 1, device=arguments.device) < share).float()
            theory = STEPS / (1 + (STEPS - 1) * float(gate.mean()))
            for what in (train, evaluate):
                row: dict[str, object] = {"tokens": f"{batch}×{tokens}×{size}", "does": what.__name__}
                row |= {"open": share}
                row |= compared(what, ways, "rows", u, gate, theory=theory, seconds=arguments.seconds)
                rows.append(row)
                print(*row.values(), sep="\t", flush=True)
                write_csv(arguments.out, rows)


if __name__ == "__main__":
    main()
