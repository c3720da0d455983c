"""Choices on validation data, then the test: criteria on the exits of MiniLM beside its students."""

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from torchpact_recipes.halting.exit_record import ExitRecord
from torchpact_recipes.halting.judging import paired
from torchpact_recipes.halting.review_criteria import (
    Trained,
    Tried,
    chosen_bounds,
    cost_table,
    crossed_accuracy,
    figures,
    oracle,
    outcome,
    random_accuracy,
    tried,
)
from torchpact_recipes.halting.tables import Row, difference, means, write_csv

BUDGETS = (0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.6, 0.7, 0.8, 0.9)
BUDGET_LAYERS = 3
"""The budget is what a student of so many layers costs: a half."""


def write(work: Trained, seeds: Sequence[int], others: Sequence[str], out: Path, test: bool) -> None:
    """Choose criteria and thresholds on validation data; write tables, those of the test data if asked to."""
    table = cost_table(work)
    parts = ["validation", *(["test"] if test else [])]
    all_tried = [tried(work, seed, parts, table) for seed in seeds]
    records = [{part: work.exits(seed, part) for part in parts} for seed in seeds]
    budget = _share(table, work, seeds[0], BUDGET_LAYERS)
    choice = _choices(all_tried, records, budget)
    rows = _rows(work, seeds, others, parts, all_tried, records, table, budget, choice)
    out.mkdir(parents=True, exist_ok=True)
    write_csv(out / "reviews.csv", rows)
    write_csv(out / "reviews_means.csv", _means(rows, parts[-1]))
    validated = f"reviews_validation_{work.settings.updates}.csv"
    write_csv(out / validated, _means(rows, "validation"))
    write_csv(out / "reviews_curves.csv", _curves(all_tried, records, parts, seeds, choice))
    if test:
        found = _differences(work, seeds, others, all_tried, records, budget, choice)
        write_csv(out / "reviews_differences.csv", found)
    for row in rows:
        print(row)


def _means(rows: Sequence[Row], part: str) -> list[Row]:
    """Return the means over seeds on a part of the data, a row for each network."""
    own = [each for each in rows if each["part"] == part]
    found: list[Row] = []
    for name in dict.fromkeys(each["network"] for each in own):
        group = [each for each in own if each["network"] == name]
        columns = ["accuracy", "cost", "layers", "elsewhere", "random"]
        columns = [key for key in columns if key in group[0] and not math.isnan(group[0][key])]
        (values,) = means(group, ["network"], columns).values()
        row: Row = {"network": name, "part": part, "seeds": len(group)}
        found.append(row | {key: round(value, 4) for key, value in zip(columns, values, strict=True)})
    return found


def _share(table: dict[str, Tensor], work: Trained, seed: int, layers: int) -> float:
    lengths = work.exits(seed, "validation").lengths
    plain = table["plain"][:, lengths].mean(1)
    return float(plain[layers - 1] / plain[-1])


Choice = dict[str, tuple[str, str]]


def _choices(
    all_tried: Sequence[dict[str, Tried]], records: Sequence[dict[str, ExitRecord]], budget: float
) -> Choice:
    """Return the criterion and thresholds of the best crossed accuracy: of each family, and of all."""
    scores: dict[tuple[str, str], float] = {}
    for found, record in zip(all_tried, records, strict=True):
        for name, one in found.items():
            for kind, value in crossed_accuracy(one, record["validation"], "validation", budget).items():
                scores[name, kind] = scores.get((name, kind), 0.0) + value / len(records)
    best: Choice = {}
    for name, kind in scores:
        for family in (name.split(",")[0], "best"):
            if family not in best or scores[name, kind] > scores[best[family]]:
                best[family] = name, kind
    return best


def _rows(
    work: Trained,
    seeds: Sequence[int],
    others: Sequence[str],
    parts: Sequence[str],
    all_tried: Sequence[dict[str, Tried]],
    records: Sequence[dict[str, ExitRecord]],
    table: dict[str, Tensor],
    budget: float,
    choice: Choice,
) -> list[Row]:
    rows: list[Row] = []
    for seed, found, record in zip(seeds, all_tried, records, strict=True):
        for part in parts:
            exits = record[part]
            plain = table["plain"][:, exits.lengths].mean(1)
            common = {"part": part, "seed": seed}
            for arm in others:
                right = _right(work.record(arm, seed, part))
                layers = work.layers if arm == "whole" else int(arm)
                cost = float(plain[layers - 1] / plain[-1])
                name = "whole" if arm == "whole" else f"student of {arm} layers"
                rows.append({"network": name, **common, **figures(float(right.mean()), cost, layers)})
            for step in range(work.layers):
                right_there = float(exits.right[step].mean())
                name = f"all leave after layer {step + 1}"
                cost = float(plain[step] / plain[-1])
                rows.append({"network": name, **common, **figures(right_there, cost, step + 1)})
            for family, (name, kind) in choice.items():
                one = found[name]
                bounds = chosen_bounds(one, record["validation"], "validation", budget).get(kind)
                if bounds is None:
                    continue
                came = outcome(one, exits, part, bounds)
                commonest = float(torch.bincount(came.taken).max()) / len(came.taken)
                extra = {
                    "criterion": name,
                    "thresholds": kind,
                    "elsewhere": round(1 - commonest, 4),
                    "random": round(random_accuracy(exits, came.taken), 4),
                }
                rows.append({"network": f"exits: {family}", **common, **came.figures, **extra})
            ideal = oracle(exits, found["confidence"].costs[part], budget)
            rows.append({"network": "exits: oracle", **common, **figures(ideal, budget, float("nan"))})
    return rows


def _right(record: dict[str, Tensor]) -> Tensor:
    return (record["classes"].argmax(-1) == record["labels"]).double()


def _curves(
    all_tried: Sequence[dict[str, Tried]],
    records: Sequence[dict[str, ExitRecord]],
    parts: Sequence[str],
    seeds: Sequence[int],
    choice: Choice,
) -> list[Row]:
    rows = []
    for seed, found, record in zip(seeds, all_tried, records, strict=True):
        for family, (name, kind) in choice.items():
            if family == "best":
                continue
            for budget in BUDGETS:
                bounds = chosen_bounds(found[name], record["validation"], "validation", budget).get(kind)
                if bounds is None:
                    continue
                for part in parts:
                    came = outcome(found[name], record[part], part, bounds)
                    asked = {"criterion": family, "part": part, "seed": seed, "budget": budget}
                    rows.append({**asked, **came.figures})
    return rows


def _differences(
    work: Trained,
    seeds: Sequence[int],
    others: Sequence[str],
    all_tried: Sequence[dict[str, Tried]],
    records: Sequence[dict[str, ExitRecord]],
    budget: float,
    choice: Choice,
) -> list[Row]:
    """Return paired differences of the mean over seeds, on the test data."""

    def of(family: str) -> Tensor:
        name, kind = choice[family]
        right = []
        for found, record in zip(all_tried, records, strict=True):
            bounds = chosen_bounds(found[name], record["validation"], "validation", budget)[kind]
            right.append(outcome(found[name], record["test"], "test", bounds).right)
        return torch.stack(right)

    rows = []
    for family in choice:
        for arm in others:
            name = "whole" if arm == "whole" else f"student of {arm} layers"
            theirs = torch.stack([_right(work.record(arm, seed, "test")) for seed in seeds])
            rows.append(difference(f"exits: {family}", name, paired(of(family), theirs), 4))
        if family != "confidence":
            rows.append(
                difference(f"exits: {family}", "exits: confidence", paired(of(family), of("confidence")), 4)
            )
    return rows
