"""Steps and heads as users give them: modules or plain callables, one or a list."""

import copy
from collections.abc import Callable, Iterable
from types import CellType, FunctionType
from typing import Any

from torch import nn


class _Function(nn.Module):
    """A plain callable in the clothes of a module, so that lists of steps can hold both."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.gated = is_gated(function)
        self.indexed = is_indexed(function)

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Function":
        memo[id(self)] = made = _Function(_copied(self.function, memo))
        made.training = self.training
        return made

    def extra_repr(self) -> str:
        return getattr(self.function, "__qualname__", repr(self.function))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def _copied(function: Callable[..., Any], memo: dict[int, Any]) -> Callable[..., Any]:
    """Return a copy of a callable: a plain function's is one whose modules are copies, which it encloses."""
    if not isinstance(function, FunctionType) or not function.__closure__:
        return copy.deepcopy(function, memo)
    cells = tuple(
        CellType(copy.deepcopy(cell.cell_contents, memo)) if _has_module(cell) else cell
        for cell in function.__closure__
    )
    made = FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, cells
    )
    made.__kwdefaults__, made.__dict__ = function.__kwdefaults__, dict(vars(function))
    made.__qualname__ = function.__qualname__
    return made


def _has_module(cell: CellType) -> bool:
    try:
        return isinstance(cell.cell_contents, nn.Module)
    except ValueError:  # empty as yet
        return False


def as_module(function: Callable[..., Any]) -> nn.Module:
    if not callable(function):
        raise TypeError(f"expected a callable, got {type(function).__name__}")
    return function if isinstance(function, nn.Module) else _Function(function)


def as_modules(name: str, given: Any) -> tuple[list[nn.Module], bool]:
    """Return the callables as modules, and whether a single one was given."""
    # A ModuleList defines no forward but is callable; a Sequential is one step, though it iterates
    if isinstance(given, nn.ModuleList) or (isinstance(given, Iterable) and not callable(given)):
        return [as_module(function) for function in given], False
    if callable(given):
        return [as_module(given)], True
    raise TypeError(f"expected {name} to be a callable or a list of them, got {given!r}")


def is_gated(step: Any) -> bool:
    return bool(getattr(step, "gated", False))


def is_indexed(step: Any) -> bool:
    return bool(getattr(step, "indexed", False))
