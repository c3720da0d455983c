"""The lines of docs/troubleshooting.md are lines that the program can say."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "troubleshooting.md"
LINES = re.findall(r"^\| `(.*?)` \|", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)


@cache
def texts():
    """All strings of the source; what is filled in is "…"."""
    found = set()
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = [str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values]
                found.add("".join(parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
    return found


def test_the_page_has_lines():
    assert len(LINES) > 25
    assert len(set(LINES)) == len(LINES)


@pytest.mark.parametrize("line", LINES)
def test_a_line_of_the_page_is_in_the_source(line):
    parts = [re.escape(part) for part in line.split("…")]
    assert max(map(len, parts)) > 6, "a line of placeholders would be found anywhere"
    pattern = re.compile(".*".join(parts), flags=re.DOTALL)
    assert any(pattern.search(text) for text in texts())


def test_a_line_that_nobody_says_would_be_found_out():
    assert not any("expected a sunny day" in text for text in texts())
