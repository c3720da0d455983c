"""The page itself: one file, with style, script and data inside, that asks nothing of any network."""

import json
import math
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from torchpact.files import write_whole
from torchpact_recipes.report.naming import told_apart

SCRIPTS = ("charts.js", "gallery.js", "main.js")


def write_page(
    path: Path, runs: Sequence[dict[str, Any]], galleries: Sequence[dict[str, Any]], footer: str
) -> Path:
    """Write the page about ``runs``; each gallery has the index of its run as "run"."""
    data = {
        "runs": told_apart(runs),
        "galleries": list(galleries),
        "chosen": _first_adaptive(runs),
        "footer": footer,
    }
    page = part("page.html").replace("/*STYLE*/", part("page.css"))
    page = page.replace("/*SCRIPT*/", "\n".join(part(name) for name in SCRIPTS))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, page.replace("/*DATA*/", embedded(data)).encode(errors="backslashreplace"))
    return path


def embedded(data: Any) -> str:
    r"""JSON that can stand inside a script element: no name in it can end the element.

    Bytes of names that are not of UTF-8 are escaped when it is encoded, as JSON escapes them.

    >>> embedded({"name": "</script>"})
    '{"name":"\\u003c/script>"}'
    """
    text = json.dumps(_finite(data), separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.replace("<", "\\u003c")


def _finite(data: Any) -> Any:
    """The same, with null for what is no number, as the loss of a run that diverged."""
    if isinstance(data, dict):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


def _first_adaptive(runs: Sequence[dict[str, Any]]) -> int:
    """The run to show first: the first adaptive one with results, else the first."""
    told = [i for i, run in enumerate(runs) if run["results"] and run["method"] != "plain"]
    return told[0] if told else 0


def part(name: str) -> str:
    """Return a file of this package, which goes into a page."""
    return (files("torchpact_recipes.report") / name).read_text(encoding="utf-8")
