"""Configurations read back from plain values."""

from collections.abc import Callable
from dataclasses import fields
from typing import Any, TypeVar

C = TypeVar("C")


def from_plain(kind: type[C], network: Callable[..., object], values: dict[str, Any]) -> C:
    """Build a configuration of this ``kind``, a dataclass with a ``network``, from what JSON holds of it."""
    known = {f.name for f in fields(kind)}  # type: ignore[arg-type]
    if unknown := sorted(set(values) - known):
        raise ValueError(f"expected settings among {', '.join(sorted(known))}; got {', '.join(unknown)}")
    # JSON has no tuples
    made: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in dict(values).items()
    }
    if "network" in made:
        made["network"] = network(**made["network"])
    return kind(**made)
