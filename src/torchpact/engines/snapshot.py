"""A copy of a network to deploy, and what a trial run must leave as it was."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from torchpact.checks import one_line
from torchpact.core.call_args import tensors_in
from torchpact.core.frozen import FrozenModule
from torchpact.core.halting_module import HaltingModule
from torchpact.core.modes import Mode
from torchpact.engines.graphs import generators_of, restored


def snapshot(net: nn.Module, mode: Mode | None = None, details: bool | None = None) -> nn.Module:
    """Return a copy of a network in evaluation, whose parameters need no gradients.

    Args:
        net: The network; it stays as it is.
        mode: The mode of its blocks; by default each keeps its own, the same object, for its generator.
        details: Whether blocks keep probabilities; by default as they are.

    Returns:
        The copy.

    Raises:
        TypeError: The network is a deployed one, or cannot be copied.

    """
    if any(isinstance(module, FrozenModule) for module in net.modules()):
        raise TypeError("expected a model, got what is deployed: deploy the model that it was made of")
    known: dict[int, Any] = {id(b.mode): b.mode for b in net.modules() if isinstance(b, HaltingModule)}
    for module in net.modules():
        # computed with gradients, as ponders that are kept for a loss are: such cannot be copied
        known |= {id(x): x.detach().clone() for x in tensors_in(vars(module)) if not x.is_leaf}
    try:
        own = copy.deepcopy(net, known).eval()
    except Exception as error:  # whatever a user keeps in a module
        raise TypeError(
            f"expected a network that can be copied, got a {type(net).__name__} with what cannot: "
            f"{one_line(error)}"
        ) from error
    for block in (module for module in own.modules() if isinstance(module, HaltingModule)):
        block.mode, block.details = mode or block.mode, block.details if details is None else details
    for parameter in own.parameters():
        parameter.requires_grad_(False)
    return own


@contextmanager
def left_as_it_was(*nets: nn.Module) -> Iterator[None]:
    """Put back, in the end, the buffers of networks, the generators that modes draw from, and torch's own."""
    modules = [module for net in nets for module in net.modules()]
    buffers = [(buffer, buffer.clone()) for net in nets for buffer in net.buffers()]
    generators = generators_of(module.present_mode for module in modules if isinstance(module, HaltingModule))
    devices = {parameter.device for net in nets for parameter in net.parameters() if parameter.is_cuda}
    try:
        with torch.random.fork_rng(devices), restored(generators):
            yield
    finally:
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
