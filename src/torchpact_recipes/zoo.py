"""Pretrained networks that come with the package, each with a card that says what it is.

An entry is a checkpoint of weights alone, whose header holds its training configuration and what was
measured; ``torchpact zoo add`` makes one of a finished run.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from safetensors import safe_open

from torchpact import Mode, use_mode
from torchpact.checks import one_line
from torchpact.models import ResNet, ResNetConfig
from torchpact_recipes.training.checkpoint import UNREADABLE, load_model

FOLDER = Path(__file__).parent / "weights"
"""Where entries are."""

_MODES = ("plain", "relaxed", "discrete", "act", "thresholded")
"""In the order of people: as trained first, as deployed last."""

_METHODS = ("plain", "relaxed", "reinforce", "act")


@dataclass(frozen=True)
class Entry:
    """A pretrained network: its name, as "resnet32-tau0.01", its file, and what is known of it."""

    name: str
    path: Path
    config: dict[str, Any]
    """The configuration it was trained with."""
    card: dict[str, Any]
    """What the model card says, as plain values; "results" has what was measured in each mode."""

    @property
    def short_name(self) -> str:
        """The name without the network's."""
        return self.name.partition("-")[2]

    @property
    def network(self) -> ResNetConfig:
        """What the network is, apart from its weights."""
        return ResNetConfig(**self.config["network"])

    def is_like(self, config: ResNetConfig) -> bool:
        """Whether the network has this depth, and is adaptive or plain alike."""
        return self.network.units == config.units and self.network.adaptive == config.adaptive


def entries(folder: Path = FOLDER) -> list[Entry]:
    """Return all entries, small networks first, the plain ones before adaptive ones.

    >>> [entry.name for entry in entries()][0]
    'resnet32-plain'
    """
    return sorted((read(path) for path in folder.glob("*.safetensors")), key=_rank)


def find(name: str) -> Entry:
    """Return the entry of that name."""
    known = {entry.name: entry for entry in entries()}
    if name not in known:
        raise ValueError(f"expected a network of the zoo, got {name!r} ({hint(name, known)})")
    return known[name]


def hint(name: str, known: Iterable[str]) -> str:
    """Suggest the closest known name for an unknown one, or where all names are listed.

    >>> hint("resnet32-plane", ["resnet32-plain"]), hint("vgg", ["resnet32-plain"])
    ('did you mean resnet32-plain?', 'torchpact zoo lists them')
    """
    close = get_close_matches(name, list(known), 1)
    return f"did you mean {close[0]}?" if close else "torchpact zoo lists them"


def called(path: Path) -> str:
    """What people call a network's file: one of the zoo by its name, others by where they are.

    >>> called(FOLDER / "resnet32-plain.safetensors")
    'resnet32-plain'
    """
    return path.stem if path.parent == FOLDER else str(path)


def load(name: str, mode: Mode | str | None = None) -> ResNet:
    """Return a pretrained network, in evaluation, in the mode given or else the one it was trained in.

    >>> model = load("resnet32-tau0.01", mode="thresholded")
    >>> model.training, model.config.units
    (False, 5)
    """
    model, _ = load_model(find(name).path)
    if mode is not None:
        use_mode(model, mode)
    return model


def read(path: Path) -> Entry:
    """Read what a file of the zoo says of itself; its weights are not read, nor checked."""
    try:
        with safe_open(path, framework="pt") as file:
            info = json.loads(file.metadata()["info"])
        card = info["card"]
        entry = Entry(path.stem, path, info["config"], card | {"results": in_order(card["results"])})
        _rank(entry)
    except UNREADABLE as error:
        told = f"{type(error).__name__}: {one_line(error)}"
        raise ValueError(f"{path}: expected a network as torchpact zoo add writes it, got {told}") from error
    return entry


def in_order(results: dict[str, Any]) -> dict[str, Any]:
    """Results by mode, as trained first, as deployed last."""
    return {mode: results[mode] for mode in _MODES if mode in results}


def _rank(entry: Entry) -> tuple[int, bool, int, float, str]:
    """Small networks first, the plain ones before adaptive ones; unknown methods are last."""
    method = entry.config["method"]
    place = _METHODS.index(method) if method in _METHODS else len(_METHODS)
    return entry.network.units, entry.network.adaptive, place, float(entry.config["tau"]), entry.name
