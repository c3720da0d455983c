"""Going on with a run: what it must have in common with the run that was begun.

Runs of older versions say less of themselves; what they do not say is not checked.
"""

import hashlib
import json
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor

from torchpact.checks import MALFORMED, check_count, check_number
from torchpact_recipes.training.checkpoint import UNREADABLE, Checkpoint, CheckpointError
from torchpact_recipes.training.learns import RunConfig
from torchpact_recipes.training.run_files import RunFiles, TrainingError
from torchpact_recipes.training.state import check_same_tensors

_described: "WeakKeyDictionary[Any, dict[str, Any]]" = WeakKeyDictionary()


def describe(data: Any, kind: str, *tensors: Tensor) -> dict[str, Any]:
    """How much of a kind a data set has, and a digest of its tensors, the same on any device.

    All of CIFAR-10 takes a tenth of a second, and that once for all runs on it.

    >>> from torchpact_recipes.data import Images
    >>> data = Images(torch.zeros(2, 3, 32, 32, dtype=torch.uint8), torch.tensor([1, 0]))
    >>> describe(data, "images", data.images, data.labels)
    {'images': 2, 'digest': '9c6a4f162e106bcb'}
    """
    if data not in _described:
        sha = hashlib.sha256(repr(tuple(tensors[0].shape)).encode())
        for tensor in tensors:
            sha.update(tensor.cpu().contiguous().numpy().data)
        _described[data] = {kind: len(tensors[0]), "digest": sha.hexdigest()[:16]}
    return _described[data]


def recorded(files: RunFiles) -> dict[str, Any]:
    """What run.json says; nothing where there is none that can be read."""
    try:
        found = json.loads(files.run.read_text(encoding="utf-8"))
    except UNREADABLE:
        return {}
    return found if isinstance(found, dict) else {}


def check_fits(path: Path, checkpoint: Checkpoint, config: RunConfig, state: dict[str, Tensor]) -> None:
    """Refuse the checkpoint of another run than this one, whose learner begins with ``state``."""
    for name in ("config", "iteration", "best", "results", "seconds"):
        if name not in checkpoint.info:
            raise CheckpointError(
                f"{path}: expected the checkpoint of a run that can go on, got one without {name}"
            )
    try:
        _check_config(str(path), config, checkpoint.info["config"])
        _check_progress(checkpoint.info, config)
        # what an optimizer remembers is not there yet
        check_same_tensors(state, {k: v for k, v in checkpoint.tensors.items() if k in state})
    except TrainingError as error:
        raise CheckpointError(str(error)) from None
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{path}: {error}") from None


def _check_progress(info: dict[str, Any], config: RunConfig) -> None:
    check_count("iteration", info["iteration"], minimum=0, maximum=config.iterations)
    check_number("seconds", info["seconds"], 0, open_high=True)
    if info["best"] is not None:
        check_number("best", info["best"])
    if not isinstance(info["results"], dict):
        raise ValueError(f"expected results by mode, got a {type(info['results']).__name__}")


def same_origin(files: RunFiles, about: dict[str, Any], checkpoint: Checkpoint | None) -> dict[str, Any]:
    """Refuse to go on from or with anything else than a run began with; return what it began with.

    Its warm start need not be given again where there is a checkpoint, whose weights come from it.
    """
    folder, before = files.folder, recorded(files)
    if checkpoint is not None:
        _check_data(folder, about.get("data"), checkpoint.info.get("data"))
        if about.get("warm_start") is None and "warm_start" in before:
            about = about | {"warm_start": before["warm_start"]}
    for name in ("warm_start", "teacher"):
        if name in before and before[name] != about.get(name):
            expected, given = f"{before[name] or 'none'!s:.200}", about.get(name) or "none"
            kind = name.replace("_", " ")
            raise TrainingError(f"{folder}: expected the {kind} that it began with, {expected}; got {given}")
    _check_data(folder, about.get("data"), before.get("data"))
    return about


def same_config(files: RunFiles, config: RunConfig) -> None:
    """Refuse to go on with another configuration than run.json has, where there is one that says it."""
    before = recorded(files)
    if "config" in before:
        try:
            _check_config(f"{files.folder}: its run", config, before["config"])
        except TrainingError as error:
            raise TrainingError(
                f"{error}; repeat the options that it was begun with, which are in its {files.run.name}"
            ) from None


def _check_config(what: str, config: RunConfig, values: Any) -> None:
    try:
        before = type(config).from_dict(values).to_dict()
    except MALFORMED:
        raise TrainingError(f"{what} is of another configuration, one of another kind of run") from None
    difference = _first_difference(before, config.to_dict())
    if difference is not None:
        name, there, here = difference
        found = f"{name} is {there!r:.80} there, {here!r} here"
        raise TrainingError(f"{what} is of another configuration: {found}")


def _first_difference(
    one: dict[str, Any], two: dict[str, Any], within: str = ""
) -> tuple[str, Any, Any] | None:
    """Where two configurations differ first, and their values there."""
    for name, value in one.items():
        other = two[name]
        if isinstance(value, dict) and isinstance(other, dict) and value.keys() == other.keys():
            found = _first_difference(value, other, f"{within}{name}.")
            if found is not None:
                return found
        elif value != other:
            return within + name, value, other
    return None


def _check_data(folder: Path, given: dict[str, Any] | None, before: dict[str, Any] | None) -> None:
    if given is None or before is None or given == before:
        return
    one, two = (_in_words(each) for each in (before, given))
    raise TrainingError(f"{folder}: expected the data set that it began with, {one}; got {two}")


def _in_words(described: Any) -> str:
    """What a data set is, in a few words.

    >>> _in_words({"digest": "9c6a", "images": 2})
    '2 images (9c6a)'
    """
    names = described if isinstance(described, dict) else ()
    kind = next((name for name in names if name != "digest"), None)
    if kind is None:
        return f"{described!r:.80}"
    return f"{described[kind]} {kind} ({described.get('digest')})"
