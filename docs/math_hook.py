"""Formulas become MathML when the site is built, so that pages need no script and no other server."""

import re
from html import unescape
from typing import Any

from latex2mathml.converter import convert

FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', flags=re.DOTALL)


def on_page_content(html: str, **kwargs: Any) -> str:
    """Replace what pymdownx.arithmatex has marked in a page."""

    def typeset(match: re.Match[str]) -> str:
        tag, formula = match.groups()
        mathml: str = convert(unescape(formula).strip(), display="block" if tag == "div" else "inline")
        return f'<div class="formula">{mathml}</div>' if tag == "div" else mathml

    return FORMULA.sub(typeset, html)
