"""What ``save_pretrained`` leaves, config.json and model.safetensors: read without huggingface_hub."""

import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from torchpact import Mode
from torchpact.checks import MALFORMED, one_line
from torchpact.core.modes import MODES
from torchpact.models import ResNet, ResNetConfig, build

FILES = ("config.json", "model.safetensors")
FORMAT = "torchpact network 1"
"""What config.json says it is; the first ones said nothing."""


def files_in(folder: Path) -> list[str]:
    """Those of the two files that a folder has."""
    return [name for name in FILES if (folder / name).is_file()]


def read_network(folder: Path) -> ResNet:
    """Return the network of a folder, on the CPU, in evaluation and in the mode that it was saved in."""
    config, mode = read_config(folder)
    file = folder / FILES[1]
    weights = read_weights(file)
    try:
        with torch.device("meta"):  # weights that do not fit are told before any memory is taken
            described = build(config, mode)
    except RuntimeError as error:
        raise ValueError(
            f"{folder / FILES[0]}: expected a network of a possible size ({one_line(error)})"
        ) from error
    check_fit(file, described, weights)
    model = build(config, mode)
    model.load_state_dict(weights)
    return model.eval()


def read_config(folder: Path) -> tuple[ResNetConfig, Mode | None]:
    """Read what the network of a folder is, and its mode."""
    found = files_in(folder)
    if len(found) < len(FILES):
        raise ValueError(f"{folder}: expected {' and '.join(FILES)}, got {found[0] if found else 'neither'}")
    try:
        settings = json.loads((folder / FILES[0]).read_text(encoding="utf-8"))
        if not isinstance(settings, dict):
            raise TypeError(f"a {type(settings).__name__}")
    except MALFORMED as error:
        raise not_settings(folder, error) from error
    check_depth(folder, settings)
    try:
        return from_settings(settings)
    except ValueError as error:
        raise ValueError(f"{folder / FILES[0]}: {one_line(error)}") from error
    except MALFORMED as error:
        raise not_settings(folder, error) from error


def not_settings(place: str | Path, error: Exception) -> ValueError:
    """The error of a config.json that is none of ours."""
    return ValueError(f"{place}: expected the settings of a network in config.json, got {one_line(error)}")


def check_depth(place: str | Path, settings: dict[str, Any]) -> None:
    """Refuse settings that would give the default network."""
    if "units" not in settings:
        raise ValueError(f"{place}: expected config.json to say how many units a block has")


def to_settings(model: ResNet) -> dict[str, Any]:
    """What a network is made from, as JSON holds it."""
    return {"format": FORMAT} | asdict(model.config) | _mode_settings(mode_of(model))


def from_settings(settings: dict[str, Any]) -> tuple[ResNetConfig, Mode | None]:
    """Return what :func:`to_settings` was given."""
    rest = dict(settings)
    if (form := rest.pop("format", FORMAT)) != FORMAT:
        raise ValueError(f"expected the format {FORMAT!r}, got {form!r:.80}")
    name, values = rest.pop("mode", None), rest.pop("mode_settings", None)
    if name is not None and name not in MODES:
        raise ValueError(f"expected a mode among {', '.join(MODES)}; got {name!r:.80}")
    return ResNetConfig(**rest), None if name is None else MODES[name](**(values or {}))


def mode_of(model: ResNet) -> Mode | None:
    """The mode that all blocks are in; plain ones are in none."""
    modes: list[Mode | None] = [getattr(block, "mode", None) for block in model.blocks]
    if any(mode != modes[0] for mode in modes):
        raise ValueError(f"expected all blocks to be in one mode, got {', '.join(map(str, modes))}")
    return modes[0]


def name_of(mode: Mode) -> str:
    """The name that a mode goes by."""
    name = next((name for name, kind in MODES.items() if type(mode) is kind), None)
    if name is None:
        raise ValueError(f"expected a mode among {', '.join(MODES)}; got {mode}")
    return name


def read_weights(file: str | Path, device: str = "cpu") -> dict[str, Tensor]:
    """Read a safetensors file."""
    try:
        return load_file(file, device=device)
    except SafetensorError as error:
        raise ValueError(f"{file}: not a readable safetensors file ({one_line(error)})") from error


def check_fit(file: str | Path, model: nn.Module, weights: dict[str, Tensor]) -> None:
    """Refuse weights of another network than config.json describes."""
    told = misfits(model, weights)
    if told:
        raise ValueError(f"{file}: expected the weights that config.json describes, got {told}")


def misfits(model: nn.Module, weights: dict[str, Tensor]) -> str:
    """Return in a few words which weights are not those of a model; nothing if all fit."""
    wanted = model.state_dict()
    both = [name for name in wanted if name in weights]
    kinds = [n for n in both if weights[n].is_floating_point() != wanted[n].is_floating_point()]
    found = {
        "missing": [name for name in wanted if name not in weights],
        "too many": [name for name in weights if name not in wanted],
        "of another shape": [name for name in both if weights[name].shape != wanted[name].shape],
        "of another kind of numbers": kinds,
    }
    return ", ".join(f"{_some(names)} {what}" for what, names in found.items() if names)


def _some(names: list[str]) -> str:
    return f"{names[0]:.80}" if len(names) == 1 else f"{len(names)} tensors ({names[0]:.80}, …)"


def _mode_settings(mode: Mode | None) -> dict[str, Any]:
    if mode is None:
        return {"mode": None, "mode_settings": None}
    name = name_of(mode)
    kept = [f.name for f in fields(mode) if f.compare]  # type: ignore[arg-type]
    return {"mode": name, "mode_settings": {key: getattr(mode, key) for key in kept}}
