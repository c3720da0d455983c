"""The page of ``torchpact demo --text``: texts whose words are shaded by the layers that they took."""

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

from torchpact.files import write_whole
from torchpact_recipes.report.page import part


class Shown(NamedTuple):
    """What the page tells."""

    title: str
    lead: str
    tiles: Sequence[tuple[str, str]]
    """A number and what it is; the first stands out."""
    texts: Sequence[Sequence[tuple[str, int]]]
    """The words of each text, and the layers of each; 0 of what was cut off."""
    layers: int
    """Of the network."""
    shares: Sequence[float]
    """Of tokens that leave after each layer."""
    most: Sequence[tuple[str, float, int]]
    """Words, their mean layers, and how often they occur."""
    least: Sequence[tuple[str, float, int]]
    footer: str


def write_text_page(path: Path, shown: Shown) -> Path:
    """Write the page, one file that asks nothing of any network, and return its path.

    Args:
        path: Where to.
        shown: What it tells.

    """
    page = part("text.html").replace("/*STYLE*/", part("page.css"))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, page.replace("<!--BODY-->", "\n".join(_body(shown))).encode())
    return path


def _body(shown: Shown) -> Iterable[str]:
    yield f'<h1>{escape(shown.title)}</h1><p class="lead">{escape(shown.lead)}</p>'
    tiles = [
        f'<div class="{kind}"><b>{escape(number)}</b><span>{escape(what)}</span></div>'
        for kind, (number, what) in zip(
            ["tile main", *["tile"] * len(shown.tiles)], shown.tiles, strict=False
        )
    ]
    yield f'<div class="tiles">{"".join(tiles)}</div>'
    yield '<section><h2>Which words get how many layers</h2><p class="scale note">layers'
    yield "".join(_word(f" {n} ", n, shown.layers, digit=False) for n in range(1, shown.layers + 1))
    yield '</p><div class="reviews">'
    for text in shown.texts:
        taken = [layers for _, layers in text if layers]
        mean = f"{sum(taken) / max(len(taken), 1):.1f} layers a word"
        words = "".join(_word(word, layers, shown.layers) for word, layers in text)
        yield f'<p class="review">{words}<small>{mean}</small></p>'
    yield "</div></section><section><h2>After which layer tokens leave</h2>"
    yield f'<div class="bars">{"".join(_bars(shown.shares))}</div></section>'
    yield '<section><h2>Words by layers</h2><p class="note">Words that occur five times or more.</p>'
    yield '<div class="columns">'
    for title, rows in (("Most", shown.most), ("Least", shown.least)):
        cells = "".join(
            f'<tr><td>{escape(word)}</td><td class="number">{mean:.2f}</td>'
            f'<td class="number">{count}</td></tr>'
            for word, mean, count in rows
        )
        head = '<tr><th>word</th><th class="number">layers</th><th class="number">times</th></tr>'
        yield f"<div><h3>{title}</h3><table>{head}{cells}</table></div>"
    yield f'</div></section><footer class="note">{escape(shown.footer)}</footer>'


def _word(word: str, layers: int, most: int, digit: bool = True) -> str:
    if not layers:
        return f'<span class="word cut">{escape(word)}</span>'
    body = word.rstrip()
    gap = " " if len(body) < len(word) else ""
    below = f"<i>{layers}</i>" if digit else ""
    share = (layers - 1) / max(most - 1, 1)
    return f'<span class="word" style="--k:{share:.2f}">{escape(body)}{below}</span>{gap}'


def _bars(shares: Sequence[float]) -> Iterable[str]:
    largest = max(max(shares), 1e-9)
    for layer, share in enumerate(shares, start=1):
        what = f"layer {layer}" if layer < len(shares) else f"layer {layer}, the last"
        width = f"width:{100 * share / largest:.1f}%"
        yield f'<div><span>{what}</span><b style="{width}"></b><span>{share:.0%}</span></div>'
