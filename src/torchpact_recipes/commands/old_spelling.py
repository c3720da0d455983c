"""``torchpact train OUT``, the spelling before ``train images | text | sequence``: to be removed."""

import os
import sys


def current_spelling(arguments: list[str]) -> list[str]:
    """Return the arguments as they are spelled now, after a line about it.

    >>> current_spelling(["runs/a", "--task", "sort", "--tau", "0.1"])
    ['sequence', 'runs/a', '--task', 'sort', '--tau', '0.1']
    >>> current_spelling(["--method", "plain", "runs/a"])
    ['images', '--method', 'plain', 'runs/a']
    """
    words = [
        part for each in arguments for part in (each.split("=", 1) if each.startswith("--task=") else [each])
    ]
    kind = "images"
    if "--task" in words:
        at, kind = words.index("--task"), "sequence"
        if words[at + 1 : at + 2] == ["enwik8"]:
            del words[at : at + 2]
            kind = "text"
    if os.environ.get("RANK", "0") == "0":  # the first process speaks for all
        print(f"`torchpact train OUT` is now `torchpact train {kind} OUT`", end="; ", file=sys.stderr)
        print("the old spelling works until the next release", file=sys.stderr)
    return [kind, *words]
