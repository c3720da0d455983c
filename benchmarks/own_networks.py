"""Networks that are not torchpact's, deployed, beside the best dense alternative of the same run.

    python benchmarks/own_networks.py [--device cpu] [--seconds 5] [--out benchmarks/own_networks.csv]

Three kinds: a state for each example that an MLP improves (``examples``), one for each token (``tokens``),
and maps that bottleneck units improve, between a stem and a classifier (``pixels``). States have a clock that
says when they halt: of those that go on, a share does so again after every step. Pixels are blobs of that
share, see torchpact_recipes/bench/blobs.py, after the first unit.

Dense alternatives run all steps and ask no head: eager and compiled by torch.compile, for pixels also with
channels last and batch norms folded. All candidates of a row take turns, and medians are compared.
``as_it_is`` is the adaptive network undeployed, which masks. ``of_theory`` is the measured speed-up over the
best dense one divided by the one that FLOPs promise.
"""

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from options import parser_for
from table import write_csv
from torch import Tensor, nn

import torchpact as tp
from torchpact.engines.timing import in_turns
from torchpact_recipes.bench.bottleneck import PlainBottlenecks, bottlenecks_with_blobs
from torchpact_recipes.bench.dense import dense_alternatives

Ways = dict[str, Callable[[], object]]


class Improve(nn.Module):
    """u + f(u), with an MLP f; the last feature is a clock, which moves on by one."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(size),
            nn.Linear(size, 4 * size),
            nn.Linear(4 * size, size),
        )
        nn.init.zeros_(self.down.weight[-1].data)
        nn.init.ones_(self.down.bias[-1:].data)

    def forward(self, u: Tensor) -> Tensor:
        """Return the next state."""
        moved: Tensor = u + self.down(torch.relu(self.up(self.norm(u))))
        return moved


class Thinker(nn.Module):
    """A stem, an adaptive block, a readout."""

    def __init__(self, size: int, max_steps: int) -> None:
        super().__init__()
        self.stem, self.readout = nn.Linear(size, size), nn.Linear(size, 10)
        self.block = tp.AdaptiveBlock(
            [Improve(size) for _ in range(max_steps)], lambda u: u[..., -1:], mode="thresholded"
        )

    def forward(self, x: Tensor) -> tuple[Tensor, tp.Ponder]:
        """Return logits, and what the block did."""
        u, ponder = self.block(self.started(x))
        return self.readout(u), ponder

    def started(self, x: Tensor) -> Tensor:
        """What the block is given: the clock goes by the last feature of the input."""
        return torch.cat([self.stem(x)[..., :-1], x[..., -1:]], -1)


class Plain(nn.Module):
    """All steps, and no decisions."""

    def __init__(self, net: Thinker) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        u = self.net.started(x)
        for step in self.net.block.steps:
            u = step(u)
        logits: Tensor = self.net.readout(u)
        return logits


def thinker(shape: tuple[int, ...], share: float, max_steps: int) -> tuple[Thinker, Tensor]:
    """A network and inputs of which a share goes on after every step."""
    torch.manual_seed(0)
    x = torch.randn(shape)
    more = torch.distributions.Geometric(1 - share).sample(shape[:-1]) if share else torch.zeros(shape[:-1])
    x[..., -1] = -0.5 - more
    return Thinker(shape[-1], max_steps).eval(), x


def plain_ways(net: Any, x: Tensor, compiling: bool) -> Ways:
    if isinstance(net, Thinker):
        ways: Ways = {"eager": partial(Plain(net), x)}
        if compiling:
            torch.compiler.reset()
            ways["compiled"] = partial(torch.compile(Plain(net)), x)
        return ways
    return dense_alternatives(
        PlainBottlenecks(net, folded=False), PlainBottlenecks(net, folded=True), x, compiling
    )


def cases(device: torch.device) -> list[tuple[str, str, float, Any, Tensor]]:
    found: list[tuple[str, str, float, Any, Tensor]] = []
    for share in (0.5, 0.75, 0.9):
        for kind, shape in (
            ("examples", (256, 512)),
            ("examples", (16, 512)),
            ("tokens", (8, 196, 384)),
            ("tokens", (64, 50, 64)),
        ):
            net, x = thinker(shape, share, max_steps=12)
            found.append((kind, "×".join(map(str, shape)), share, net.to(device), x.to(device)))
    for share in (0.25, 0.5, 1.0):
        made, images = bottlenecks_with_blobs(8, share, 112, units=(3, 4), channels=(256, 512))
        found.append(("pixels", "8×3×112×112", share, made.to(device), images.to(device)))
    return found


def main() -> None:
    parser = parser_for("networks of one's own, deployed", __file__, seconds=5.0)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    rows = []
    with torch.no_grad():
        for kind, shape, share, net, x in cases(torch.device(arguments.device)):
            fast = tp.deploy(net, x, details=False)
            plain = plain_ways(net, x, arguments.compile)
            calls: Ways = {**plain, "as_it_is": partial(net, x), "deployed": partial(fast, x)}
            times = in_turns(calls, seconds=arguments.seconds, least=5, most=400)
            ms = {name: 1e3 * statistics.median(each) for name, each in times.items()}
            best = min(plain, key=ms.__getitem__)
            whole = fast.report.measurements[-1]
            row = {"decides_for": kind, "input": shape, "goes_on": share, "active": round(whole.active, 3)}
            row |= {"engine": "+".join(dict.fromkeys(each.engine for each in fast.report.measurements[:-1]))}
            row |= {"best_dense": best, "best_dense_ms": round(ms[best], 3)}
            row |= {"as_it_is_ms": round(ms["as_it_is"], 3), "deployed_ms": round(ms["deployed"], 3)}
            speedup = ms[best] / ms["deployed"]
            row |= {"speedup": round(speedup, 2), "flops_speedup": round(whole.flops_speedup, 2)}
            row |= {"of_theory": round(speedup / whole.flops_speedup, 2)}
            rows.append(row)
            print(*row.values(), sep="\t", flush=True)
            write_csv(arguments.out, rows)


if __name__ == "__main__":
    main()
