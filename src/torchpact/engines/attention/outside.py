"""Linear layers of a deployed network outside of its runs of layers: poolers, classifiers, output layers.

The output layer of a decoder has as many weights as several of its layers, and is computed for every token.
"""

from collections.abc import Iterable

from torch import Tensor, nn
from torch.nn import functional as F

from torchpact.core.layer_run import LayerRun
from torchpact.engines.attention.linear import PackedLinear, packing_pays
from torchpact.specs.attention import Projection


class PackedModules:
    """Plain linear layers of a copied network, with packed weights where these are faster.

    Args:
        net: The copy.
        inside: Modules that are left alone, with all that is below them, such as layers that an engine runs.

    Example:
        >>> net = nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 2))
        >>> modules = PackedModules(net, [net[2]])
        >>> set(modules.names) <= {"0"}
        True

    """

    def __init__(self, net: nn.Module, inside: Iterable[nn.Module]) -> None:
        runs = [module for module in net.modules() if isinstance(module, LayerRun)]
        skipped = {id(module) for each in (*inside, *runs) for module in each.modules()}
        self.modules = {
            name: (module, _Packed(module))
            for name, module in net.named_modules()
            if type(module) is nn.Linear and id(module) not in skipped and _is_plain(module)
        }

    @property
    def names(self) -> tuple[str, ...]:
        """The names of these layers."""
        return tuple(self.modules)

    def install(self) -> None:
        """Stand in the place of their forward."""
        for module, packed in self.modules.values():
            module.forward = packed  # type: ignore[method-assign, assignment, unused-ignore]

    def remove(self) -> None:
        """Leave the layers as they were."""
        for module, _ in self.modules.values():
            module.__dict__.pop("forward", None)


class _Packed:
    """The forward of a linear layer with packed weights."""

    def __init__(self, linear: nn.Linear) -> None:
        self.weight, self.bias = linear.weight.detach(), linear.bias
        self.packed = PackedLinear(Projection.of(linear))

    def __call__(self, input: Tensor) -> Tensor:
        if input.dtype != self.weight.dtype or not input.numel() or input.device != self.weight.device:
            return F.linear(input, self.weight, self.bias)
        return self.packed(input.reshape(-1, input.size(-1))).view(*input.shape[:-1], -1)


def _is_plain(linear: nn.Linear) -> bool:
    """Whether a layer is on a CPU, has weights of its own, and is called as its class says."""
    weight = linear._parameters.get("weight")
    known = weight is not None and "forward" not in vars(linear) and weight.device.type == "cpu"
    return known and weight is not None and packing_pays(weight.dtype)
