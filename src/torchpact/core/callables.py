"""Networks, steps and heads as users give them: modules, compiled ones, or plain callables; one or a list."""

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn


class Function(nn.Module):
    """A plain callable as a module, so that lists of steps can hold both.

    What a function encloses is neither registered nor copied: give a module where there are parameters.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.gated = is_gated(function)
        self.indexed = is_indexed(function)

    def extra_repr(self) -> str:
        """Return the name of the function for ``print``."""
        return getattr(self.function, "__qualname__", repr(self.function))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        return self.function(*args, **kwargs)


def as_module(function: Callable[..., Any]) -> nn.Module:
    """Return a callable as a module."""
    if not callable(function):
        raise TypeError(f"expected a callable, got {type(function).__name__}")
    return function if isinstance(function, nn.Module) else Function(function)


def unwrapped(module: nn.Module) -> Any:
    """Return the callable that a module stands for: itself, or the function that it holds."""
    return module.function if isinstance(module, Function) else module


def as_modules(name: str, given: Any) -> tuple[list[nn.Module], bool]:
    """Return the callables as modules, and whether a single one was given."""
    # A ModuleList defines no forward but is callable; a Sequential is one step, though it iterates
    if isinstance(given, nn.ModuleList) or (isinstance(given, Iterable) and not callable(given)):
        return [as_module(function) for function in given], False
    if callable(given):
        return [as_module(given)], True
    raise TypeError(f"expected {name} to be a callable or a list of them, got {given!r}")


def is_gated(step: Any) -> bool:
    """Whether a step takes the mask of active positions, as ``gate``."""
    return bool(getattr(step, "gated", False))


def is_indexed(step: Any) -> bool:
    """Whether a step takes the number of its iteration, as ``iteration``."""
    return bool(getattr(step, "indexed", False))


def uncompiled(model: nn.Module) -> nn.Module:
    """Return the module that torch.compile was given, or the module itself."""
    inner = getattr(model, "_orig_mod", model)
    return inner if isinstance(inner, nn.Module) else model
