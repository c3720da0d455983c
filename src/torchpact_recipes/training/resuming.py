"""Resuming a run: its folder has to hold one of the same configuration and data.

Runs of older versions record less; what they do not record is not checked.
"""

from pathlib import Path
from typing import Any

from torch import Tensor

from torchpact.checks import MALFORMED, check_count, check_number
from torchpact_recipes.training.checkpoint import Checkpoint, CheckpointError, load_latest
from torchpact_recipes.training.run_files import RunFiles, TrainingError
from torchpact_recipes.training.sequence_config import RunConfig
from torchpact_recipes.training.state import check_same_tensors


def find_checkpoint(
    files: RunFiles, config: RunConfig, about: dict[str, Any], state: dict[str, Tensor]
) -> tuple[dict[str, Any], Checkpoint | None, list[str]]:
    """Find the checkpoint to resume from, in the folder of a run of the same configuration and data.

    Args:
        files: The files of the run.
        config: What is trained.
        about: What else has to be the same: the data set, the teacher, the warm start.
        state: That of the learner as it begins.

    Returns:
        What the run is about, the checkpoint if there is one, and a line for every one that was refused.

    Raises:
        TrainingError: The run is another one.

    """
    _same_config(files, config)
    checkpoint, problems = None, list[str]()
    if files.last.exists() or files.previous.exists():
        checkpoint, problems = load_latest(
            files.folder, lambda path, found: _check_fits(path, found, config, state)
        )
    notes = [f"{problem}; went back to the checkpoint before" for problem in problems]
    return _same_origin(files, about, checkpoint), checkpoint, notes


def _check_fits(path: Path, checkpoint: Checkpoint, config: RunConfig, state: dict[str, Tensor]) -> None:
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


def _same_origin(files: RunFiles, about: dict[str, Any], checkpoint: Checkpoint | None) -> dict[str, Any]:
    """Refuse to go on from or with anything else than a run began with; return what it began with.

    Its warm start need not be given again where there is a checkpoint, whose weights come from it.
    """
    folder, before = files.folder, files.record()
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


def _same_config(files: RunFiles, config: RunConfig) -> None:
    """Refuse to go on with another configuration than run.json has, where there is one that says it."""
    before = files.record()
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
