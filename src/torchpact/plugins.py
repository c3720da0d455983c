"""What other distributions add to torchpact, by entry points: commands and pretrained weights."""

from importlib.metadata import entry_points
from typing import Any

RECIPES = "pip install torchpact-recipes (from a clone: pip install ./src/torchpact_recipes)"
"""How to get the distribution that has the commands and the weights."""


class CommandError(Exception):
    """A command that cannot go on: the message is one line, ``code`` the exit status of the program."""

    code = 2


def plugins(group: str) -> list[Any]:
    """Return the objects that installed distributions register in a group of entry points.

    Args:
        group: ``"torchpact.commands"`` or ``"torchpact.weights"``.

    Returns:
        The loaded objects, in the order of their names; none where nothing is installed.

    Example:
        >>> plugins("torchpact.nothing")
        []

    """
    return [point.load() for point in sorted(entry_points(group=group), key=lambda point: point.name)]


def pretrained_weights() -> Any:
    """Return the zoo of pretrained networks, an object with ``entries()`` and ``load(name, mode)``.

    Raises:
        ModuleNotFoundError: No installed distribution has pretrained weights.

    """
    found = plugins("torchpact.weights")
    if not found:
        raise ModuleNotFoundError(f"expected pretrained weights to be installed, found none: {RECIPES}")
    return found[0]
