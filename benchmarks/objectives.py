"""Which objective keeps halting heads alive: prefix parity with resets, a looped network, heads per position.

    python benchmarks/objectives.py

A backbone is trained once a seed, on the mean loss of all exits ("every") or on that of the last alone, and
frozen; then a linear head, shared by all steps, is trained for 200 updates with each objective, initial bias
and optimizer. Rows of part *joint* train the backbone too. Columns:

    steps, strings      mean steps of a position, and strings right at all positions, thresholded at ½
    alive               the share of positions that leave the commonest depth
    rank                Spearman's correlation of steps with the distance from the last reset
    max_h, expected     the largest h before the last step, and E[N]: what ½ is to be compared with
    strings_at_budget   strings right with a bound calibrated to BUDGET steps on other strings

Rows are written one by one, and those that are there are not measured again.
"""

import argparse
import copy
import csv
import itertools
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from prefix_parity import Loop, strings, train_loop
from safetensors.torch import load_model, save_model
from table import write_csv
from torch import Tensor, nn

import torchpact as tp

STEPS, LENGTH, BATCH, TAU, BUDGET = 20, 32, 64, 0.01, 6.0
UPDATES, POOL, HELD_OUT, SAMPLES = 200, 20, 256, 4
RATES = {"sgd": 1.0, "adam": 0.02}
SEEDS, BIASES = (0, 1, 2), (-5.0, -3.0, 0.0)

Row = dict[str, str]


class Exits(NamedTuple):
    """What heads learn from, after every step: states (L, batch, width, length), the rest without a width."""

    states: Tensor
    losses: Tensor
    right: Tensor
    distance: Tensor
    """(batch, length)."""
    parity: Tensor
    """(batch, length)."""


class Head(nn.Module):
    """The halting logits of every position, linear in its state."""

    def __init__(self, width: int, bias: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))
        self.bias = nn.Parameter(torch.tensor(bias))

    def forward(self, states: Tensor) -> Tensor:
        """Return (L, batch, length)."""
        return torch.einsum("lbct,c->lbt", states, self.weight) + self.bias


def exits_of(net: Loop, batch: int, generator: torch.Generator) -> Exits:
    """Run all steps on new strings."""
    given = strings(batch, LENGTH, generator)
    states = net.states(given.tokens, STEPS)
    losses = torch.stack([net.losses(u, given.parity) for u in states])
    right = torch.stack([net.readout(u).argmax(1) == given.parity for u in states])
    return Exits(torch.stack(states), losses, right, given.distance, given.parity)


def sampled(mode: tp.Mode, logits: Tensor) -> tuple[Tensor, tp.Ponder]:
    """Return the weight of every exit, and the ponder of positions as examples, (L, batch · length)."""
    loop, weights = tp.HaltingLoop.start(mode, STEPS), []
    for each in logits.flatten(1):
        loop, weight = tp.decide(loop, each)
        left = loop.remaining if weight is None else weight  # the last exit takes what remains
        assert left is not None
        weights.append(left)
    return torch.stack(weights), loop.ponder()


def relaxed(net: Loop, exits: Exits, logits: Tensor, tau: float) -> Tensor:
    weights, ponder = sampled(tp.Relaxed(), logits)
    output = (weights.view_as(logits).unsqueeze(2) * exits.states).sum(0)
    return tp.map_loss(net.losses(output, exits.parity).flatten(), ponder, tau)


def score(runs: int) -> "Objective":
    """REINFORCE for a single run, RLOO for more; positions are examples, as they are independent."""
    baseline = tp.EMABaseline()

    def loss(net: Loop, exits: Exits, logits: Tensor, tau: float) -> Tensor:
        weights, ponder = sampled(tp.Discrete(), logits.repeat(1, runs, 1))
        nll = (weights * exits.losses.repeat(1, runs, 1).flatten(1)).sum(0)
        if runs == 1:
            return tp.reinforce_loss(nll, ponder, tau, baseline)
        return tp.rloo_loss(nll.view(runs, -1), ponder, tau)

    return loss


