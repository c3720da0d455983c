"""Made-up runs, and what a claim is judged to be by them."""

import json

from tests.experiments.synthetic import evaluation
from tests.experiments.synthetic import write as write_events
from torchpact_recipes.experiments import SCALES, fig5
from torchpact_recipes.experiments.claims import Finding
from torchpact_recipes.experiments.evidence import Evidence
from torchpact_recipes.experiments.judgements import CLAIMS

SCALE, SEEDS = SCALES["fast"], [0, 1]


def judge(archive, text):
    """What is found of the one claim that has ``text`` in it."""
    (claim,) = [claim for claim in CLAIMS if text in claim.text]
    return Finding(claim.text, claim.where, *claim.judge(Evidence(archive, SCALE, SEEDS)))


def write(archive, run, modes, variance=None):
    """A run with one validation: accuracy and FLOPs by mode."""
    event = {"modes": {mode: evaluation(100 * a, flops / 1e6) for mode, (a, flops) in modes.items()}}
    if variance is not None:
        event["gradient_variance"] = variance
    write_events(archive, run, {1000: event})


def all_modes(end):
    """The same accuracy and FLOPs in whatever mode."""
    return dict.fromkeys(("relaxed", "discrete", "thresholded", "act"), end)


def write_fig5(archive, end, depths=(32, 110)):
    """Runs of fig. 5 that end with what ``end`` says of each: None if it has no such run."""
    for depth in depths:
        for run in fig5.runs(SCALE, SEEDS, depth):
            if run.config.method != "plain" and (modes := end(run)) is not None:
                write(archive, run, modes)


def write_fig6(archive, sact, psact):
    """What 400 images show by their own maps, if it is 45 % by those of others."""
    common = {"judge": "resnet32-plain", "images": 400, "kept": 0.5, "others": 0.45, "whole": 0.9}
    networks = [
        {"run": name, "shows": common | {"own": own}} for name, own in (("sact", sact), ("psact", psact))
    ]
    path = archive.results / "figures" / "fig6.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"networks": networks}))
