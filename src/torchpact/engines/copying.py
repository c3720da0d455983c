"""A copy of somebody's network to run in its place, and what a trial must not change of it."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from torchpact.block import AdaptiveBlock
from torchpact.modes import Mode


def copied(net: nn.Module, mode: Mode | None, details: bool | None) -> nn.Module:
    """Return a copy in evaluation, and in a mode; modes stay the same objects, for generators are theirs."""
    if any(getattr(module, "_deployed", False) is True for module in net.modules()):
        raise TypeError("expected a model, got what is deployed: deploy the model that it was made of")
    known: dict[int, Any] = {id(b.mode): b.mode for b in net.modules() if isinstance(b, AdaptiveBlock)}
    for module in net.modules():
        for x in _computed(vars(module)):  # as ponders that are kept for a loss
            known[id(x)] = x.detach().clone()
    try:
        own = copy.deepcopy(net, known).eval()
    except Exception as error:  # whatever somebody keeps in a module
        why = " ".join(str(error).split())
        raise TypeError(
            f"expected a network that can be copied, got a {type(net).__name__} with what cannot: {why}"
        ) from error
    for block in (module for module in own.modules() if isinstance(module, AdaptiveBlock)):
        block.mode, block.details = mode or block.mode, block.details if details is None else details
    for parameter in own.parameters():
        parameter.requires_grad_(False)
    return own


def _computed(value: Any) -> Iterator[Tensor]:
    """Yield tensors that were computed with gradients, which cannot be copied, in containers, too."""
    if isinstance(value, Tensor):
        if not value.is_leaf:
            yield value
    elif isinstance(value, dict | list | tuple):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _computed(part)


@contextmanager
def kept(net: nn.Module) -> Iterator[None]:
    """Leave buffers, and the generators that modes draw from, as they were, and torch's own."""
    buffers = [(buffer, buffer.clone()) for buffer in net.buffers()]
    modes = [module.mode for module in net.modules() if isinstance(module, AdaptiveBlock)]
    generators = [g for g in (getattr(mode, "generator", None) for mode in modes) if g is not None]
    states = [generator.get_state() for generator in generators]
    devices = {buffer.device for buffer in net.parameters() if buffer.is_cuda}
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
