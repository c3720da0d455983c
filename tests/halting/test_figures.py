"""Figures of the comparisons, from made-up results."""

import json
import sys

import pytest
import torch
from torch import nn

import torchpact as tp
from torchpact_recipes.halting import figures
from torchpact_recipes.halting.tables import write_csv

pytest.importorskip("matplotlib")


def made_up(results):
    rows, curves = [], []
    for part in ("validation", "test"):
        for seed in (0, 1):
            common = {"part": part, "seed": seed}
            rows.append({"network": "whole", **common, "cost": 1.0, "accuracy": 0.8 + 0.02 * seed})
            rows.append({"network": "student of 3 layers", **common, "cost": 0.5, "accuracy": 0.7})
            rows += [
                {"network": f"all leave after layer {i}", **common, "cost": i / 2, "accuracy": 0.6}
                for i in (1, 2)
            ]
            curves.append(
                {
                    "criterion": "confidence",
                    **common,
                    "budget": 0.5,
                    "cost": 0.4 + 0.1 * seed,
                    "accuracy": 0.75,
                }
            )
    write_csv(results / "reviews.csv", rows)
    write_csv(results / "reviews_curves.csv", curves)
    points = {
        "full": (0.0, 6),
        "heads": (0.1, 4.5),
        "heads, 4 layers": (0.2, 4),
        "all leave after layer 5": (0.2, 5),
        "oracle": (-0.1, 4.5),
        "confidence": (0.2, 4.5),
        "student of 4 layers": (0.3, 4),
    }
    stories = [
        {"network": name, "seed": 0, "excess": excess, "layers": layers}
        for name, (excess, layers) in points.items()
    ]
    write_csv(results / "stories.csv", stories)
    torch.manual_seed(0)
    block = tp.AdaptiveBlock(
        [nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)], [nn.Linear(8, 1), nn.Linear(8, 1)]
    )
    batches = [torch.randn(20, 8) for _ in range(2)]
    found = tp.diagnose(block, batches, lambda output, x: output[0].square().mean(1))
    (results / "diagnosis_smollm2.json").write_text(found.to_json())


def test_what_is_drawn_are_means_over_seeds_of_the_test_data(tmp_path, monkeypatch):
    results, docs = tmp_path / "results", tmp_path / "docs"
    results.mkdir()
    docs.mkdir()
    made_up(results)
    monkeypatch.setattr(sys, "argv", ["figures", "--results", str(results), "--docs", str(docs)])
    figures.main()
    shown = json.loads((results / "halting-criteria.json").read_text())
    assert shown["0"]["whole"] == [100, pytest.approx(81)]
    assert shown["0"]["confidence"] == [[pytest.approx(45), pytest.approx(75)]]
    assert shown["1"]["heads"] == [4.5, 0.1]
    assert "verdict" in json.loads((results / "halting-diagnose.json").read_text())["0"]
    assert (docs / "halting-criteria.png").read_bytes() == (results / "halting-criteria.png").read_bytes()


def test_without_results_nothing_is_drawn(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["figures", "--results", str(tmp_path), "--docs", str(tmp_path)])
    figures.main()
    assert not [*tmp_path.iterdir()]