def ponder_net(net: Loop, exits: Exits, logits: Tensor, tau: float, beta: float = 0.01) -> Tensor:
    """With a prior in which a step costs what it costs elsewhere: β·KL has β·τ·N in it."""
    return tp.ponder_loss(exits.losses.flatten(1), logits.flatten(1), tau / beta, beta)


def advantage(**options: Any) -> "Objective":
    return lambda net, exits, logits, tau: tp.advantage_loss(exits.losses, logits, tau, **options)


Objective = Callable[[Loop, Exits, Tensor, float], Tensor]
OBJECTIVES: dict[str, Callable[[], Objective]] = {
    "relaxed": lambda: relaxed,
    "reinforce": lambda: score(1),
    "rloo": lambda: score(SAMPLES),
    "exact": lambda: lambda net, exits, logits, tau: tp.exact_loss(exits.losses, logits, tau),
    "ponder": lambda: ponder_net,
    "advantage": advantage,
    "advantage, hard": lambda: advantage(continuation="hard"),
    "advantage, reach": lambda: advantage(reach=True),
}


def steps_at(logits: Tensor, bound: float) -> Tensor:
    """Return the steps of every position where logits are compared with a bound."""
    fires = torch.cat([logits[:-1] > bound, torch.ones_like(logits[:1], dtype=torch.bool)])
    return fires.to(torch.uint8).argmax(0) + 1


def calibrated(logits: Tensor, budget: float) -> float:
    """Return the bound with the given mean steps, by bisection."""
    low, high = logits[:-1].min().item() - 1, logits[:-1].max().item() + 1
    for _ in range(40):
        middle = (low + high) / 2
        above = steps_at(logits, middle).float().mean().item() > budget
        low, high = (low, middle) if above else (middle, high)
    return low


def ranks(x: Tensor) -> Tensor:
    """Return the mean rank of every value."""
    _, inverse, counts = x.unique(return_inverse=True, return_counts=True)
    mean: Tensor = (counts.cumsum(0) - counts.double() / 2)[inverse]
    return mean


def rank_correlation(x: Tensor, y: Tensor) -> float:
    """Return Spearman's correlation, 0 where one of them is constant."""
    if x.unique().numel() < 2:
        return 0.0
    return torch.corrcoef(torch.stack([ranks(x.flatten()), ranks(y.flatten())]))[0, 1].item()


def strings_right(exits: Exits, steps: Tensor) -> float:
    """Return the share of strings that are right at all positions, each at its own step."""
    return exits.right.gather(0, (steps - 1).unsqueeze(0))[0].all(1).float().mean().item()


def evaluated(logits: Tensor, test: Exits, other_logits: Tensor) -> Row:
    """Return the measures of thresholded heads."""
    steps = steps_at(logits, 0.0)
    commonest = steps.flatten().bincount().max() / steps.numel()
    at_budget = steps_at(logits, calibrated(other_logits, BUDGET))
    h = logits.sigmoid().flatten(1)
    return {
        "steps": f"{steps.float().mean():.2f}",
        "strings": f"{strings_right(test, steps):.3f}",
        "alive": f"{1 - commonest:.3f}",
        "rank": f"{rank_correlation(steps, test.distance):.2f}",
        "max_h": f"{h[:-1].max():.3f}",
        "expected": f"{tp.expected_steps(h).mean():.2f}",
        "steps_at_budget": f"{at_budget.float().mean():.2f}",
        "strings_at_budget": f"{strings_right(test, at_budget):.3f}",
    }


