"""Settings that go together, for every task: to see it learn on a CPU, and in the sizes of Graves' paper.

``tiny`` takes a minute or a few on two cores, ``small`` several. ``paper`` has the tasks and the networks of
Graves (2016), for a GPU, with at most 5 to 20 steps of the cell where he allowed 100. He trained for up to a
million iterations at a learning rate of 1e-4, in 16 threads at once; here it is a larger one and fewer.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from torchpact.models import SequenceConfig
from torchpact_recipes.data.tasks import TASKS as GRAVES_TASKS
from torchpact_recipes.training.sequence_config import TASKS, SequenceTrainConfig, check_sizes, network_for

_NETWORK = {f.name for f in fields(SequenceConfig)}


@dataclass(frozen=True)
class Preset:
    """Settings of network and training that go with the sizes of a task."""

    network: Mapping[str, Any]
    training: Mapping[str, Any] = field(default_factory=dict)


_GRU = {"cell": "gru", "hidden": 128, "max_steps": 10}
_LSTM = {"cell": "lstm", "hidden": 128, "max_steps": 5}
_LONG = {"iterations": 100_000, "log_every": 500, "validate_every": 5000, "checkpoint_every": 5000}
_TASK = {"lr": 1e-3, "examples": 10_000, **_LONG}

_SHORT = {
    "tiny": Preset(_LSTM, {"iterations": 2000, "batch": 64}),
    "small": Preset(_LSTM, {"iterations": 10_000, "batch": 64}),
}
PRESETS: Mapping[str, Mapping[str, Preset]] = {
    "parity": {
        "tiny": Preset(_GRU),
        "small": Preset(_GRU, {"iterations": 10_000}),
        "paper": Preset({"cell": "rnn", "hidden": 128, "max_steps": 20}, _TASK),
    },
    "logic": {**_SHORT, "paper": Preset({"cell": "lstm", "hidden": 128, "max_steps": 10}, _TASK)},
    "addition": {**_SHORT, "paper": Preset({"cell": "lstm", "hidden": 512, "max_steps": 10}, _TASK)},
    "sort": {**_SHORT, "paper": Preset({"cell": "lstm", "hidden": 512, "max_steps": 10}, _TASK)},
    "enwik8": {
        "tiny": Preset(
            {"cell": "lstm", "hidden": 128, "embedding": 32, "max_steps": 3},
            {"iterations": 1000, "batch": 32, "examples": 50_000},
        ),
        "small": Preset(
            {"cell": "lstm", "hidden": 256, "embedding": 64, "max_steps": 3},
            {"iterations": 5000, "examples": 500_000, "milestones": (0.8,)},
        ),
        "paper": Preset(
            {"cell": "lstm", "hidden": 1500, "embedding": 128, "max_steps": 5},
            {"lr": 1e-3, "window": 100, "examples": 5_000_000, "milestones": (0.8,), **_LONG},
        ),
    },
}


def sequence_preset(task: str, name: str = "tiny", **settings: Any) -> SequenceTrainConfig:
    """Return a preset of a task, with some settings of the network, the training or the task changed.

    >>> config = sequence_preset("parity", "small", method="repeat", max_steps=5, size=12)
    >>> config.network.max_steps, config.sizes
    (5, {'size': 12})
    """
    if task not in TASKS:
        raise ValueError(f"expected a task among {', '.join(TASKS)}; got {task!r}")
    if name not in PRESETS[task]:
        raise ValueError(f"expected a preset among {', '.join(PRESETS[task])}; got {name!r}")
    preset = PRESETS[task][name]
    own = {f.name for f in fields(SequenceTrainConfig)}
    network = dict(preset.network) | {k: v for k, v in settings.items() if k in _NETWORK}
    training = dict(preset.training) | {k: v for k, v in settings.items() if k in own}
    sizes = _sizes(task, name) | {k: v for k, v in settings.items() if k not in own | _NETWORK}
    check_sizes(task, sizes)
    method = training.get("method", "relaxed")
    return SequenceTrainConfig(task, network_for(task, sizes, method, **network), sizes, **training)


def _sizes(task: str, name: str) -> dict[str, int]:
    """The sizes of a task's preset that are not those of Graves' paper."""
    if task == "enwik8":
        return {}
    found: Any = GRAVES_TASKS[task][name]
    return {f.name: getattr(found, f.name) for f in fields(found) if getattr(found, f.name) != f.default}
