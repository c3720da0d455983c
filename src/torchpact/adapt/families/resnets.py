"""Residual networks of torchvision and timm, and those of this library: decisions for pixels or images."""

from typing import Any

from torch import nn

from torchpact.adapt.families.registry import Family, register_family
from torchpact.specs.providers import register_idle_hook

register_idle_hook("torchpact.adapt.hooks.FrozenNorm")  # of adapt(frozen=True); it acts in training


def _channels(layer: Any) -> int:
    """Return the channels that a unit makes: those of its last convolution on the main path."""
    convs = {name: m for name, m in layer.named_modules() if isinstance(m, nn.Conv2d)}
    # by name, not in the order in which a unit makes them
    return int(convs[max(name for name in convs if "downsample" not in name)].out_channels)


register_family(
    Family(
        "ResNet",
        layers=(
            "torchvision.models.resnet.BasicBlock",
            "torchvision.models.resnet.Bottleneck",
            "timm.models.resnet.BasicBlock",
            "timm.models.resnet.Bottleneck",
            "torchpact.nn.conv_units.ResidualUnit",
            "torchpact.nn.conv_units.Bottleneck",
        ),
        width=_channels,
        per=("pixel", "example"),
    )
)
