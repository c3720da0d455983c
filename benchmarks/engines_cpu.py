"""Deployed networks on a CPU against the best dense alternative of the same run.

    python benchmarks/engines_cpu.py [--precision fp32 bf16] [--networks NETWORK …] [--seconds 15]

What ``torchpact bench`` measures, for the networks of the documentation, with every engine by itself beside.
Dense alternatives are the plain network of equal depth: eager, channels last, batch norms folded, compiled by
torch.compile, default and with frozen weights. All candidates of a row take turns, so that other work on the
machine hits all alike, and medians are compared. ``of_theory`` is the measured speed-up over the best of them
divided by the one that FLOPs promise.

Masks are blobs, see torchpact_recipes/bench/blobs.py, or what trained networks decide on CIFAR-10 test
images: of the zoo, unless ``--networks`` names others, as for ``torchpact evaluate``.
"""

import argparse
import itertools
from collections.abc import Iterator

import torch
from options import parser_for
from table import write_csv
from torch import Tensor

from torchpact.models import ResNet, ResNetConfig
from torchpact_recipes.bench.blobs import with_blobs
from torchpact_recipes.bench.rows import NetworkBench, Row, Setting
from torchpact_recipes.commands.bench import PRECISIONS
from torchpact_recipes.commands.common import find_network
from torchpact_recipes.data import load_sample, standardize

NETWORKS = ("resnet32-tau0.01", "resnet32-tau0.05", "resnet110-tau0.005", "resnet110-tau0.01")
ENGINES = ("dense", "sparse", "compact", "native")
COLUMNS = (
    "batch", "masks", "best_dense", "best_dense_ms", "deployed_ms", "speedup", "flops_speedup", "of_theory",
)  # fmt: skip


def cases(units: int, batch: int, arguments: argparse.Namespace) -> Iterator[tuple[str, ResNet, Tensor]]:
    for active in arguments.active:
        yield f"blobs {active:.0%}", *with_blobs(ResNetConfig(units=units), batch, active)
    if batch > 1:
        yield "images 50%", *with_blobs(ResNetConfig(units=units, per="image"), batch, 0.5)
    for name in arguments.networks:
        model = find_network(name).model
        if model.config.adaptive and model.config.units == units:
            yield name, model, standardize(load_sample("test").images)[:batch]


def shown(row: Row, precision: str) -> dict[str, object]:
    """The columns of the documentation's table, and a time for each engine."""
    engines = {f"{name}_ms": row[f"{name}_ms"] for name in ENGINES}
    return {"precision": precision, "network": row["work"], **{n: row[n] for n in COLUMNS}, **engines}


def main() -> None:
    parser = parser_for("deployed networks on a CPU", __file__, seconds=15.0)
    parser.add_argument("--units", type=int, nargs="*", default=[5, 18])
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 64])
    parser.add_argument("--active", type=float, nargs="*", default=[0.25, 0.5, 0.75, 1.0])
    parser.add_argument("--networks", nargs="*", default=NETWORKS)
    parser.add_argument("--precision", nargs="*", choices=PRECISIONS, default=["fp32", "bf16"])
    arguments = parser.parse_args()
    rows = []
    for precision, units, batch in itertools.product(arguments.precision, arguments.units, arguments.batch):
        setting = Setting(torch.device("cpu"), PRECISIONS[precision], arguments.seconds, arguments.compile)
        bench = NetworkBench(setting, ResNetConfig(units=units), torch.zeros(batch, 3, 32, 32))
        for case in cases(units, batch, arguments):
            rows.append(shown(bench.row(*case, engines=ENGINES, memory=False), precision))
            print(*rows[-1].values(), sep="\t", flush=True)
            write_csv(arguments.out, rows)


if __name__ == "__main__":
    main()
