"""Criteria on the exits of MiniLM, cross-fitted on training reviews that the exits were not trained on.

Neither validation nor test data are looked at: heads and thresholds are fitted on two thirds, judged on one.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from torchpact_recipes.halting.exit_record import (
    ExitRecord,
    bounds_within,
    exits_taken,
    halting_logits,
    train_heads,
)
from torchpact_recipes.halting.review_criteria import LEARNED, TAUS, Trained, cost_table, heads_for
from torchpact_recipes.halting.tables import Row, write_csv

FOLDS = 3
BUDGETS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8)


def some(record: ExitRecord, index: Tensor) -> ExitRecord:
    """Return the record of some examples."""
    states, classes, labels, lengths = record
    return ExitRecord(states[:, index], classes[:, index], labels[index], lengths[index])


def crossed(work: Trained, seed: int, table: dict[str, Tensor]) -> list[Row]:
    """Return accuracy and cost of each criterion at each budget, on examples that it was not fitted on.

    Args:
        work: The networks and records.
        seed: Of the training.
        table: FLOPs by criterion, exit and length.

    """
    record, net = work.exits(seed, "heads"), work.network(work.exits_arm, seed)
    exits, count, width = record.states.shape
    whole = float(table["plain"][-1, record.lengths].mean())
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    folds = [order[fold::FOLDS] for fold in range(FOLDS)]
    sums: dict[tuple[str, str, float], list[float]] = {}
    for fold, judged in enumerate(folds):
        fitted = torch.cat([each for other, each in enumerate(folds) if other != fold])
        own, other = some(record, fitted), some(record, judged)
        for name in heads_for(net.read, width, exits):
            for tau in TAUS if name in LEARNED else (0.0,):
                torch.manual_seed(seed)
                heads = heads_for(net.read, width, exits)[name]
                if name in LEARNED:
                    train_heads(heads, own, tau)
                with torch.no_grad():
                    seen, asked = halting_logits(heads, own), halting_logits(heads, other)
                label = f"{name}, τ = {tau:g}" if name in LEARNED else name
                costs, costs_there = (table[name][:, each.lengths] / whole for each in (own, other))
                for budget in BUDGETS:
                    for kind, bounds in bounds_within(seen, costs, own.right, budget).items():
                        taken = exits_taken(asked, bounds).unsqueeze(0)
                        total = sums.setdefault((label, kind, budget), [0.0, 0.0, 0.0, 0.0])
                        total[0] += float(other.right.gather(0, taken).sum())
                        total[1] += float(costs_there.gather(0, taken).sum())
                        total[2] += float(taken.sum()) + len(judged)
                        shares = torch.bincount(taken[0], minlength=exits).double() / len(judged)
                        total[3] += float(shares @ other.right.mean(1)) * len(judged)
    rows: list[Row] = []
    for step in range(exits):
        cost = float(table["plain"][step, record.lengths].mean()) / whole
        right = float(record.right[step].mean())
        rows.append(_row(seed, f"all leave after layer {step + 1}", "", "", right, cost, step + 1.0, right))
    for (name, kind, budget), total in sums.items():
        right, cost, layers, random = (each / count for each in total)
        rows.append(_row(seed, name, kind, budget, right, cost, layers, random))
    return rows


def _row(
    seed: int,
    name: str,
    kind: str,
    budget: float | str,
    right: float,
    cost: float,
    layers: float,
    random: float,
) -> Row:
    return {
        "criterion": name,
        "thresholds": kind,
        "seed": seed,
        "budget": budget,
        "accuracy": round(right, 4),
        "cost": round(cost, 4),
        "layers": round(layers, 3),
        "random": round(random, 4),
    }


def write_crossed(work: Trained, seeds: Sequence[int], out: Path) -> None:
    """Write ``reviews_crossed.csv``.

    Args:
        work: The networks and records.
        seeds: Of the trainings.
        out: The folder.

    """
    table = cost_table(work)
    out.mkdir(parents=True, exist_ok=True)
    write_csv(out / "reviews_crossed.csv", [row for seed in seeds for row in crossed(work, seed, table)])
