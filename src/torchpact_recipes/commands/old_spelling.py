"""``torchpact train OUT``, the spelling before ``train images | text | sequence``: to be removed."""

import os
import sys
from collections.abc import Collection
from typing import Any

from typer.core import TyperGroup


def current_spelling(arguments: list[str], commands: Collection[str]) -> list[str]:
    """Return the arguments as they are spelled now; until the next release ``train OUT`` serves too.

    >>> current_spelling(["runs/a", "--task", "sort", "--tau", "0.1"], ["images", "text", "sequence"])
    ['sequence', 'runs/a', '--task', 'sort', '--tau', '0.1']
    >>> current_spelling(["--method", "plain", "runs/a"], ["images", "text", "sequence"])
    ['images', '--method', 'plain', 'runs/a']
    """
    if not arguments or arguments[0] in commands or "--help" in arguments:
        return arguments
    words = [
        part for each in arguments for part in (each.split("=", 1) if each.startswith("--task=") else [each])
    ]
    if "--task" not in words:
        return ["images", *words]
    at = words.index("--task")
    if words[at + 1 : at + 2] == ["enwik8"]:
        return ["text", *words[:at], *words[at + 2 :]]
    return ["sequence", *words]


class TrainGroup(TyperGroup):
    """The group of ``train``, which takes the old spelling too."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse what is given, after a line about it where the spelling is old."""
        current = current_spelling(args, self.commands)
        if current != args and os.environ.get("RANK", "0") == "0":
            kind = current[0]
            print(f"`torchpact train OUT` is now `torchpact train {kind} OUT`", end="; ", file=sys.stderr)
            print("the old spelling works until the next release", file=sys.stderr)
        return super().parse_args(ctx, current)
