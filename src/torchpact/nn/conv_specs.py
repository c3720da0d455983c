"""What residual units and their halting heads are, for engines and FLOPs: see :mod:`torchpact.specs`.

Specs hold the weights themselves, not copies. What a provider reads from a module has to be as its class
makes it: layers of another kind or with other settings are refused in a line.
"""

import torch
from torch import nn

from torchpact.nn.conv_units import Bottleneck, HaltingHead, ResidualUnit
from torchpact.specs import Conv, ConvHead, ConvUnit, Norm, register_head, register_step


@register_step(ResidualUnit)
def residual_unit(unit: ResidualUnit) -> ConvUnit:
    """Return the spec of a unit of two 3×3 convolutions.

    >>> residual_unit(ResidualUnit(16, 32, stride=2)).strides
    [2, 1]
    """
    given, middle, made = unit.conv1.in_channels, unit.conv1.out_channels, unit.conv2.out_channels
    convs = (
        conv_of(unit.conv1, given, middle, 3, unit.stride),
        conv_of(unit.conv2, middle, made, 3),
    )
    norms = (norm_of(unit.norm1, given), norm_of(unit.norm2, middle))
    _check_padding(unit.padding, made - given)
    return ConvUnit(convs, norms, unit.stride, unit.padding, unit.group)


@register_step(Bottleneck)
def bottleneck(unit: Bottleneck) -> ConvUnit:
    """Return the spec of a unit of three convolutions.

    >>> bottleneck(Bottleneck(64, 256, stride=2)).strides
    [1, 2, 1]
    """
    given, middle, made = unit.conv1.in_channels, unit.conv1.out_channels, unit.conv3.out_channels
    convs = (
        conv_of(unit.conv1, given, middle, 1),
        conv_of(unit.conv2, middle, middle, 3, unit.stride),
        conv_of(unit.conv3, middle, made, 1),
    )
    norms = (norm_of(unit.norm1, given), norm_of(unit.norm2, middle), norm_of(unit.norm3, middle))
    _check_padding(unit.padding, made - given)
    return ConvUnit(convs, norms, unit.stride, unit.padding, unit.group)


@register_head(HaltingHead)
def halting_head(head: HaltingHead) -> ConvHead:
    """Return the spec of a halting head.

    >>> halting_head(HaltingHead(16, per="image")).taps is None
    True
    """
    channels = head.linear.in_features
    linear = linear_of(head.linear, channels, 1)
    return ConvHead(
        taps=None if head.conv is None else conv_of(head.conv, channels, 1, 3).weight,
        pool=linear.weight.detach(),
        bias=linear.bias.detach(),
        norm=None if head.norm is None else norm_of(head.norm, channels),
        pooled_norm=None if head.pooled_norm is None else norm_of(head.pooled_norm, channels),
        group=head.group,
        module=head,
    )


def conv_of(layer: nn.Module, inputs: int, outputs: int, size: int, stride: int = 1) -> Conv:
    """Return a convolution without bias, checked to be one of these sizes."""
    with torch.device("meta"):
        check_like(layer, nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False))
    assert isinstance(layer, nn.Conv2d)  # as has been seen
    return Conv(layer.weight.detach(), stride)


def norm_of(layer: nn.Module, channels: int) -> Norm:
    """Return a batch norm of so many channels, checked to be one; its ε may be any."""
    eps, momentum = getattr(layer, "eps", 1e-3), getattr(layer, "momentum", 0.1)
    with torch.device("meta"):
        check_like(layer, nn.BatchNorm2d(channels, eps=eps, momentum=momentum))
    assert isinstance(layer, nn.BatchNorm2d)
    return Norm.of(layer)


def linear_of(layer: nn.Module, inputs: int, outputs: int) -> nn.Linear:
    """Return a linear layer, checked to be one of these sizes."""
    with torch.device("meta"):
        check_like(layer, nn.Linear(inputs, outputs))
    assert isinstance(layer, nn.Linear)
    return layer


def check_like(layer: nn.Module, like: nn.Module) -> None:
    """Refuse a layer of another kind or with other settings; subclasses compute the same in another way.

    >>> check_like(nn.Identity(), nn.Linear(2, 1))
    Traceback (most recent call last):
        ...
    TypeError: expected it to have Linear(in_features=2, out_features=1, bias=True), got Identity()
    """
    if not (isinstance(layer, type(like)) and layer.extra_repr() == like.extra_repr()):
        raise TypeError(f"expected it to have {like}, got {layer}")


def _check_padding(padding: int, added: int) -> None:
    if padding != added:
        raise ValueError(f"expected it to add {added} channels, got {padding}")
