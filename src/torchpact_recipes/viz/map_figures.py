"""Figures of ponder maps: images beside what networks spent on them, on one colour scale."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import Tensor

from torchpact_recipes.viz.figures import blank
from torchpact_recipes.viz.maps import PonderMaps

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

COLORMAP = "viridis"  # equal steps look equal, in grey too

# In inches. At 200 dots each, 1.12 are 7 dots for each of 32 pixels: all pixels come out alike.
SIDE = 1.12
GAP = 0.06
WIDE = 0.22
"""Between pictures of different images."""
LINE = 0.16
"""Of a title."""
MARGIN = 0.1
BAR = 0.12
LABELS = 0.6
"""To the right of a colour bar."""
NAME = 0.16
"""Of a name, upright beside its image."""
LETTERS = 20
"""Of a name that are shown: as many as an image is high."""


@contextmanager
def compare_maps(
    images: Tensor,
    networks: Sequence[tuple[str, PonderMaps]],
    *,
    across: int = 2,
    names: Sequence[str] = (),
) -> Iterator["Figure"]:
    r"""Each image and the sum of its maps by every network, ``across`` images in a row (fig. 6).

    ``networks`` are titles and maps, which share one colour scale; ``names`` are those of the images,
    if given.

    >>> image = torch.zeros(1, 3, 2, 2, dtype=torch.uint8)
    >>> maps = PonderMaps([torch.ones(1, 2, 2)], torch.ones(1, 2, 2), "expected units")
    >>> with compare_maps(image, [("PSACT", maps)]) as figure:
    ...     [axes.get_title() for axes in figure.axes if axes.get_title()]
    ['image', 'PSACT\nexpected units']
    """
    totals = [maps.total for _, maps in networks]
    limits = _limits(totals, max(len(maps.blocks) for _, maps in networks))
    titles = ["image", *(f"{title}\n{maps.quantity}" for title, maps in networks)]
    across = min(across, len(images))
    rows = -(-len(images) // across)
    indent = NAME if names else 0.0
    group = indent + len(titles) * (SIDE + GAP) - GAP
    right = MARGIN + across * (group + WIDE)
    with _sheet(right + BAR + LABELS, rows, lines=1 + max(title.count("\n") for title in titles)) as sheet:
        for n, (image, *values) in enumerate(zip(images, *totals, strict=True)):
            row, place = divmod(n, across)
            left = MARGIN + place * (group + WIDE) + indent
            if names:
                sheet.name(names[n], left, row)
            for k, (picture, title) in enumerate(zip([image, *values], titles, strict=True)):
                shown = sheet.show(picture, left + k * (SIDE + GAP), row, limits, title if row == 0 else "")
        sheet.bar(shown, right, "summed over blocks")
        yield sheet.figure


@contextmanager
def show_blocks(images: Tensor, maps: PonderMaps, *, names: Sequence[str] = ()) -> Iterator["Figure"]:
    """Each image beside the map of every block, on one colour scale, and their sum, on another."""
    limits, total_limits = _limits(maps.blocks, 1), _limits([maps.total], len(maps.blocks))
    titles = ["image", *(f"block {k}" for k in range(1, len(maps.blocks) + 1))]
    lefts = [MARGIN + (NAME if names else 0) + k * (SIDE + GAP) for k in range(len(titles))]
    bar = lefts[-1] + SIDE + GAP
    last = bar + BAR + LABELS
    with _sheet(last + SIDE + GAP + BAR + LABELS, len(images), lines=1) as sheet:
        for row, (image, *values, total) in enumerate(zip(images, *maps.blocks, maps.total, strict=True)):
            if names:
                sheet.name(names[row], lefts[0], row)
            for left, picture, title in zip(lefts, [image, *values], titles, strict=True):
                shown = sheet.show(picture, left, row, limits, "" if row else title)
            summed = sheet.show(total, last, row, total_limits, "" if row else "sum over blocks")
        sheet.bar(shown, bar, maps.quantity)
        sheet.bar(summed, last + SIDE + GAP, maps.quantity)
        yield sheet.figure


class _Sheet:
    """Rows of pictures at places given in inches."""

    def __init__(self, figure: "Figure", rows: int) -> None:
        self.figure, self.rows = figure, rows

    def show(
        self, picture: Tensor, left: float, row: int, limits: tuple[float, float], title: str
    ) -> "AxesImage":
        """Put up a map, or an image of three colours."""
        axes = self._axes(left, MARGIN + (self.rows - 1 - row) * (SIDE + GAP), SIDE, SIDE)
        axes.set_axis_off()
        axes.set_title(title, pad=4, fontsize=8, parse_math=False)
        values = (picture.permute(1, 2, 0) if picture.dim() == 3 else picture).cpu().numpy()
        low, high = limits
        return axes.imshow(values, cmap=COLORMAP, vmin=low, vmax=high, interpolation="nearest", aspect="auto")

    def name(self, name: str, left: float, row: int) -> None:
        """Put a name upright to the left of a picture."""
        across, up = self.figure.get_size_inches()
        middle = MARGIN + (self.rows - 1 - row) * (SIDE + GAP) + SIDE / 2
        place = ((left - GAP / 2) / across, middle / up)
        self.figure.text(
            *place, shortened(name), rotation=90, ha="right", va="center", fontsize=7, parse_math=False
        )

    def bar(self, shown: "AxesImage", left: float, label: str) -> None:
        """Put up a colour bar, at most four pictures high."""
        height = min(self.rows, 4) * (SIDE + GAP) - GAP
        top = MARGIN + self.rows * (SIDE + GAP) - GAP
        bar = self.figure.colorbar(shown, cax=self._axes(left, top - height, BAR, height))
        bar.outline.set_visible(False)
        bar.set_label(label, fontsize=8)

    def _axes(self, left: float, bottom: float, width: float, height: float) -> "Axes":
        across, up = self.figure.get_size_inches()
        return self.figure.add_axes((left / across, bottom / up, width / across, height / up))


@contextmanager
def _sheet(width: float, rows: int, lines: int) -> Iterator[_Sheet]:
    """An empty sheet, with room for titles of so many lines."""
    height = MARGIN + rows * (SIDE + GAP) + lines * LINE + GAP
    with blank((round(width, 2), round(height, 2))) as figure:
        yield _Sheet(figure, rows)


def shortened(name: str, letters: int = LETTERS) -> str:
    """A name that is no longer than an image is high; what cannot be printed is a question mark.

    >>> shortened("a-holiday-by-the-sea-2016.jpeg")
    'a-holiday-…2016.jpeg'
    """
    shown = "".join(letter if letter.isprintable() else "?" for letter in name)
    half = letters // 2
    return shown if len(shown) <= letters else f"{shown[:half]}…{shown[1 - half :]}"


def _limits(maps: Sequence[Tensor], span: float) -> tuple[float, float]:
    """The least and the largest value of all, ``span`` apart or more, lest nothing looks like something."""
    low, high = min(float(m.min()) for m in maps), max(float(m.max()) for m in maps)
    return min(low, high - span), high
