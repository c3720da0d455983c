"""What there is of a run, finished or not, as the page takes it."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchpact.checks import MALFORMED, MOST, check_count, one_line
from torchpact.models import ResNet
from torchpact_recipes.model_card import plain_flops
from torchpact_recipes.report.naming import traits
from torchpact_recipes.training import CheckpointError, SequenceTrainConfig, TrainConfig
from torchpact_recipes.training.checkpoint import UNREADABLE, load_model
from torchpact_recipes.training.run_files import RunFiles
from torchpact_recipes.training.titles import label, title

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
    files.check()
    try:
        record = json.loads(files.run.read_text(encoding="utf-8"))
        config = _config(record["config"])
        status = str(record["status"])
        reached = _iteration(record.get("iteration", 0))
        results = _by_mode(record.get("results") or {})
        network = config.network if isinstance(config, TrainConfig) else None
        flops = network and plain_flops(network)
    except UNREADABLE as error:
        raise ValueError(f"{files.run}: expected what torchpact train writes, got {_kind(error)}") from None
    history = _history(files.history)
    values = {
        "folder": str(folder),
        "title": title(config),
        "label": label(config),
        "traits": traits(config, title(config), folder),
        "method": config.method,
        "text": isinstance(config, SequenceTrainConfig) and config.is_text,
        "seed": config.seed,
        "status": status,
        "iteration": max([reached, *(event["iteration"] for event in history)]),
        "iterations": config.iterations,
        "results": results or _newest_results(history),
        "history": _thinned([_for_curves(event) for event in history]),
        "units": network and network.units,
        "width": network and network.width,
        "plain_flops": flops,
        "timing": None,
        "note": "",
    }
    model = _network(folder) if network else None
    return RunReport(values, model, config if isinstance(config, TrainConfig) else None)


def _iteration(value: Any) -> int:
    return check_count("iteration", value, minimum=0, maximum=MOST)


def _kind(error: Exception) -> str:
    return f"{type(error).__name__}: {one_line(error)}"


def _config(values: dict[str, Any]) -> TrainConfig | SequenceTrainConfig:
    # defaults are for those who train: a report must not make up what a run was
    if missing := {"network", "method", "seed", "iterations"}.difference(dict(values)):
        raise ValueError(f"no {', '.join(sorted(missing))} in its config")
    return (SequenceTrainConfig if "task" in values else TrainConfig).from_dict(values)


def _by_mode(results: dict[str, Any]) -> dict[str, Any]:
    if not all(isinstance(measured, dict) for measured in results.values()):
        raise TypeError("results that are not of modes")
    return results


def _history(path: Path) -> list[dict[str, Any]]:
    """All events that are complete: the last line of a run at work may not be."""
    found = []
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    for line in text.splitlines():
        try:
            event = json.loads(line)
            if event["kind"] == "validate":
                _by_mode(event["modes"])
            found.append(event | {"iteration": _iteration(event["iteration"])})
        except MALFORMED:
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
