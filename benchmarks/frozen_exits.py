"""The zoo's plain ResNet-32, frozen, leaves its third block early per image: its cost and accuracy.

    python benchmarks/frozen_exits.py

Each of the four early exits of the last block gets a read-out of its own: batch norm with the statistics of
that exit, ReLU, means over a 2×2 grid, one hidden layer. Read-outs are trained on 16,000 training images with
the labels and the outputs of the network, ``UPDATES`` each; nothing else of the network changes. Criteria:

    confidence    the largest probability of the read-out
    advantage     a learned head that sees the read-out's sorted log-probabilities and the grid, trained by
                  tp.advantage_loss on 5,000 training images that read-outs did not see; its price is moved
                  to a budget of 0.8 by tp.PriceController

Thresholds are the best within each budget on 5,000 other training images, ``distorted`` to be as hard as new
ones (see frozen_data.py), or ``plain``; ``held_out`` and ``held_out_accuracy`` are what they come to there,
which is what the criterion is chosen by. Everything is frozen but read-outs and heads, so that each image is
run once, and all exits are known. Columns, on the 10,000 test images:

    cost, accuracy      thresholded; the share of the network's FLOPs, heads and read-outs included
    chance, vs_chance   random halting with the same histogram, in expectation; accuracy less that, and its
                        interval (bootstrap over images, 95 %)
    full, vs_full       the network itself
    fewer, vs_fewer     the best network with fewer units that costs at most as much: units left out, read out
                        as the exits are and trained as they are, chosen on the validation images
"""

import argparse
import itertools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from bootstrap import interval
from frozen_data import (
    HEADS,
    READOUTS,
    VALIDATION,
    Split,
    as_inputs,
    card_accuracy,
    matched_strength,
    plain_network,
    split,
    test_split,
    train_images,
)
from safetensors.torch import load_file, save_file
from table import read_rows, write_csv
from torch import Tensor, nn
from torch.nn import functional as F

import torchpact as tp
from torchpact.budget.search import Record, best_bounds
from torchpact_recipes.data import Images

UPDATES, BATCH, HEAD_UPDATES = 1875, 128, 800
BUDGETS = (0.74, 0.76, 0.78, 0.8, 0.82, 0.84, 0.86, 0.88, 0.9, 0.92, 0.94, 0.96)
FEATURES = 10 + 256
SPLITS = ("readouts", "heads", "distorted", "plain", "test")
SEEDS = (0, 1, 2)

Units = tuple[int, int, int]
Row = dict[str, str]
Cached = dict[str, Tensor]
WHOLE: Units = (5, 5, 5)
TRUNKS: tuple[Units, ...] = (WHOLE, (4, 4, 5), (4, 3, 5))
"""Units of the three blocks, of which those of the last may be left out, too."""


class Readout(nn.Module):
    """Class logits of the means of a map over a 2×2 grid."""

    def __init__(self, channels: int = 64, hidden: int = 128) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4 * channels, affine=False)
        self.layers = nn.Sequential(
            nn.Linear(4 * channels, hidden), nn.ReLU(), nn.Dropout(0.3), nn.Linear(hidden, 10)
        )

    def forward(self, grid: Tensor) -> Tensor:
        """Return (batch, 10) of (batch, 4 · channels)."""
        logits: Tensor = self.layers(self.norm(grid))
        return logits


class ExitHead(nn.Module):
    """The halting logit of an exit: a hidden layer on log-probabilities, sorted, and on the grid."""

    def __init__(self, features: int = FEATURES, hidden: int = 32, bias: float = -3.0) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(features, affine=False)
        self.first, self.last = nn.Linear(features, hidden), nn.Linear(hidden, 1)
        nn.init.zeros_(self.last.weight)
        nn.init.constant_(self.last.bias, bias)

    def forward(self, features: Tensor) -> Tensor:
        """Return (batch,)."""
        logits: Tensor = self.last(F.relu(self.first(self.norm(features)))).squeeze(1)
        return logits


