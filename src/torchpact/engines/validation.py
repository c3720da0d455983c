"""Whether a block of somebody's own is what engines take it for: they read weights, and trust the rest."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from torchpact.core.block import AdaptiveBlock
from torchpact.nn.conv_units import Bottleneck, HaltingHead, ResidualUnit


def check_block(block: AdaptiveBlock) -> None:
    """Refuse, in a line, blocks of which engines do not know what their steps and heads do.

    >>> check_block(AdaptiveBlock([ResidualUnit(16, 16), ResidualUnit(16, 32)], [HaltingHead(16)]))
    Traceback (most recent call last):
        ...
    ValueError: expected step 2 to map 16 channels to 16 with stride 1, got 16 to 32 with stride 1
    """
    kinds = {type(step) for step in block.steps}
    if len(kinds) != 1 or not kinds <= {ResidualUnit, Bottleneck}:
        raise TypeError(
            f"expected a block whose steps are all ResidualUnit or all Bottleneck, got {_names(kinds)}"
        )
    if block.max_steps < 2:
        raise ValueError(f"expected a block of at least two units, got {block.max_steps}")
    heads = {type(head) for head in block.halting}
    if heads != {HaltingHead}:
        raise TypeError(f"expected halting heads of torchpact.models.HaltingHead, got {_names(heads)}")
    parts: list[Any] = [*block.steps, *block.halting]
    if any(part.group > 1 for part in parts):
        raise ValueError("expected decisions for pixels or images, got some for patches")
    tensors = [*block.parameters(), *(b for b in block.buffers() if b.is_floating_point())]
    if len({(tensor.dtype, tensor.device) for tensor in tensors}) > 1:
        found = sorted({f"{tensor.dtype} on {tensor.device}" for tensor in tensors})
        raise ValueError(f"expected all of the block in one precision on one device, got {', '.join(found)}")
    check_layers(block)


def is_changed(block: AdaptiveBlock) -> bool:
    """Whether a block does something else than adaptive blocks do."""
    return type(block).forward is not AdaptiveBlock.forward or "forward" in vars(block)


def is_watched(*modules: nn.Module) -> bool:
    """Whether any has hooks, which see what it is given, or change what it gives."""
    return any(module._forward_hooks or module._forward_pre_hooks for module in modules)


def check_layers(block: Any) -> None:
    """Refuse a block, adaptive or plain, whose units or heads are not as their classes make them."""
    first, heads = block.steps[0], [*getattr(block, "halting", ())]
    channels, between = _last(first).out_channels, first.conv1.out_channels
    for number, step in enumerate(block.steps, start=1):
        name, changes = f"step {number}", number == 1 and len(block.steps) > 1
        _check_step(name, step, channels, changes or not heads)
        if step.conv1.out_channels != between:
            raise ValueError(
                f"expected {name} to have {between} channels between its convolutions, as step 1 has, got "
                f"{step.conv1.out_channels}"
            )
    if heads:
        _check_heads(heads, channels)
    below = [module for module in block.modules() if module is not block]
    if is_watched(*below):
        raise TypeError("expected units and heads without forward hooks, which engines would not run")
    if any("forward" in vars(module) for module in below):
        raise TypeError("expected units and heads as their classes are, got one with a forward of its own")


def _names(kinds: set[type]) -> str:
    return ", ".join(sorted(kind.__name__ for kind in kinds))


def _last(step: Any) -> nn.Conv2d:
    conv: nn.Conv2d = getattr(step, "conv3", step.conv2)
    return conv


def _check_step(name: str, step: Any, channels: int, may_change: bool) -> None:
    """Refuse a step that is not what its class makes, or one after the first that changes the map."""
    given, made, stride = step.conv1.in_channels, _last(step).out_channels, step.stride
    if not may_change and (given, made, stride) != (channels, channels, 1):
        raise ValueError(
            f"expected {name} to map {channels} channels to {channels} with stride 1, got {given} to {made} "
            f"with stride {stride}"
        )
    for layer, like in _layers(step):
        _check_layer(name, layer, like)
    if step.padding != made - given:
        raise ValueError(f"expected {name} to add {made - given} channels, got {step.padding}")


def _layers(step: Any) -> list[tuple[nn.Module, nn.Module]]:
    """Each layer of a step beside one as it should be."""
    given, middle, made = step.conv1.in_channels, step.conv1.out_channels, _last(step).out_channels
    if isinstance(step, Bottleneck):
        sizes = [(given, middle, 1, 1), (middle, middle, 3, step.stride), (middle, made, 1, 1)]
    else:
        sizes = [(given, middle, 3, step.stride), (middle, made, 3, 1)]
    pairs: list[tuple[nn.Module, nn.Module]] = []
    with torch.device("meta"):
        for number, (inputs, outputs, size, stride) in enumerate(sizes, start=1):
            conv, norm = getattr(step, f"conv{number}"), getattr(step, f"norm{number}")
            eps, momentum = getattr(norm, "eps", 1e-3), getattr(norm, "momentum", 0.1)
            pairs.append((conv, nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False)))
            pairs.append((norm, nn.BatchNorm2d(inputs, eps=eps, momentum=momentum)))
    return pairs


def _check_layer(name: str, layer: nn.Module, like: nn.Module) -> None:
    """Refuse a layer of another kind or with other settings; subclasses compute the same in another way."""
    if not (isinstance(layer, type(like)) and layer.extra_repr() == like.extra_repr()):
        raise TypeError(f"expected {name} to have {like}, got {layer}")


def _check_heads(heads: Sequence[Any], channels: int) -> None:
    """Refuse heads that are for other maps, or differ in what they are."""
    kinds = {(head.conv is None, head.norm is None, head.pooled_norm is None) for head in heads}
    if len(kinds) > 1:
        raise ValueError("expected heads that are alike: all for pixels or for images, with norms or without")
    with torch.device("meta"):
        conv, linear = nn.Conv2d(channels, 1, 3, 1, 1, bias=False), nn.Linear(channels, 1)
    for number, head in enumerate(heads, start=1):
        _check_layer(f"head {number}", head.linear, linear)
        if head.conv is not None:
            _check_layer(f"head {number}", head.conv, conv)
