"""Residual networks of torchvision and timm, and those of this library: decisions for pixels or images."""

from typing import Any

from torch import nn

from torchpact.adapt.families.registry import Family, register_family


def _channels(layer: Any) -> int:
    """Return the channels that a unit makes: those of its last convolution on the main path."""
    found = [m for name, m in layer.named_modules() if isinstance(m, nn.Conv2d) and "downsample" not in name]
    return int(found[-1].out_channels)


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
