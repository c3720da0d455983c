"""The record in a Hugging Face configuration: an adapted network has a configuration of its own."""

import copy
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from torchpact.adapt.config import AdaptConfig
from torchpact.core.layer_run import LayerRun

THRESHOLDS = "thresholds"
"""The entry of the record that holds the thresholds that are set, by the names of runs."""


@dataclass(frozen=True)
class Replaced:
    """A configuration that was replaced by a copy."""

    original: Any
    values: dict[str, Any]
    """Its attributes then."""


def give_own_config(root: nn.Module, around: nn.Module) -> Replaced | None:
    """Give a network a copy of its configuration, which other networks may share.

    Args:
        root: The network.
        around: The network, or a module that holds it: all modules that refer to the configuration get the
            copy.

    Returns:
        What was replaced; None of a network without a configuration of transformers.

    """
    original = getattr(root, "config", None)
    if not hasattr(original, "to_json_string"):
        return None
    _replace(around, original, copy.copy(original))
    return Replaced(original, dict(vars(original)))


def restore_config(root: nn.Module, around: nn.Module, before: Replaced | None, record: str) -> None:
    """Give a network its former configuration again, with what was changed since in its own.

    Args:
        root: The network.
        around: As of :func:`give_own_config`.
        before: What that returned.
        record: The attribute that holds the record, which is removed.

    """
    own = getattr(root, "config", None)
    if before is None or own is None or own is before.original:
        return
    for name, value in vars(own).items():
        if name != record and (name not in before.values or before.values[name] is not value):
            vars(before.original)[name] = value
    vars(before.original).pop(record, None)  # of the folder that the network was loaded from
    _replace(around, own, before.original)


def write_record(root: nn.Module, name: str, config: AdaptConfig, runs: Iterable[LayerRun]) -> None:
    """Write a record to the configuration of a network, if it has one; thresholds are noted as they are set.

    Args:
        root: The network.
        name: The attribute.
        config: The record.
        runs: Its runs.

    """
    own = getattr(root, "config", None)
    if not hasattr(own, "to_json_string"):
        return
    thresholds: dict[str, list[float | str]] = {}
    for run in runs:
        run.note_thresholds(thresholds)
    setattr(own, name, {**json.loads(config.to_json()), THRESHOLDS: thresholds})


def _replace(around: nn.Module, old: Any, new: Any) -> None:
    for module in around.modules():
        for name, value in [*vars(module).items()]:
            if value is old:
                setattr(module, name, new)
