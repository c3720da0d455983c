"""A copy of somebody's network to run in its place, and what a trial must not change of it."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from torchpact.checks import one_line
from torchpact.core.block import AdaptiveBlock
from torchpact.core.modes import Mode
from torchpact.engines.graphs import generators_of, restored
from torchpact.flops.call_capture import tensors_in


def copied(net: nn.Module, mode: Mode | None, details: bool | None) -> nn.Module:
    """Return a copy in evaluation, and in a mode; modes stay the same objects, for generators are theirs."""
    if any(getattr(module, "_deployed", False) is True for module in net.modules()):
        raise TypeError("expected a model, got what is deployed: deploy the model that it was made of")
    known: dict[int, Any] = {id(b.mode): b.mode for b in net.modules() if isinstance(b, AdaptiveBlock)}
    for module in net.modules():
        # computed with gradients, as ponders that are kept for a loss are: such cannot be copied
        known |= {id(x): x.detach().clone() for x in tensors_in(vars(module)) if not x.is_leaf}
    try:
        own = copy.deepcopy(net, known).eval()
    except Exception as error:  # whatever somebody keeps in a module
        raise TypeError(
            f"expected a network that can be copied, got a {type(net).__name__} with what cannot: "
            f"{one_line(error)}"
        ) from error
    for block in (module for module in own.modules() if isinstance(module, AdaptiveBlock)):
        block.mode, block.details = mode or block.mode, block.details if details is None else details
    for parameter in own.parameters():
        parameter.requires_grad_(False)
    return own


@contextmanager
def kept(*nets: nn.Module) -> Iterator[None]:
    """Leave buffers, and the generators that modes draw from, as they were, and torch's own."""
    modules = [module for net in nets for module in net.modules()]
    buffers = [(buffer, buffer.clone()) for net in nets for buffer in net.buffers()]
    generators = generators_of(module.mode for module in modules if isinstance(module, AdaptiveBlock))
    devices = {parameter.device for net in nets for parameter in net.parameters() if parameter.is_cuda}
    try:
        with torch.random.fork_rng(devices), restored(generators):
            yield
    finally:
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
