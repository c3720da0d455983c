"""The table of engines. To add one, write a file with a subclass of Engine, and register an instance."""

from collections.abc import Iterable

from torchpact.engines.base import Engine

ENGINES: dict[str, Engine] = {}
"""All engines by name, in the order in which they are tried."""


def register_engine(engine: Engine) -> Engine:
    """Enter an engine into the table, or put it in the place of one with its name.

    Args:
        engine: What ``deploy`` may choose from then on.

    Returns:
        The engine.

    """
    ENGINES[engine.name] = engine
    return engine


def names_among(engines: Iterable[str] | None, device: str) -> list[str]:
    """Return the names that were asked for, each known; if none were, those for a type of device.

    Args:
        engines: Names of engines, or None.
        device: The type of device, such as "cpu".

    Raises:
        TypeError: A single string was given.
        ValueError: A name is not known.

    """
    if isinstance(engines, str):
        raise TypeError(f"expected a list of engines, got the string {engines!r}")
    if engines is None:
        return [name for name, e in ENGINES.items() if device in e.devices and not e.on_request]
    names = [*engines]
    for name in names:
        if name not in ENGINES:
            raise ValueError(f"expected engines among {', '.join(ENGINES)}; got {name!r}")
    return names
