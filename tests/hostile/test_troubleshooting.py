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


TELLING = 15
"""Letters without which a line could be any other: the reason is then another function's."""


def raised(path):
    """The texts of the errors that a file raises; what is filled in is "…"."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            text = node.exc.args[0]
            if isinstance(text, ast.JoinedStr):
                yield "".join(str(x.value) if isinstance(x, ast.Constant) else "…" for x in text.values)
            elif isinstance(text, ast.Constant):
                yield text.value


def rows_for(text):
    """The lines of the page that an error can be looked up by."""
    for line in LINES:
        if len(line.replace("…", "")) < TELLING:
            continue
        if re.search(".*".join(map(re.escape, line.split("…"))), text, flags=re.DOTALL):
            yield line


@pytest.mark.parametrize("room", ["adapt", "budget", "integrations"])
def test_every_error_of_adapting_and_of_budgets_is_on_the_page(room):
    texts = [text for path in (ROOT / "src" / "torchpact" / room).rglob("*.py") for text in raised(path)]
    texts = [text for text in texts if len(text.replace("…", "")) >= TELLING]
    assert len(texts) > (0 if room == "integrations" else 25)
    assert [text for text in texts if not any(rows_for(text))] == []
