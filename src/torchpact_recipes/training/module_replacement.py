"""Layers of a network replaced by others that share their parameters and buffers."""

from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn

M = TypeVar("M", bound=nn.Module)


def with_class(module: nn.Module, kind: type[M]) -> M:
    """Return a module of another class with the settings, parameters, buffers and submodules of this one.

    Args:
        module: What is shared; it stays as it is.
        kind: A class that has the attributes of the module's, such as a subclass.

    Example:
        >>> linear = nn.Linear(2, 3)
        >>> other = with_class(linear, nn.modules.linear.NonDynamicallyQuantizableLinear)
        >>> other.weight is linear.weight, type(linear) is nn.Linear
        (True, True)

    """
    made = kind.__new__(kind)
    state: dict[str, Any] = vars(module)
    # the module's own registries: what is registered with one later is not with the other
    vars(made).update(
        {name: value.copy() if isinstance(value, dict) else value for name, value in state.items()}
    )
    return made


def replace_modules(model: M, replacement: Callable[[nn.Module], nn.Module]) -> M:
    """Replace layers of a model, in their places.

    Args:
        model: It is changed, but for itself.
        replacement: Returns what takes the place of a layer: another one, or the layer itself. It is asked
            once about each, of submodules first.

    Returns:
        The model, or what takes its place.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
        >>> replace_modules(net, lambda layer: nn.ReLU() if isinstance(layer, nn.Tanh) else layer)[1]
        ReLU()

    """
    known: dict[nn.Module, nn.Module] = {}

    def visit(module: nn.Module) -> nn.Module:
        if module not in known:
            for name, child in list(module._modules.items()):  # not named_children, which skips repeated ones
                if child is not None:
                    module.register_module(name, visit(child))
            known[module] = replacement(module)
        return known[module]

    return visit(model)  # type: ignore[return-value]
