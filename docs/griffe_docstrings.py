"""Turns what our docstrings have of reStructuredText into Markdown, for the generated API reference."""

import re
from typing import Any

import griffe

ROLE = re.compile(r":(?:class|func|meth|mod|attr|data|exc|obj):`~?(?:[\w.]*\.)?(\w+)`")


class PlainDocstrings(griffe.Extension):
    """Roles become code, ``Example:`` an examples section, ``::`` an ordinary colon."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rewrite the docstring of one object, where it has one."""
        if obj.docstring is None:
            return
        text = ROLE.sub(r"`\1`", obj.docstring.value)
        text = re.sub(r"^(\s*)Example:$", r"\1Examples:", text, flags=re.MULTILINE)
        obj.docstring.value = re.sub(r"::$", ":", text, flags=re.MULTILINE)
