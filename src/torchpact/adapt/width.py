"""The hidden state of a run of layers: how wide it is, and whether it is a map of pixels."""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from torchpact.adapt.find import FoundRun
from torchpact.core.call_args import CallArgs


class StateKind(NamedTuple):
    """What is known of the state that the layers of a run pass on."""

    width: int
    """Its features, or channels."""
    is_map: bool
    """Whether it is a map (batch, channels, height, width)."""


def state_kind(net: nn.Module, run: FoundRun, example: CallArgs | None) -> StateKind:
    """Return what the state of a run is: by its family, by a call, or by the parameters of the last layer.

    Args:
        net: The network.
        run: The run.
        example: A call of the network, which is run where no family tells the width.

    Raises:
        ValueError: It cannot be determined.

    """
    layer = run.layers[-1]
    if run.family is not None:
        return StateKind(run.family.width(layer), "pixel" in run.family.per)
    if example is not None:
        return _seen(net, run, example)
    # norms of heads, of queries and keys, are further down
    sizes = _normalised(layer.children()) or _normalised(layer.modules())
    convolutions = [m for m in layer.modules() if isinstance(m, nn.Conv2d)]
    channels = {size for m in convolutions for size in (m.in_channels, m.out_channels)}
    if len(sizes) == 1 and not convolutions:
        return StateKind(sizes.pop(), is_map=False)
    if len(channels) == 1 and not sizes:
        return StateKind(channels.pop(), is_map=True)
    raise ValueError(
        f"expected layers whose norms or convolutions agree on the width of the state in {run.name!r}, got "
        f"{type(layer).__name__}: pass example="
    )


def _normalised(modules: Iterable[nn.Module]) -> set[int]:
    """Return the sizes of what layer norms and RMS norms among modules normalise, by whatever package.

    >>> _normalised([nn.LayerNorm(8), nn.BatchNorm1d(4), nn.Linear(3, 3)])
    {8}
    """
    sizes = set()
    for module in modules:
        if isinstance(module, nn.LayerNorm | nn.RMSNorm):
            sizes.add(int(module.normalized_shape[-1]))
            continue
        shapes = {tuple(parameter.shape) for parameter in module.parameters()}
        named = type(module).__name__.endswith(("LayerNorm", "RMSNorm"))
        if named and len(shapes) == 1 and len(shape := shapes.pop()) == 1:
            sizes.add(shape[0])
    return sizes


def _seen(net: nn.Module, run: FoundRun, example: CallArgs) -> StateKind:
    """Return the kind of the state that the last layer gives on an example."""
    states: list[Tensor] = []

    def look(_layer: nn.Module, _args: object, output: object) -> None:
        state = output[0] if isinstance(output, tuple | list) and output else output
        if isinstance(state, Tensor) and state.dim():
            states.append(state)

    training = [(module, module.training) for module in net.modules()]
    handle = run.layers[-1].register_forward_hook(look)
    try:
        with torch.no_grad():
            example.call(net.eval())
    finally:
        handle.remove()
        for module, before in training:
            module.training = before
    if not states:
        raise ValueError(
            f"expected the layers of {run.name!r} to return a tensor on the example, got none: leave this "
            "run out by where="
        )
    is_map = states[0].dim() == 4
    return StateKind(states[0].size(1 if is_map else -1), is_map)
