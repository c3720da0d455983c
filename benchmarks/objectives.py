"""Which objective keeps halting heads alive: prefix parity with resets, by a looped network.

    python benchmarks/objectives.py

A backbone is trained once a seed, on the mean loss of all exits ("every") or on that of the last alone, and
frozen; then a linear head, shared by all steps, is trained for 200 updates with each objective, initial bias
and optimizer. It decides for every position, or for every example, from the mean, the largest and the
smallest of each feature over positions. Parts other than *heads* are options, alone: τ rising from 0 over
the first half of the updates (*warm-up*), gradients clipped to a norm of 0.1 (*clipped*), four times the
updates at a sixth of the rate (*slow*), the backbone trained along (*joint*; with advantage_loss, by the mean
loss of all exits), other prices (*5 tau*, *15 tau*). Columns:

    cost                loss + τ·steps, thresholded at ½: what all of them are to minimise
    steps, strings      mean steps, and strings right at all positions, thresholded at ½
    alive               the share of decisions that leave the commonest depth
    rank                Spearman's correlation of steps with the distance from the last reset, the longest
                        of an example
    max_h, expected     the largest h before the last step, and E[N]: what ½ is to be compared with
    … at_budget         the same with a bound calibrated to BUDGET steps on other strings

Rows are written one by one, and those that are there are not measured again.
"""

import argparse
import copy
import itertools
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from exit_measures import Exits, calibrated, cost_of, rank_correlation, steps_at, strings_right
from prefix_parity import Loop, strings, train_loop
from safetensors.torch import load_model, save_model
from table import read_rows, write_csv
from torch import Tensor, nn

import torchpact as tp

STEPS, LENGTH, BATCH = 20, 32, 64
TAU, BUDGET = {"position": 0.01, "example": 0.002}, {"position": 4.5, "example": 11.0}
PRICES = {"5 tau": 5, "15 tau": 15}
UPDATES, POOL, HELD_OUT, SAMPLES = 200, 20, 256, 4
RATES = {"sgd": 1.0, "adam": 0.02}
AT_BUDGET = ("steps_at_budget", "strings_at_budget", "rank_at_budget")
MEASURES = ("cost", "steps", "strings", "alive", "rank", "max_h", "expected", *AT_BUDGET)
SEEDS, BIASES = (0, 1, 2), (-5.0, -3.0, 0.0)

Row = dict[str, str]


class Head(nn.Module):
    """The halting logits of every decision, linear in its features."""

    def __init__(self, width: int, bias: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))
        self.bias = nn.Parameter(torch.tensor(bias))

    def forward(self, features: Tensor) -> Tensor:
        """Return (L, batch, P)."""
        return torch.einsum("lbcp,c->lbp", features, self.weight) + self.bias


def exits_of(net: Loop, per: str, batch: int, generator: torch.Generator) -> Exits:
    """Run all steps on new strings."""
    given = strings(batch, LENGTH, generator)
    states = torch.stack(net.states(given.tokens, STEPS))
    losses = torch.stack([net.losses(u, given.parity) for u in states])
    right = torch.stack([net.readout(u).argmax(1) == given.parity for u in states])
    if per == "position":
        return Exits(states, states, losses, right, given.distance, given.parity)
    pooled = torch.cat([states.mean(3, True), states.amax(3, True), states.amin(3, True)], 2)
    distance = given.distance.amax(1, True)
    return Exits(states, pooled, losses.mean(2, True), right.all(2, True), distance, given.parity)


def sampled(mode: tp.Mode, logits: Tensor) -> tuple[Tensor, tp.Ponder]:
    """Return the weight of every exit, and the ponder, with decisions as examples: (L, batch · P)."""
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
    losses = net.losses(output, exits.parity)
    return tp.map_loss((losses.mean(1) if logits.size(2) == 1 else losses.flatten()), ponder, tau)


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
    "advantage (soft)": lambda: advantage(continuation="soft"),
    "advantage (reach)": lambda: advantage(reach=True),
}


def evaluated(logits: Tensor, test: Exits, other_logits: Tensor, setting: "Setting") -> Row:
    """Return the measures of thresholded heads."""
    steps = steps_at(logits, 0.0)
    commonest = steps.flatten().bincount().max() / steps.numel()
    at_budget = steps_at(logits, calibrated(other_logits, BUDGET[setting.per]))
    h = logits.sigmoid().flatten(1)
    return {
        "cost": f"{cost_of(test, steps, price_of(setting)):.4f}",
        "steps": f"{steps.float().mean():.2f}",
        "strings": f"{strings_right(test, steps):.3f}",
        "alive": f"{1 - commonest:.3f}",
        "rank": f"{rank_correlation(steps, test.distance):.2f}",
        "max_h": f"{h[:-1].max():.3f}",
        "expected": f"{tp.expected_steps(h).mean():.2f}",
        "steps_at_budget": f"{at_budget.float().mean():.2f}",
        "strings_at_budget": f"{strings_right(test, at_budget):.3f}",
        "rank_at_budget": f"{rank_correlation(at_budget, test.distance):.2f}",
    }


