"""What there is of a run, finished or not, as the page takes it."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchpact.flops import max_flops
from torchpact.model_card import title
from torchpact.models import ResNet, ResNetConfig, build
from torchpact.training import CheckpointError, TrainConfig
from torchpact.training.checkpoint import load_model
from torchpact.training.run_files import RunFiles

MOST_EVENTS = 400
"""Lines of a history that are drawn: more would not be seen."""


@dataclass(frozen=True)
class RunReport:
    """What the page says of a run, as plain values, and its network where there are weights."""

    values: dict[str, Any]
    model: ResNet | None
    config: TrainConfig | None


def read_run(folder: Path) -> RunReport:
    """Read the folder of a run; of one that is at work or was interrupted, what is there so far."""
    files = RunFiles(folder)
    if not files.run.is_file():
        raise ValueError(f"{folder}: expected the folder of a run, got one without run.json")
    try:
        record = json.loads(files.run.read_text())
        config: dict[str, Any] = record["config"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{files.run}: expected what torchpact train writes, got {error!r}") from None
    history = _history(files.history)
    images = "task" not in config
    results = record.get("results") or _newest_results(history)
    values = {
        "folder": str(folder),
        "title": _title(config),
        "label": _label(config),
        "method": config["method"],
        "seed": config["seed"],
        "status": record["status"],
        "iteration": max([record.get("iteration", 0), *(event["iteration"] for event in history)]),
        "iterations": config["iterations"],
        "results": results,
        "history": _thinned([_for_curves(event) for event in history]),
        "units": config["network"]["units"] if images else None,
        "width": config["network"].get("width", 1) if images else None,
        "plain_flops": _plain_flops(config["network"]) if images else None,
        "timing": None,
        "note": "",
    }
    model = _network(folder) if images else None
    return RunReport(values, model, TrainConfig.from_dict(config) if images else None)


def _history(path: Path) -> list[dict[str, Any]]:
    """All events that are complete: the last line of a run at work may not be."""
    found = []
    for line in path.read_text().splitlines() if path.is_file() else []:
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def _newest_results(history: list[dict[str, Any]]) -> dict[str, Any]:
    validated = [event["modes"] for event in history if event["kind"] == "validate"]
    return validated[-1] if validated else {}


def _for_curves(event: dict[str, Any]) -> dict[str, Any]:
    """What the curves show of an event."""
    kept: dict[str, Any] = {
        key: event[key] for key in ("kind", "iteration", "loss", "accuracy", "expected_steps") if key in event
    }
    if event["kind"] == "validate" and event["modes"]:
        modes = event["modes"]
        kept["accuracy"] = modes.get("thresholded", next(iter(modes.values()))).get("accuracy")
    return kept


def _thinned(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    every = -(-len(events) // MOST_EVENTS)
    last = len(events) - 1
    return [e for i, e in enumerate(events) if e["kind"] == "validate" or i % every == 0 or i == last]


def _network(folder: Path) -> ResNet | None:
    """The network of the newest good checkpoint, if there is any yet."""
    for name in ("last", "previous"):
        try:
            return load_model(folder / f"{name}.safetensors")[0]
        except CheckpointError:
            continue
    return None


def _title(config: dict[str, Any]) -> str:
    if "task" in config:
        return f"{config['task']}, {config['method']}, τ = {config['tau']:g}"
    return title(TrainConfig.from_dict(config))


def _label(config: dict[str, Any]) -> str:
    if config["method"] in ("plain", "repeat"):
        return str(config["method"])
    return f"{'SACT ' if config['method'] == 'act' else ''}τ {config['tau']:g}"


def _plain_flops(network: dict[str, Any]) -> int:
    given = ResNetConfig(**network)
    return max_flops(build(ResNetConfig(units=given.units, width=given.width, adaptive=False)))