def trained(net: Loop, setting: "Setting", pool: Sequence[Exits]) -> Head:
    """Train a head on the exits of a frozen network; with an empty pool, the network, too, on new strings."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(setting.seed + 3000)
    head, loss_of = Head(net.width, setting.bias), OBJECTIVES[setting.objective]()
    kind = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[setting.optimizer]
    groups: list[dict[str, Any]] = [{"params": list(head.parameters())}]
    if not pool:
        groups.append({"params": list(net.requires_grad_(True).parameters()), "lr": 1e-3})
    optimizer = kind(groups, lr=RATES[setting.optimizer])
    for number in range(UPDATES):
        exits = pool[number % len(pool)] if pool else exits_of(net, BATCH // 4, generator)
        tau = TAU * min(1.0, 2 * number / UPDATES) if setting.part == "warm-up" else TAU
        loss = loss_of(net, exits, head(exits.states), tau)
        optimizer.zero_grad()
        loss.backward()
        if setting.part == "clipped":
            nn.utils.clip_grad_norm_(head.parameters(), 0.1)
        optimizer.step()
    return head.requires_grad_(False)


class Setting(NamedTuple):
    """What a row is about."""

    part: str
    exits: str
    seed: int
    objective: str
    bias: float = 0.0
    optimizer: str = ""


def settings() -> Iterator[Setting]:
    """Yield what is measured, the most telling first."""
    for seed in SEEDS:
        for exits in ("every", "last"):
            for baseline in (*(f"fixed {k}" for k in (4, 6, 8, 12, 16)), "confidence"):
                yield Setting("baseline", exits, seed, baseline)
            for optimizer, bias in itertools.product(RATES, BIASES):
                if exits == "every" or (optimizer, bias) == ("adam", -3.0):
                    for name in OBJECTIVES:
                        yield Setting("heads", exits, seed, name, bias, optimizer)
        for part in ("warm-up", "clipped", "joint"):
            for name in ("relaxed", "exact"):
                yield Setting(part, "every", seed, name, -3.0, "adam")


def backbone(setting: Setting, folder: Path) -> Loop:
    """Return the trained network of a seed, from its file if there is one."""
    path = folder / f"loop-{setting.exits}-{setting.seed}.safetensors"
    if not path.exists():
        net = train_loop(setting.seed, every_exit=setting.exits == "every", updates=2000)
        save_model(net, str(path.with_suffix(".tmp")))
        path.with_suffix(".tmp").replace(path)
    net = Loop()
    load_model(net, path)
    return net.requires_grad_(False)


def baseline_row(net: Loop, name: str, test: Exits, other: Exits) -> Row:
    """Return the measures of a fixed depth, or of a calibrated confidence exit."""
    if name == "confidence":  # the logit of the larger probability
        of = [torch.stack([net.readout(u).diff(dim=1).abs()[:, 0] for u in e.states]) for e in (test, other)]
        return evaluated(of[0], test, of[1])
    steps = torch.full(test.parity.shape, int(name.split()[1]))
    return {"steps": name.split()[1], "strings": f"{strings_right(test, steps):.3f}"}


def main() -> None:
    parser = argparse.ArgumentParser(description="objectives for halting heads")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".csv"))
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "torchpact-objectives")
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    if arguments.out.exists():
        with arguments.out.open(newline="") as file:
            rows = list(csv.DictReader(file))
    done = {tuple(row[name] for name in Setting._fields) for row in rows}
    present, net, pool, held_out = None, None, [], []
    for setting in settings():
        if tuple(str(value) for value in setting) in done:
            continue
        if present != (setting.exits, setting.seed):
            present, net = (setting.exits, setting.seed), backbone(setting, arguments.work)
            generator = torch.Generator().manual_seed(setting.seed + 2000)
            with torch.no_grad():
                pool = [exits_of(net, BATCH, generator) for _ in range(POOL)]
                held_out = [exits_of(net, HELD_OUT, generator) for _ in range(2)]
        assert net is not None
        if setting.part == "baseline":
            row = baseline_row(net, setting.objective, *held_out)
        elif setting.part == "joint":
            along = copy.deepcopy(net)
            head = trained(along, setting, ())
            generator = torch.Generator().manual_seed(setting.seed + 4000)
            with torch.no_grad():
                test, other = (exits_of(along, HELD_OUT, generator) for _ in range(2))
            row = evaluated(head(test.states), test, head(other.states))
        else:
            head = trained(net, setting, pool)
            row = evaluated(head(held_out[0].states), held_out[0], head(held_out[1].states))
        rows.append({**{name: str(value) for name, value in setting._asdict().items()}, **row})
        write_csv(arguments.out, rows)
        print(*rows[-1].values(), sep=", ", flush=True)


if __name__ == "__main__":
    main()