def trained(net: Loop, setting: "Setting", pool: Sequence[Exits]) -> Head:
    """Train a head on the exits of a frozen network; with an empty pool, the network, too, on new strings."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(setting.seed + 3000)
    head = Head(net.width if setting.per == "position" else 3 * net.width, setting.bias)
    loss_of, price = OBJECTIVES[setting.objective](), price_of(setting)
    kind = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[setting.optimizer]
    groups: list[dict[str, Any]] = [{"params": list(head.parameters())}]
    if not pool:
        groups.append({"params": list(net.requires_grad_(True).parameters()), "lr": 1e-3})
    slow = setting.part == "slow"
    optimizer = kind(groups, lr=RATES[setting.optimizer] / (6 if slow else 1))
    for number in range(4 * UPDATES if slow else UPDATES):
        exits = pool[number % len(pool)] if pool else exits_of(net, setting.per, BATCH // 4, generator)
        tau = price * min(1.0, 2 * number / UPDATES) if setting.part == "warm-up" else price
        if pool or setting.objective != "advantage":
            loss = loss_of(net, exits, head(exits.features), tau)
        else:
            loss = exits.losses.mean() + loss_of(net, exits, head(exits.features.detach()), tau)
        optimizer.zero_grad()
        loss.backward()
        if setting.part == "clipped":
            nn.utils.clip_grad_norm_(head.parameters(), 0.1)
        optimizer.step()
    return head.requires_grad_(False)


class Setting(NamedTuple):
    """What a row is about."""

    part: str
    per: str
    exits: str
    seed: int
    objective: str
    bias: float = 0.0
    optimizer: str = ""


def price_of(setting: Setting) -> float:
    """Return τ."""
    return TAU[setting.per] * PRICES.get(setting.part, 1)


def settings() -> Iterator[Setting]:
    """Yield what is measured, the most telling first."""
    for seed, exits, per in itertools.product(SEEDS, ("every", "last"), TAU):
        for baseline in (*(f"fixed {k}" for k in (4, 8, 11, 12, 16)), "confidence"):
            yield Setting("baseline", per, exits, seed, baseline)
        for optimizer, bias, name in itertools.product(RATES, BIASES, OBJECTIVES):
            if exits == "every" or (optimizer, bias) == ("adam", -3.0):
                yield Setting("heads", per, exits, seed, name, bias, optimizer)
        for part, name in itertools.product(
            ("warm-up", "clipped", "slow", "joint"), ("relaxed", "exact", "advantage")
        ):
            if exits == "every":
                yield Setting(part, per, exits, seed, name, -3.0, "adam")
        for part, name, optimizer in itertools.product(PRICES, ("relaxed", "exact", "advantage"), RATES):
            if (exits, per) == ("every", "example"):
                yield Setting(part, per, exits, seed, name, -3.0, optimizer)


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


def baseline_row(net: Loop, setting: Setting, test: Exits, other: Exits) -> Row:
    """Return the measures of a fixed depth, or of a calibrated confidence exit."""
    if setting.objective == "confidence":
        margins = [confidence(net, exits) for exits in (test, other)]
        row = evaluated(margins[0], test, margins[1], setting)
        return {name: row[name] for name in AT_BUDGET}
    steps = torch.full(test.distance.shape, int(setting.objective.split()[1]))
    cost = f"{cost_of(test, steps, price_of(setting)):.4f}"
    return {"cost": cost, "steps": str(steps.max().item()), "strings": f"{strings_right(test, steps):.3f}"}


def confidence(net: Loop, exits: Exits) -> Tensor:
    """Return the logit of the larger probability, the smallest of an example."""
    margins = torch.stack([net.readout(u).diff(dim=1).abs()[:, 0] for u in exits.states])
    return margins.amin(2, True) if exits.losses.size(2) == 1 else margins


def main() -> None:
    parser = argparse.ArgumentParser(description="objectives for halting heads")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".csv"))
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "torchpact-objectives")
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = [*read_rows(arguments.out)]
    done = {tuple(row[name] for name in Setting._fields) for row in rows}
    present, net, pool, held_out = None, None, [], []
    for setting in settings():
        if tuple(str(value) for value in setting) in done:
            continue
        if present != (setting.exits, setting.seed, setting.per):
            present, net = (setting.exits, setting.seed, setting.per), backbone(setting, arguments.work)
            generator = torch.Generator().manual_seed(setting.seed + 2000)
            with torch.no_grad():
                pool = [exits_of(net, setting.per, BATCH, generator) for _ in range(POOL)]
                held_out = [exits_of(net, setting.per, HELD_OUT, generator) for _ in range(2)]
        assert net is not None
        if setting.part == "baseline":
            row = baseline_row(net, setting, *held_out)
        elif setting.part == "joint":
            along = copy.deepcopy(net)
            head = trained(along, setting, ())
            generator = torch.Generator().manual_seed(setting.seed + 4000)
            with torch.no_grad():
                test, other = (exits_of(along, setting.per, HELD_OUT, generator) for _ in range(2))
            row = evaluated(head(test.features), test, head(other.features), setting)
        else:
            head, (test, other) = trained(net, setting, pool), held_out
            row = evaluated(head(test.features), test, head(other.features), setting)
        named = {name: str(value) for name, value in setting._asdict().items()}
        rows.append(named | dict.fromkeys(MEASURES, "") | row)
        write_csv(arguments.out, rows)
        print(*rows[-1].values(), sep=", ", flush=True)


if __name__ == "__main__":
    main()