class Trunk:
    """The frozen network with some of its units: the grids of the last block's exits, and its outputs."""

    def __init__(self, units: Units) -> None:
        self.net = plain_network()
        blocks = [next(block.children()) for block in self.net.blocks]
        self.units = [u for block, n in zip(blocks, units, strict=True) for u in [*block.children()][:n]]
        self.exits = units[2]
        self.norms = [nn.BatchNorm2d(64, momentum=None, eps=self.net.norm.eps) for _ in range(units[2])]
        for norm in self.norms:
            norm.load_state_dict(self.net.norm.state_dict() | {"num_batches_tracked": torch.tensor(0)})
            norm.reset_running_stats()

    @torch.no_grad()
    def states(self, inputs: Tensor) -> list[Tensor]:
        """Return the maps after each unit of the last block."""
        u, found = self.net.stem(inputs), []
        for unit in self.units:
            u = unit(u)
            found.append(u)
        return found[-self.exits :]

    def fit_norms(self, inputs: Tensor) -> None:
        """Give the norm of each exit the statistics of its maps."""
        for batch in inputs.split(200):
            for norm, u in zip(self.norms, self.states(batch), strict=True):
                norm.train()(u)
        for norm in self.norms:
            norm.eval()

    @torch.no_grad()
    def run(self, given: Split) -> Cached:
        """Return the grids of all exits, (n, exits, 256), and the class logits of the whole, (n, 10)."""
        grids, logits = [], []
        for batch in given.inputs.split(200):
            states = self.states(batch)
            maps = [F.relu(norm(u)) for norm, u in zip(self.norms, states, strict=True)]
            grids.append(torch.stack([F.adaptive_avg_pool2d(x, 2).flatten(1) for x in maps], 1).half())
            logits.append(self.net.classifier(F.relu(self.net.norm(states[-1])).mean((2, 3))))
        return {"grids": torch.cat(grids), "logits": torch.cat(logits), "labels": given.labels}


class Exits(NamedTuple):
    """What all exits give of some images; the last exit is the network itself."""

    logits: Tensor
    """(L, n, 10)."""
    features: Tensor
    """What heads see, (L − 1, n, features)."""
    labels: Tensor

    @property
    def right(self) -> Tensor:
        """(L, n)."""
        return self.logits.argmax(2) == self.labels


def prepared(folder: Path, units: Units) -> dict[str, Cached]:
    """Return what a trunk gives on all splits, from files if there are some."""
    paths = {name: folder / f"{''.join(map(str, units))}-{name}.safetensors" for name in SPLITS}
    if not all(path.exists() for path in paths.values()):
        images, trunk = train_images(), Trunk(units)
        strength = _strength(folder, images)
        trunk.fit_norms(split(images, range(4000), None, 0).inputs)
        parts: dict[str, Callable[[], Split]] = {
            "readouts": lambda: split(images, READOUTS, strength, 1),
            "heads": lambda: split(images, HEADS, strength, 2),
            "distorted": lambda: split(images, VALIDATION, strength, 3),
            "plain": lambda: split(images, VALIDATION, None, 0),
            "test": test_split,
        }
        for name in [name for name in SPLITS if not paths[name].exists()]:
            save_file(trunk.run(parts[name]()), paths[name].with_suffix(".tmp"))
            paths[name].with_suffix(".tmp").replace(paths[name])
            print(units, name, flush=True)
    return {name: load_file(path) for name, path in paths.items()}


def _strength(folder: Path, images: Images) -> float:
    """Return how much images are distorted, from a file if there is one."""
    path = folder / "strength.txt"
    if not path.exists():
        chosen, trunk = slice(VALIDATION.start, VALIDATION.start + 2000), Trunk(WHOLE)
        held = Images(images.images[chosen], images.labels[chosen])

        def correct(given: Tensor) -> float:
            found = trunk.run(Split(as_inputs(given), held.labels))
            return float((found["logits"].argmax(1) == held.labels).float().mean())

        path.write_text(str(matched_strength(correct, held, card_accuracy())))
    return float(path.read_text())


