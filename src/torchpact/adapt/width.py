"""The width of the hidden state of a run of layers."""

from torch import Tensor, nn

from torchpact.adapt.find import FoundRun
from torchpact.core.call_args import CallArgs


def state_width(net: nn.Module, run: FoundRun, example: CallArgs | None) -> int:
    """Return the features, or channels, of the state that the layers of a run pass on.

    Args:
        net: The network.
        run: The run.
        example: A call of the network, which is run where nothing else tells the width.

    Raises:
        ValueError: It cannot be told.

    """
    if run.family is not None:
        return run.family.width(run.layers[-1])
    if example is not None:
        return _seen(net, run, example)
    norms = [m for m in run.layers[-1].modules() if isinstance(m, nn.LayerNorm | nn.RMSNorm)]
    sizes = {int(norm.normalized_shape[-1]) for norm in norms}
    if len(sizes) == 1:
        return sizes.pop()
    raise ValueError(
        f"expected layers that tell the width of their state in {run.name!r}, got "
        f"{type(run.layers[-1]).__name__}, of which nothing is known: pass example="
    )


def _seen(net: nn.Module, run: FoundRun, example: CallArgs) -> int:
    import torch

    widths: list[int] = []

    def look(_layer: nn.Module, _args: object, output: object) -> None:
        state = output[0] if isinstance(output, tuple) else output
        if isinstance(state, Tensor):
            widths.append(state.size(1) if state.dim() == 4 else state.size(-1))

    handle = run.layers[-1].register_forward_hook(look)
    training = net.training
    try:
        with torch.no_grad():
            example.call(net.eval())
    finally:
        net.train(training)
        handle.remove()
    if not widths:
        raise ValueError(f"expected layers of {run.name!r} to return a tensor on the example, got none")
    return widths[0]
