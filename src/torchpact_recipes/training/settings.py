"""Fields of configurations: what each means on the command line, and how they are read back from JSON."""

from collections.abc import Callable
from dataclasses import field, fields
from typing import Any, TypeVar

C = TypeVar("C")


def setting(default: Any, help: str, **metadata: Any) -> Any:
    """Return a field with a default value and a help text, which make it an option of ``torchpact train``.

    Args:
        default: The default value.
        help: What the command line says of it.
        metadata: ``option`` is the name of the option, where it is not that of the field; ``flag`` says that
            one to negate it is not needed.

    Example:
        >>> from dataclasses import dataclass
        >>> @dataclass
        ... class Config:
        ...     lr: float = setting(0.1, "Learning rate.")
        >>> Config().lr, fields(Config)[0].metadata["help"]
        (0.1, 'Learning rate.')

    """
    return field(default=default, metadata={"help": help, **metadata})


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
