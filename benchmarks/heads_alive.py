"""Are heads alive with defaults, and worth more than random halting: a looped 1-D convolution on parity.

    python benchmarks/heads_alive.py

The loop of benchmarks/prefix_parity.py is trained on the mean loss of all of its 20 exits, and frozen. It is
a network with one ``tp.AdaptiveBlock``; its head is ``tp.criteria.Linear`` with its defaults, trained to
``tp.Budget(flops=0.5)`` with its defaults, by Adam with the rate of heads in docs/adapt-training.md, for 800
updates of 64 strings. Nothing was chosen. Decisions are for positions or for strings; ``relaxed`` is the
default objective of a budget, ``advantage`` the one that the pages recommend for a single block. Columns, on
1,000 new strings:

    alive            the share of decisions that leave the commonest depth, thresholded at 1/2
    steps            the mean depth
    loss, right      of positions; the share of strings that are right at all positions
    random_loss, …   the same if depths are drawn from the histogram of these decisions, in expectation
    gain, low, high  random_loss − loss, and a bootstrap over strings of 95 %

Rows of ``calibrated`` have the bounds that ``tp.calibrate`` finds for half of the FLOPs on 500 other strings,
rows of ``confidence`` are a confidence exit, likewise calibrated. Rows that are there are not measured again.
"""

import argparse
import itertools
import tempfile
from pathlib import Path
from typing import Any

import torch
from bootstrap import interval
from prefix_parity import Loop, Strings, strings, train_loop
from safetensors.torch import load_model, save_model
from table import read_rows, write_csv
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import torchpact as tp

STEPS, LENGTH, BATCH, UPDATES, RATE = 20, 32, 64, 800, 0.02
SHARE = 0.5
SEEDS, PER, OBJECTIVES = (0, 1, 2), ("pixel", "example"), ("advantage", "relaxed", "confidence")
KEYS = ("per", "objective", "seed", "bound")
Row = dict[str, str]


class Step(nn.Module):
    """A step of the loop on maps of one row, as criteria know them; it is told the input."""

    def __init__(self, loop: Loop) -> None:
        super().__init__()
        self.loop = loop

    def forward(self, u: Tensor, given: Tensor) -> Tensor:
        """Return the next state, (batch, width, 1, length)."""
        return self.loop.step(u.squeeze(2), given.squeeze(2)).unsqueeze(2)


