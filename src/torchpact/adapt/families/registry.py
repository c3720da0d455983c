"""What is known of layers of pretrained networks: a record for each family, and the table of them."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from torchpact.core.layer_run import Per
from torchpact.specs import StepSpec, register_step

Steps = list[tuple[str, nn.Module]]
"""Names relative to their owner, and modules, in the order of the calls."""


@dataclass(frozen=True)
class Family:
    """What :func:`~torchpact.adapt` has to know of the layers of some networks.

    Classes are identified by their qualified names, so that their package need not be installed. A class that
    inherits from one of them without changing ``forward`` belongs to the family, too.

    Example:
        >>> from torchpact.adapt import Family, register_family
        >>> register_family(Family("mine", layers=("my_package.MyLayer",), width=lambda layer: layer.size))

    """

    name: str
    """What it is called in summaries."""
    layers: tuple[str, ...]
    """The qualified names of the classes of its layers, ``package.module.Class``."""
    width: Callable[[Any], int]
    """Returns the features (or channels) of the hidden state of a layer."""
    per: tuple[Per, ...] = ("token", "example")
    """The units that its layers can decide for; the first is the default."""
    normalize: bool = True
    """Whether heads normalise the state, which layers that begin with a norm leave as large as it is."""
    causal: bool = False
    """Whether it is a decoder, which runs with a cache."""
    spec: Callable[[Any], StepSpec] | None = None
    """Returns what a layer is, for engines and FLOPs; without it the run is executed densely."""
    batch_dim: Callable[[Any], int] | None = None
    """Returns the dimension of the hidden state that is the batch; by default it is the first."""
    owners: tuple[str, ...] = ()
    """Classes of modules that call layers in another way than once each, in the order of a list."""
    sequence: Callable[[Any], Steps] | None = None
    """Returns the layers that such a module calls."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Attributes that the module which calls the layers gets while it is adapted, where it has them."""


_BY_LAYER: dict[str, Family] = {}
_BY_OWNER: dict[str, Family] = {}


def register_family(family: Family) -> None:
    """Make a family known to :func:`~torchpact.adapt`.

    A later registration of a class replaces an earlier one.

    Args:
        family: What is known of its layers.

    Example:
        >>> from torchpact.adapt import Family, register_family
        >>> register_family(Family("mine", layers=("my_package.MyLayer",), width=lambda layer: layer.size))

    """
    for name in family.layers:
        _BY_LAYER[name] = family
        if family.spec is not None:
            register_step(name)(family.spec)
    for name in family.owners:
        _BY_OWNER[name] = family


def family_of(layer: nn.Module) -> Family | None:
    """Return the family that a layer belongs to, by its class or one that it inherits ``forward`` from."""
    return _found(_BY_LAYER, layer)


def family_of_owner(module: nn.Module) -> Family | None:
    """Return the family whose layers a module calls in a way of its own."""
    return _found(_BY_OWNER, module)


def _found(table: dict[str, Family], module: nn.Module) -> Family | None:
    # some packages wrap the forward of every subclass
    own, kinds = inspect.unwrap(type(module).forward), type(module).__mro__
    for kind in kinds:
        family = table.get(f"{kind.__module__}.{kind.__qualname__}")
        if family is not None and issubclass(kind, nn.Module) and inspect.unwrap(kind.forward) is own:
            return family
    return None
