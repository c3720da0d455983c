"""Steps and heads as users give them: modules or plain callables, one or a list."""

import copy
from collections.abc import Callable, Iterable
from functools import partial
from types import CellType, FunctionType, MethodType
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
        memo[id(self)] = made = self.__class__.__new__(self.__class__)
        state = dict(self.__dict__)
        made.__dict__["function"] = _copied(state.pop("function"), memo)
        made.__dict__.update(copy.deepcopy(state, memo))
        return made

    def extra_repr(self) -> str:
        return getattr(self.function, "__qualname__", repr(self.function))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    """Return a copy of a callable, or of what it holds: modules are copied, and functions that reach any."""
    if id(value) in memo:
        return memo[id(value)]
    if not _reaches_module(value, set()):
        return value
    if isinstance(value, FunctionType):
        cells = tuple(CellType() for _ in value.__closure__ or ())
        made = FunctionType(value.__code__, value.__globals__, value.__name__, None, cells)
        memo[id(value)] = made  # before what it encloses, which may be itself
        for cell, old in zip(cells, value.__closure__ or (), strict=True):
            if (held := _held(old)) is not old:
                cell.cell_contents = _copied(held, memo)
        made.__defaults__ = _copied(value.__defaults__, memo)
        made.__kwdefaults__ = _copied(value.__kwdefaults__, memo)
        made.__dict__.update(vars(value))
        made.__qualname__ = value.__qualname__
        return made
    if isinstance(value, partial):
        arguments = [_copied(each, memo) for each in value.args]
        return partial(_copied(value.func, memo), *arguments, **_copied(value.keywords, memo))
    if isinstance(value, dict):
        return {key: _copied(each, memo) for key, each in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_copied(each, memo) for each in value)
    return copy.deepcopy(value, memo)


def _reaches_module(value: Any, seen: set[int]) -> bool:
    """Whether a value is a module or a parameter, or holds one somewhere."""
    if isinstance(value, nn.Module | nn.Parameter):
        return True
    if id(value) in seen:
        return False
    seen.add(id(value))
    held: list[Any] = []
    if isinstance(value, FunctionType):
        held = [_held(cell) for cell in value.__closure__ or ()]
        held += [value.__defaults__, value.__kwdefaults__]
    elif isinstance(value, MethodType):
        held = [value.__self__]
    elif isinstance(value, partial):
        held = [value.func, value.args, value.keywords]
    elif isinstance(value, dict):
        held = [*value.values()]
    elif isinstance(value, tuple | list):
        held = [*value]
    return any(_reaches_module(each, seen) for each in held)


def _held(cell: CellType) -> Any:
    """Return what a cell has, or the cell itself while it is empty."""
    try:
        return cell.cell_contents
    except ValueError:
        return cell


def as_module(function: Callable[..., Any]) -> nn.Module:
    """Return a callable as a module."""
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
    """Whether a step takes the mask of active positions, as ``gate``."""
    return bool(getattr(step, "gated", False))


def is_indexed(step: Any) -> bool:
    """Whether a step takes the number of its iteration, as ``iteration``."""
    return bool(getattr(step, "indexed", False))