class Adaptive(nn.Module):
    """The loop as a network with an adaptive block."""

    def __init__(self, loop: Loop, head: nn.Module) -> None:
        super().__init__()
        self.loop = loop
        self.block = tp.AdaptiveBlock(Step(loop), head, max_steps=STEPS)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return class logits, (batch, 2, length)."""
        u, given = self.loop.begin(tokens)
        return self.read(self.block(u.unsqueeze(2), given.unsqueeze(2))[0])

    def read(self, u: Tensor) -> Tensor:
        """Return the class logits of a state."""
        logits: Tensor = self.loop.readout(u.squeeze(2))
        return logits


def by_exit(net: Adaptive, per: str, given: Strings) -> tuple[Tensor, tp.Ponder]:
    """Return the losses of all exits, (L, batch, length or 1), and the ponder of the run with its exits."""
    with tp.collect(net, exits=True) as ponders:
        net(given.tokens)
    exits = ponders[0].exits
    assert exits is not None
    logits = torch.stack([net.read(u) for u in exits.states if isinstance(u, Tensor)])
    losses = cross_entropy(logits.flatten(0, 1), given.parity.repeat(STEPS, 1), reduction="none")
    losses = losses.view(STEPS, *given.parity.shape)
    return losses.mean(2, True) if per == "example" else losses, ponders[0]


def trained(loop: Loop, per: Any, objective: str, seed: int) -> Adaptive:
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed + 5000)
    if objective == "confidence":
        return Adaptive(
            loop, tp.criteria.Confidence(lambda u: loop.readout(u.squeeze(2)).unsqueeze(2), per=per)
        )
    net = Adaptive(loop, tp.criteria.Linear(loop.width, per=per))
    budget = tp.Budget(flops=SHARE).bind(net, strings(8, LENGTH, generator).tokens)
    optimizer = torch.optim.Adam(net.block.halting.parameters(), lr=RATE)
    for _ in range(UPDATES):
        given = strings(BATCH, LENGTH, generator)
        if objective == "relaxed":
            with tp.collect(net) as ponders:
                loss = cross_entropy(net(given.tokens), given.parity, reduction="none").mean(1)
            value = budget.loss(loss, ponders)
        else:
            losses, ponder = by_exit(net, per, given)
            value = budget.loss(losses.detach(), ponder, objective)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        budget.step()
    print(budget, flush=True)
    return net


@torch.no_grad()
def measured(net: Adaptive, per: str, test: Strings) -> Row:
    """Return the measures under the thresholds that are set."""
    with tp.use_mode(net, "thresholded"):
        with tp.collect(net) as ponders:
            output = net(test.tokens)
        with tp.use_thresholds(net, tp.Thresholds("never")), tp.collect(net, exits=True) as all_steps:
            net(test.tokens)
    steps, exits = ponders[0].steps, all_steps[0].exits
    assert exits is not None
    logits = torch.stack(
        [net.read(u) for u in exits.states if isinstance(u, Tensor)]
    )  # (L, batch, 2, length)
    losses = cross_entropy(logits.flatten(0, 1), test.parity.repeat(STEPS, 1), reduction="none")
    losses, right = losses.view(STEPS, *test.parity.shape), logits.argmax(2) == test.parity
    histogram = torch.bincount(steps.flatten(), minlength=STEPS + 1)[1:] / steps.numel()
    loss = cross_entropy(output, test.parity, reduction="none").mean(1)
    random = torch.einsum("l,lbp->b", histogram, losses) / test.parity.size(1)
    # positions draw independently, or a string draws once
    chance = torch.einsum("l,lbp->bp", histogram, right.float()).prod(1)
    if per == "example":
        chance = histogram @ right.all(2).float()
    gain, low, high = interval(random - loss)
    return {
        "alive": f"{1 - histogram.max():.3f}",
        "steps": f"{steps.float().mean():.2f}",
        "loss": f"{loss.mean():.4f}",
        "right": f"{(output.argmax(1) == test.parity).all(1).float().mean():.3f}",
        "random_loss": f"{random.mean():.4f}",
        "random_right": f"{chance.mean():.3f}",
        "gain": f"{gain:.4f}",
        "low": f"{low:.4f}",
        "high": f"{high:.4f}",
    }


def backbone(seed: int, folder: Path) -> Loop:
    """Return the trained loop of a seed, from its file if there is one."""
    path = folder / f"loop-every-{seed}.safetensors"
    if not path.exists():
        save_model(train_loop(seed, every_exit=True, updates=2000), str(path.with_suffix(".tmp")))
        path.with_suffix(".tmp").replace(path)
    loop = Loop()
    load_model(loop, path)
    return loop.requires_grad_(False)


def main() -> None:
    parser = argparse.ArgumentParser(description="heads with defaults on parity with resets")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".csv"))
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "torchpact-objectives")
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = [*read_rows(arguments.out)]
    done = {tuple(row[key] for key in KEYS[:3]) for row in rows}
    for seed, per, objective in itertools.product(SEEDS, PER, OBJECTIVES):
        if (per, objective, str(seed)) in done:
            continue
        net = trained(backbone(seed, arguments.work), per, objective, seed)
        generator = torch.Generator().manual_seed(seed + 6000)
        test, other = (strings(count, LENGTH, generator) for count in (1000, 500))
        held = [Strings(*(x[i : i + 100] for x in other)) for i in range(0, 500, 100)]
        thresholds = tp.calibrate(
            net,
            held,
            SHARE,
            lambda output, given: -cross_entropy(output, given.parity, reduction="none").mean(1),
            inputs=lambda given: given.tokens,
        )
        for bound, given in (("half", None), ("calibrated", thresholds)):
            if (objective, bound) == ("confidence", "half"):
                continue
            with tp.use_thresholds(net, given):
                row = measured(net, per, test)
            rows.append(dict(zip(KEYS, (per, objective, str(seed), bound), strict=True)) | row)
            print(*rows[-1].values(), sep=", ", flush=True)
        write_csv(arguments.out, rows)


if __name__ == "__main__":
    main()