def costs_of(units: Units) -> Tensor:
    """Return what the exits of a trunk cost, read-outs and heads included, as a share of the network."""
    trunk, image = Trunk(units), torch.randn(1, 3, 32, 32)
    whole = flops_of(trunk.net, image)
    total = flops_of(trunk.net.stem, image)
    u, found = trunk.net.stem(image), []
    for unit in trunk.units:
        total += flops_of(unit, u)
        u = unit(u)
        found.append(total)
    asked = flops_of(Readout(), torch.randn(1, 256)) + flops_of(ExitHead(), torch.randn(1, FEATURES))
    last = flops_of(trunk.net.classifier, torch.randn(1, 64)) if units == WHOLE else asked
    exits = found[-units[2] :]
    early = [(each + asked * (i + 1)) / whole for i, each in enumerate(exits[:-1])]
    return torch.tensor([*early, (exits[-1] + asked * len(early) + last) / whole], dtype=torch.double)


def flops_of(module: nn.Module, inputs: Tensor) -> float:
    """Return the FLOPs of a module on one example."""
    return float(tp.count_flops(module.eval(), inputs).mean)


def with_readouts(units: Units, cached: dict[str, Cached], teacher: Tensor, seed: int) -> dict[str, Exits]:
    """Train the read-outs of a trunk's exits; the last one, too, where units are left out."""
    torch.manual_seed(seed)
    found: dict[str, list[Tensor]] = {name: [] for name in cached}
    for index in range(units[2] - (units == WHOLE)):
        train, readout = cached["readouts"], Readout()
        grids, labels = train["grids"][:, index].float(), train["labels"]
        optimizer = torch.optim.AdamW(readout.parameters(), weight_decay=0.01)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=UPDATES)
        for _ in range(UPDATES):
            chosen = torch.randint(len(labels), (BATCH,))
            logits = readout(grids[chosen])
            loss = F.cross_entropy(logits, labels[chosen]) + F.cross_entropy(logits, teacher[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        with torch.no_grad():
            for name, each in cached.items():
                found[name].append(readout.eval()(each["grids"][:, index].float()))
    if units == WHOLE:
        for name, each in cached.items():
            found[name].append(each["logits"])
    exits = {}
    for name, own in found.items():
        logits = torch.stack(own)
        grids = cached[name]["grids"][:, : len(logits) - 1].transpose(0, 1).float()
        features = torch.cat([logits[:-1].log_softmax(2).sort(2).values, grids], 2)
        exits[name] = Exits(logits, features, cached[name]["labels"])
    return exits


def with_heads(exits: dict[str, Exits], costs: Tensor, seed: int) -> dict[str, Tensor]:
    """Return the halting logits of heads trained by advantage, (L − 1, n), by split."""
    torch.manual_seed(seed + 100)
    train, steps = exits["heads"], len(costs)
    heads = nn.ModuleList(ExitHead() for _ in range(steps - 1))
    optimizer = torch.optim.AdamW(heads.parameters(), lr=2e-3, weight_decay=0.01)
    price = tp.PriceController(0.01)
    wrong = (~train.right).float()
    for _ in range(HEAD_UPDATES):
        chosen = torch.randint(len(train.labels), (BATCH,))
        logits = torch.stack([head(x[chosen]) for head, x in zip(heads, train.features, strict=True)])
        logits = torch.cat([logits, torch.zeros_like(logits[:1])])
        loss = tp.advantage_loss(wrong[:, chosen].unsqueeze(2), logits.unsqueeze(2), price.tau)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        taken = Record(logits[:-1].detach(), costs[:, None].expand(-1, BATCH), wrong[:, chosen].double())
        price.move(taken.outcome((0.0,) * (steps - 1))[0], 0.8, float(costs[0]), float(costs[-1]))
    heads.eval()
    with torch.no_grad():
        return {
            name: torch.stack([head(x) for head, x in zip(heads, each.features, strict=True)])
            for name, each in exits.items()
        }


def measured(seed: int, cached: dict[Units, dict[str, Cached]], folder: Path) -> list[Row]:
    """Return the rows of a seed: what is chosen, and what it gives on the test set."""
    teacher = cached[WHOLE]["readouts"]["logits"].softmax(1)
    exits = {units: with_readouts(units, each, teacher, seed) for units, each in cached.items()}
    costs = {units: costs_of(units) for units in cached}
    whole = exits[WHOLE]
    fewer = best_fewer(0.8, exits, costs, "distorted")
    assert fewer is not None
    save_file({"right": fewer}, _fewer_file(folder, seed))
    criteria = {
        "confidence": {
            name: torch.special.logit(each.logits[:-1].softmax(2).amax(2), 1e-7)
            for name, each in whole.items()
        },
        "advantage": with_heads(whole, costs[WHOLE], seed),
    }
    rows, test, full = [], whole["test"], whole["test"].right[-1].float()
    for validation, (name, logits), budget in itertools.product(
        ("distorted", "plain"), criteria.items(), BUDGETS
    ):
        held = whole[validation]
        record = Record(logits[validation], _expanded(costs[WHOLE], held), held.right.double())
        bounds = best_bounds(record, budget)
        assert bounds is not None
        exit_of = Record(logits["test"], _expanded(costs[WHOLE], test), test.right.double()).exits(bounds)
        right = test.right.gather(0, exit_of[None])[0].float()
        histogram = torch.bincount(exit_of, minlength=len(costs[WHOLE])) / len(exit_of)
        chance = histogram @ test.right.float()
        row = {
            "criterion": name,
            "validation": validation,
            "seed": str(seed),
            "budget": str(budget),
            "held_out": f"{record.outcome(bounds)[0]:.4f}",
            "held_out_accuracy": f"{100 * record.outcome(bounds)[1]:.2f}",
            "cost": f"{float(histogram.double() @ costs[WHOLE]):.4f}",
            "accuracy": f"{100 * right.mean():.2f}",
            "depths": " ".join(f"{share:.3f}" for share in histogram.tolist()),
        }
        smaller = best_fewer(budget, exits, costs, validation)
        for key, other in (("full", full), ("chance", chance), ("fewer", smaller)):
            if other is None:
                row |= {key: "", f"vs_{key}": "", f"{key}_low": "", f"{key}_high": ""}
                continue
            mean, low, high = interval(100 * (right - other))
            row |= {key: f"{100 * other.mean():.2f}", f"vs_{key}": f"{mean:.2f}"}
            row |= {f"{key}_low": f"{low:.2f}", f"{key}_high": f"{high:.2f}"}
        rows.append(row)
        print(*row.values(), sep=", ", flush=True)
    return rows


def best_fewer(
    budget: float, exits: dict[Units, dict[str, Exits]], costs: dict[Units, Tensor], validation: str
) -> Tensor | None:
    """Return what the best network with fewer units has right of the test set, within a budget."""
    options = [
        (
            float(exits[units][validation].right[index].float().mean()),
            exits[units]["test"].right[index].float(),
        )
        for units in exits
        for index in range(units[2])
        if float(costs[units][index]) <= budget and (units, index + 1) != (WHOLE, WHOLE[2])
    ]
    return max(options, key=lambda each: each[0])[1] if options else None


def _fewer_file(folder: Path, seed: int) -> Path:
    return folder / f"fewer-{seed}.safetensors"


def right_of_fewer(folder: Path, seed: int) -> Tensor:
    """Return what the best network with fewer units, of a budget of 0.8, has right of the test set."""
    return load_file(_fewer_file(folder, seed))["right"]


def _expanded(costs: Tensor, exits: Exits) -> Tensor:
    return costs[:, None].expand(-1, len(exits.labels))


def main() -> None:
    parser = argparse.ArgumentParser(description="a frozen ResNet-32 that leaves early, per image")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".csv"))
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "torchpact-frozen")
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    rows = read_rows(arguments.out)
    cached = {units: prepared(arguments.work, units) for units in TRUNKS}
    for seed in SEEDS:
        if str(seed) not in {row["seed"] for row in rows}:
            rows += measured(seed, cached, arguments.work)
            write_csv(arguments.out, rows)


if __name__ == "__main__":
    main()
