"""Linear layers of a deployed network outside of its runs: embeddings of patches, poolers, output layers.

The output layer of a decoder has as many weights as several of its layers, and is computed for every token.
"""

from collections.abc import Iterable

from torch import Tensor, nn

from torchpact.core.layer_run import LayerRun
from torchpact.engines.attention.linear import PackedLinear, packing_pays
from torchpact.specs.attention import Projection


class PackedModules:
    """Plain linear layers of a copied network, with packed weights where these are faster.

    A convolution whose patches do not overlap is one, too.

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
        self.modules: dict[str, tuple[nn.Module, _Packed]] = {}
        for name, module in net.named_modules():
            if id(module) in skipped or not _is_plain(module):
                continue
            if type(module) is nn.Linear:
                self.modules[name] = module, _Packed(module)
            elif type(module) is nn.Conv2d and _of_patches(module):
                self.modules[name] = module, _PackedPatches(module)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of these layers."""
        return tuple(self.modules)

    def install(self) -> None:
        """Stand in the place of their forward."""
        for module, packed in self.modules.values():
            module.forward = packed

    def remove(self) -> None:
        """Leave the layers as they were."""
        for module, _ in self.modules.values():
            module.__dict__.pop("forward", None)


class _Packed:
    """The forward of a linear layer with packed weights."""

    def __init__(self, module: nn.Linear | nn.Conv2d) -> None:
        self.weight, self.otherwise = module.weight.detach(), type(module).forward.__get__(module)
        self.packed = PackedLinear(Projection(self.weight.flatten(1), module.bias))

    def __call__(self, input: Tensor) -> Tensor:
        weight = self.weight
        if input.dtype != weight.dtype or not input.numel() or input.device != weight.device:
            return self.otherwise(input)  # type: ignore[no-any-return]
        return self.product(input)

    def product(self, x: Tensor) -> Tensor:
        """Return the outputs for the last dimension."""
        return self.packed(x.reshape(-1, x.size(-1))).view(*x.shape[:-1], -1)


class _PackedPatches(_Packed):
    """The forward of a convolution of patches that do not overlap."""

    def product(self, x: Tensor) -> Tensor:
        """Return maps, (batch, outputs, rows, columns) of patches."""
        if x.dim() != 4:
            return self.otherwise(x)  # type: ignore[no-any-return]
        outputs, channels, high, wide = self.weight.shape
        rows, columns = x.size(2) // high, x.size(3) // wide
        x = x[..., : rows * high, : columns * wide].unflatten(3, (columns, wide)).unflatten(2, (rows, high))
        patches = x.permute(0, 2, 4, 1, 3, 5).reshape(-1, channels * high * wide)
        return self.packed(patches).view(-1, rows, columns, outputs).permute(0, 3, 1, 2)


def _of_patches(convolution: nn.Conv2d) -> bool:
    kernel = convolution.kernel_size
    rest = convolution.groups, *convolution.dilation
    padding = convolution.padding in ((0, 0), "valid") and convolution.padding_mode == "zeros"
    return convolution.stride == kernel and set(rest) == {1} and padding


def _is_plain(module: nn.Module) -> bool:
    """Whether a layer is on a CPU, has weights of its own, and is called as its class says."""
    weight = module._parameters.get("weight")
    if weight is None or "forward" in vars(module) or weight.device.type != "cpu":
        return False
    return packing_pays(weight.dtype)
