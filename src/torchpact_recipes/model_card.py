"""The card of a pretrained network, as Markdown; its head is what the Hugging Face hub reads."""

import textwrap
from dataclasses import replace
from typing import Any

import torch

from torchpact import models
from torchpact.flops import max_flops
from torchpact.models import ResNetConfig, build
from torchpact_recipes.training import TrainConfig
from torchpact_recipes.training.titles import title
from torchpact_recipes.zoo import FOLDER, Entry

_HEAD = """\
---
license: apache-2.0
library_name: torchpact
pipeline_tag: image-classification
datasets:
- uoft-cs/cifar10
---
"""

_DATA = """\
CIFAR-10 (A. Krizhevsky: *Learning Multiple Layers of Features from Tiny Images*, 2009): trained on
{trained}, measured on {images:,} test images, which had no part in training. Images are
standardised one by one (`torchpact_recipes.data.standardize`)."""

_ALL = 50_000
"""Training images of CIFAR-10."""

_LIMITS = """\
Made to study adaptive computation, and to start from. It knows CIFAR-10's ten classes and 32×32 pixels,
always names one of the classes, and was not examined for bias."""

_LICENCE = """\
Weights: Apache-2.0, as torchpact. CIFAR-10 comes without a licence; its author asks to cite the report
above."""


def markdown(entry: Entry) -> str:
    """Return the whole card."""
    config = TrainConfig.from_dict(entry.config)
    images = next(iter(entry.card["results"].values()))["images"]
    paragraphs = [
        f"**Data.** {_DATA.format(trained=_trained_on(entry.card), images=images)}",
        f"**Recipe.** {_recipe(config, entry.card)}",
        f"**Stored** {_stored(entry.card)}",
        f"**Limits.** {_LIMITS}",
        f"**Licence.** {_LICENCE}",
    ]
    sections = [
        f"{_HEAD}\n# {entry.name}",
        f"{title(config)}, for CIFAR-10: {_what(config)}.",
        f"```python\n{_call(entry)}\n```",
        _results(entry),
        *(textwrap.fill(paragraph, 110, break_on_hyphens=False) for paragraph in paragraphs),
    ]
    return "\n\n".join(sections) + "\n"


def plain_flops(config: ResNetConfig) -> int:
    """FLOPs an image of the network that is the same but for deciding nothing.

    >>> plain_flops(ResNetConfig(units=5))
    137725184
    """
    with torch.device("meta"):  # of a network of any size
        return max_flops(build(replace(config, adaptive=False)))


def _what(config: TrainConfig) -> str:
    if config.method == "plain":
        return "for adaptive ones to be compared with, and to start from"
    where = "pixel" if config.network.per == "pixel" else "image"
    return f"it decides for every {where}, block by block, how many residual units to run"


def _trained_on(card: dict[str, Any]) -> str:
    images = (card.get("data") or {}).get("images", _ALL)  # older cards, which have none, are of all
    return f"{'' if images == _ALL else f'{images:,} of '}its {_ALL:,} training images"


def _call(entry: Entry) -> str:
    """How to load it: by the network's name where it has one, else by the entry's, or from its file."""
    adaptive = entry.network.adaptive
    maker = f"{'psact_' if adaptive else ''}resnet{entry.network.layers}"
    mode = "act" if entry.config["method"] == "act" else "thresholded"
    if entry.path.parent != FOLDER:
        lines = [
            "from pathlib import Path",
            "",
            "import torchpact as tp",
            "from torchpact_recipes.training.checkpoint import load_model",
            "",
            f'model, _ = load_model(Path("{entry.path.name}"))',
            *([f'tp.use_mode(model, "{mode}")'] if adaptive else []),
        ]
        return "\n".join(lines)
    if hasattr(models, maker):
        first = f'mode="{mode}", ' if adaptive else ""
        return f'model = tp.models.{maker}({first}pretrained="{entry.short_name}")'
    last = f', mode="{mode}"' if adaptive else ""
    return f'model = tp.models.zoo.load("{entry.name}"{last})'


def _results(entry: Entry) -> str:
    plain = plain_flops(entry.network)
    lines = ["| mode | accuracy | nll | MFLOPs an image | of the plain network | units by block |"]
    lines.append("| --- | --- | --- | --- | --- | --- |")
    for mode, m in entry.card["results"].items():
        units = " / ".join(f"{steps:.2f}" for steps in m["steps"]) or "all"
        flops = f"{m['flops'] / 1e6:.1f} ± {m['flops_std'] / 1e6:.1f} | {m['flops'] / plain:.0%}"
        lines.append(f"| {mode} | {m['accuracy']:.2%} | {m['nll']:.3f} | {flops} | {units} |")
    return "\n".join(lines)


def _recipe(config: TrainConfig, card: dict[str, Any]) -> str:
    begun = "From a trained plain network of the same depth" if card["warm_start"] else "From random weights"
    how = {
        "plain": "cross-entropy",
        "relaxed": "the MAP objective in relaxed mode",
        "reinforce": "the MAP objective by REINFORCE",
        "act": "cross-entropy and ACT's ponder cost",
        "random": "cross-entropy, with random halting",
    }[config.method]
    price = "" if config.method in ("plain", "random") else f", τ = {config.tau:g}"
    ramp = f" ramped in over {config.tau_ramp:.0%} of training" if config.tau_ramp and price else ""
    rate = (
        "as a cosine"
        if config.schedule == "cosine"
        else f"÷ 10 after {', '.join(f'{share:.0%}' for share in config.milestones)}"
    )
    optimizer = (
        "Adam"
        if config.optimizer == "adam"
        else f"SGD with {'Nesterov ' if config.nesterov else ''}momentum {config.momentum:g}"
    )
    smoothing = f", label smoothing {config.label_smoothing:g}" if config.label_smoothing else ""
    taught = (
        f" ({config.distill:.0%} of the loss from a teacher's outputs, at temperature "
        f"{config.distill_temperature:g})"
        if config.distill
        else ""
    )
    versions = card["trained_on"]
    parts = [
        f"{begun}; {how}{taught}{price}{ramp}; {config.iterations:,} iterations of {config.batch} images;",
        f"{optimizer}, learning rate {config.lr:g} {rate}, weight decay {config.weight_decay:g}{smoothing};",
        f"shifts of up to {config.pad} pixels, and flips; {config.precision}; seed {config.seed}. Trained in",
        f"{card['training_seconds'] / 60:.1f} minutes, perhaps beside other runs, on {versions['device']},",
        f"by torch {versions['torch']}.",
        *([card["note"]] if card.get("note") else []),  # cards of older versions have none
    ]
    return " ".join(parts)


def _stored(card: dict[str, Any]) -> str:
    if not card["stored_in_half"]:
        return "in single precision: in half precision accuracy changed by more than 0.05 points."
    change = card["change_of_accuracy"]
    most = max(map(abs, change.values()))
    return (
        "in half precision (norms and biases in single), which the table is measured with; "
        f"it changed accuracy by at most {100 * most:.2f} points ({', '.join(change)})."
    )
