"""What mkdocs does besides: typesets formulas, and takes files along that pages link to outside of docs/.

Formulas become MathML when the site is built, so that pages need no script and no other server. A link to
``../benchmarks/adapted.csv`` works in the repository as it is; the site gets a copy of the file.
"""

import re
from html import unescape
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.structure.files import File

FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', flags=re.DOTALL)
OUTSIDE = re.compile(r"(?<=\]\()(?:\.\./)+([\w./-]+\.(?:csv|py|md|json))(?=[)#])")
DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Let links to files of the repository outside of docs/ lead to copies of them."""
    here = (DOCS / page.file.src_uri).parent

    def link(match: re.Match[str]) -> str:
        target = (here / match[0]).resolve()
        if target.is_relative_to(DOCS) or not target.is_file():
            return match[0]
        name = f"files/{target.relative_to(ROOT)}"
        if target.suffix == ".md":
            name += ".txt"  # as it stands in the repository, not as a page
        if files.get_file_from_path(name) is None:
            files.append(File.generated(config, name, abs_src_path=str(target)))
        depth: int = page.file.src_uri.count("/")
        return "../" * depth + name

    return OUTSIDE.sub(link, markdown)


def on_page_content(html: str, **kwargs: Any) -> str:
    """Replace what pymdownx.arithmatex has marked in a page."""

    def typeset(match: re.Match[str]) -> str:
        tag, formula = match.groups()
        mathml: str = convert(unescape(formula).strip(), display="block" if tag == "div" else "inline")
        return f'<div class="formula">{mathml}</div>' if tag == "div" else mathml

    return FORMULA.sub(typeset, html)
