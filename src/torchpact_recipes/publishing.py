"""From a finished run to an entry of the zoo: weights in half precision where that is as good, and a card."""

import json
import platform
import re
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import torchpact
from torchpact.checks import MALFORMED, one_line
from torchpact.files import write_whole
from torchpact.models import ResNet, build
from torchpact_recipes import zoo
from torchpact_recipes.data import Images
from torchpact_recipes.model_card import markdown
from torchpact_recipes.outputs import check_file
from torchpact_recipes.training import TrainConfig
from torchpact_recipes.training.checkpoint import load_checkpoint, network_in, save_checkpoint
from torchpact_recipes.training.evaluate import evaluate_modes
from torchpact_recipes.training.run_files import RunFiles
from torchpact_recipes.zoo import Entry

TOLERANCE = 0.0005
"""What accuracy may lose or gain in half precision: 0.05 points."""

DRAWING = ("relaxed", "discrete")
"""Modes that draw decisions: to compare in them would add chance, and take most of the time."""

MOST_BYTES = 4_000_000


def add_entry(run: Path, name: str, test: Images, folder: Path = zoo.FOLDER, *, note: str = "") -> Entry:
    """Make an entry called "resnet32-NAME" of a finished run, measured anew on ``test``.

    One of the same name is replaced. ``note`` is what else its card should say of the training. Matrices
    and filters are stored in half precision, unless accuracy changes by more than 0.05 points in any mode
    that draws nothing; norms and biases, which are few, stay as they are.
    """
    _check_name(name)
    files = RunFiles(run)
    record = _finished(files)
    model, config = _trained(files)
    path = folder / f"resnet{config.network.layers}-{name}.safetensors"
    for file in (path, path.with_suffix(".md")):
        check_file(file)
    small = _halved(model.to(test.images.device))
    results = evaluate_modes(small, test, config.modes)
    certain = [mode for mode in config.modes if mode not in DRAWING] or config.modes
    full = evaluate_modes(model, test, certain)
    change = {mode: results[mode]["accuracy"] - full[mode]["accuracy"] for mode in full}
    half = max(map(abs, change.values())) <= TOLERANCE
    if not half:
        others = [mode for mode in config.modes if mode not in full]
        small, results = model, full | evaluate_modes(model, test, others)
        change = dict.fromkeys(full, 0.0)
    card = {
        "results": zoo.in_order(results),
        "stored_in_half": half,
        "change_of_accuracy": change,
        "warm_start": record.get("warm_start") is not None,
        "note": note,
        "data": record.get("data"),
        "trained_on": record["versions"],
        "training_seconds": record["training_seconds"],
        "measured_on": {
            "torchpact": torchpact.__version__,
            "torch": torch.__version__,
            "device": test.images.device.type,
            "python": platform.python_version(),
        },
    }
    # how a run looked at itself is no part of what the network is
    kept = replace(config, variance_samples=0).to_dict()
    said = markdown(Entry(path.stem, path, kept, card))  # so that what has no card leaves no file
    folder.mkdir(parents=True, exist_ok=True)
    _write(path, small, {"config": kept, "card": card}, half)
    write_whole(path.with_suffix(".md"), said.encode())
    return zoo.read(path)


def _finished(files: RunFiles) -> dict[str, Any]:
    files.check()
    try:
        record: dict[str, Any] = json.loads(files.run.read_text(encoding="utf-8"))
        kind = _unfit(files, record, record["config"])
    except MALFORMED as error:
        told = f"{type(error).__name__}: {one_line(error)}"
        raise ValueError(f"{files.run}: expected what torchpact train writes, got {told}") from None
    if kind:
        raise ValueError(f"{files.folder}: expected a finished run on images, got one {kind}")
    return record


def _trained(files: RunFiles) -> tuple[ResNet, TrainConfig]:
    """The network of a finished run; files of one may have been gathered at different times."""
    checkpoint = load_checkpoint(files.last)
    model, config = network_in(files.last, checkpoint)
    reached = checkpoint.info.get("iteration")
    if reached != config.iterations:
        raise ValueError(
            f"{files.last}: expected weights of iteration {config.iterations:,}, the last; got {reached!r}"
        )
    return model, config


def _unfit(files: RunFiles, record: dict[str, Any], config: dict[str, Any]) -> str:
    """Why no network of such a run belongs in the zoo, if so."""
    if "task" in config:
        return "for sequences"
    if record["status"] != "finished":
        return f"not finished (iteration {_reached(files):,} of {config['iterations']:,})"
    if config["method"] == "random":
        return "that halts at random"
    if "versions" not in record or "training_seconds" not in record:  # as those of the demo
        return "that torchpact train did not make"
    return ""


def _reached(files: RunFiles) -> int:
    """The iteration that a run is known to have come to, by its history and its checkpoint."""
    found = [0]
    with suppress(OSError, *MALFORMED):  # none yet, or a line half written
        found.append(int(json.loads(files.history.read_text().rstrip().rpartition("\n")[2])["iteration"]))
    with suppress(*MALFORMED):
        found.append(int(load_checkpoint(files.last).info["iteration"]))
    return max(found)


def _check_name(name: str) -> None:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name):
        raise ValueError(f"expected a name of letters, digits, '-', '.' and '_'; got {name!r:.120}")


def _halved(model: ResNet) -> ResNet:
    """The network that is read back from weights stored in half precision."""
    copy = build(model.config, getattr(model.blocks[0], "mode", None)).to(model.classifier.weight.device)
    copy.load_state_dict(_stored(model, half=True))
    return copy.eval()


def _stored(model: ResNet, half: bool) -> dict[str, Tensor]:
    weights = model.state_dict()
    return {k: v.half() if half and v.dim() > 1 else v for k, v in weights.items()}


def _write(path: Path, model: ResNet, info: dict[str, Any], half: bool) -> None:
    tensors = {f"model.{k}": v for k, v in _stored(model, half).items()}
    size = sum(v.numel() * v.element_size() for v in tensors.values())
    if size > MOST_BYTES:
        raise ValueError(f"{path.stem}: expected weights of at most {MOST_BYTES:,} bytes, got {size:,}")
    save_checkpoint(path, tensors, info)
