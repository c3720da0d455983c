"""What a deployed network takes, where its specs tell."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from torch import Tensor, nn

from torchpact.specs import BlockSpec, ConvUnit, NetworkSpec


class InputCheck(NamedTuple):
    """What the only input must be."""

    kind: str
    """"network" or "block"."""
    takes: str
    """What the input is called in errors."""
    check: Callable[[Tensor], None]
    """Refuses tensors of a wrong shape."""
    like: Tensor
    """A tensor of the precision and on the device that the input must have."""


def check_of(
    net: nn.Module, network: NetworkSpec | None, specs: Mapping[str, BlockSpec]
) -> InputCheck | None:
    """Return what a network or block takes, or None where anything may be given."""
    if network is not None:
        return InputCheck("network", "images", network.check, network.stem.weight)
    spec = next((spec for spec in specs.values() if spec.module is net), None)
    if spec is None or spec.conv_units is None or not spec.heads:
        return None
    return InputCheck("block", "maps", _maps_for(spec.conv_units[0]), spec.conv_units[0].weight)


def _maps_for(unit: ConvUnit) -> Callable[[Tensor], None]:
    channels = len(unit.norms[0].scale)

    def check(x: Tensor) -> None:
        if x.dim() != 4 or x.size(1) != channels:
            raise ValueError(
                f"expected maps of shape (batch, {channels}, height, width), got {tuple(x.shape)}"
            )

    return check
