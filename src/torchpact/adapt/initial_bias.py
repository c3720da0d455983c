"""The bias that heads start with: the largest one at which the relaxed network is still the original."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from torchpact.core.call_args import CallArgs, tensors_in
from torchpact.core.layer_run import LayerRun
from torchpact.core.modes import NeverHalt, Relaxed
from torchpact.core.overrides import use_mode

LOW, HIGH, STEPS = -16.0, 0.0, 12


def bias_within(net: nn.Module, runs: Sequence[LayerRun], example: CallArgs, tolerance: float) -> float:
    """Set the bias of heads by bisection, and return it.

    Args:
        net: The network, with hooks.
        runs: Its runs, whose heads have a ``bias``.
        example: What it is called with.
        tolerance: The relative difference ‖relaxed − original‖ / ‖original‖ that is allowed.

    Raises:
        ValueError: Even the lowest bias does not meet the tolerance.

    """
    training = [(module, module.training) for module in net.modules()]
    net.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=_devices(net)):
            with use_mode(net, NeverHalt()):
                original = _output(example.call(net))

            def difference(bias: float) -> float:
                set_bias(runs, bias)
                torch.manual_seed(0)
                with use_mode(net, Relaxed()):
                    relaxed = _output(example.call(net))
                return float((relaxed - original).norm() / original.norm().clamp(min=1e-12))

            low, high = LOW, HIGH
            if difference(low) > tolerance:
                raise ValueError(
                    f"expected a bias of {LOW} or above to meet the tolerance of {tolerance}, got a relative "
                    f"difference of {difference(low):.2g} there"
                )
            for _ in range(STEPS):
                middle = (low + high) / 2
                low, high = (middle, high) if difference(middle) <= tolerance else (low, middle)
            set_bias(runs, low)
            return low
    finally:
        for module, before in training:
            module.training = before


def check_call(net: nn.Module, example: CallArgs) -> None:
    """Call an adapted network once, in evaluation, so that layers that cannot halt are noticed.

    Args:
        net: The network, with hooks.
        example: What it is called with.

    """
    training = [(module, module.training) for module in net.modules()]
    try:
        with torch.no_grad(), use_mode(net, NeverHalt()):
            example.call(net.eval())
    finally:
        for module, before in training:
            module.training = before


@torch.no_grad()
def set_bias(runs: Sequence[LayerRun], bias: float) -> None:
    """Set the bias of all heads.

    Args:
        runs: Those with the heads.
        bias: The bias.

    """
    for run in runs:
        for head in run.heads:
            assert isinstance(head.bias, Tensor)
            head.bias.fill_(bias)


def _output(returned: object) -> Tensor:
    """Return the first tensor of numbers that is no scalar, in double precision."""
    values = returned.values() if isinstance(returned, dict) else [returned]
    for tensor in tensors_in([*values]):
        if tensor.is_floating_point() and tensor.dim():
            return tensor.double()
    raise ValueError("expected the network to return a tensor of numbers on the example, got none")


def _devices(net: nn.Module) -> list[torch.device]:
    return [*{parameter.device for parameter in net.parameters() if parameter.is_cuda}]
