"""The state of a distillation on disk: one safetensors file, there in full or not at all."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchpact.checks import one_line
from torchpact.files import remove_leftovers, write_whole

FILE = "distill.safetensors"


class Saved(NamedTuple):
    """What a file holds."""

    record: dict[str, Any]
    tensors: dict[str, Tensor]


def save(folder: Path, record: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write a state; what was there stays until it is complete.

    Args:
        folder: Where to.
        record: Plain numbers and names.
        tensors: Their values now.

    """
    from safetensors.torch import save as serialized

    folder.mkdir(parents=True, exist_ok=True)
    # copies: tensors of a network may share memory
    given = {name: x.detach().cpu().clone().contiguous() for name, x in tensors.items()}
    write_whole(folder / FILE, serialized(given, {"record": json.dumps(record)}))


def load(folder: Path) -> Saved | None:
    """Return the state in a folder; None where there is none.

    Args:
        folder: Where :func:`save` wrote.

    Raises:
        ValueError: The file is something else.

    """
    from safetensors import SafetensorError, safe_open

    file = folder / FILE
    if not file.is_file():
        return None
    remove_leftovers(folder)  # of a run that was killed
    try:
        with safe_open(file, "pt") as opened:
            record = json.loads((opened.metadata() or {})["record"])
            return Saved(record, {name: opened.get_tensor(name) for name in opened.keys()})  # noqa: SIM118
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"expected the state of a distillation in {file}: {one_line(error):.100}") from None


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the state of an optimizer as tensors by name."""
    state = optimizer.state_dict()["state"]
    return {f"{index}.{name}": x for index, own in state.items() for name, x in own.items()}


def load_optimizer(optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Give an optimizer the state of :func:`optimizer_tensors`.

    Args:
        optimizer: Of the same parameters.
        tensors: The state.

    """
    state: dict[int, dict[str, Tensor]] = {}
    for key, x in tensors.items():
        index, _, name = key.partition(".")
        state.setdefault(int(index), {})[name] = x
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})


def prefixed(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors by longer names.

    Args:
        prefix: What their names begin with then.
        tensors: By name.

    """
    return {f"{prefix}.{name}": x for name, x in tensors.items()}


def part(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the tensors whose names begin with a prefix, by the rest of their names.

    Args:
        tensors: By name.
        prefix: The prefix.

    """
    return {name[len(prefix) + 1 :]: x for name, x in tensors.items() if name.startswith(f"{prefix}.")}
