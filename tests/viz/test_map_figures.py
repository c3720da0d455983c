"""What the figures show, and that pixels stay pixels."""

import numpy as np
import pytest
import torch
from matplotlib import colormaps
from PIL import Image

from tests.viz.networks import images
from torchpact_recipes.viz import PonderMaps, compare_maps, save, show_blocks
from torchpact_recipes.viz.map_figures import GAP, MARGIN, SIDE

DOTS = 200


def made_up(count, low, high, quantity="expected units"):
    total = torch.linspace(low, high, count * 32 * 32).view(count, 32, 32)
    return PonderMaps([total / 2, total[:, ::2, ::2] / 2], total, quantity)


def pictures(figure):
    return [axes.images[0] for axes in figure.axes if axes.images]


def test_networks_share_one_scale_and_every_picture_is_where_it_belongs():
    pixels, first, second = images(5), made_up(5, 3, 9, "ponder cost"), made_up(5, 6, 15)
    with compare_maps(pixels, [("SACT", first), ("PSACT", second)]) as figure:
        shown = pictures(figure)
    assert len(shown) == 5 * 3
    for n in range(5):
        image, sact, psact = (picture.get_array() for picture in shown[3 * n : 3 * n + 3])
        assert np.array_equal(image, pixels[n].permute(1, 2, 0))
        assert np.array_equal(sact, first.total[n])
        assert np.array_equal(psact, second.total[n])
    limits = {picture.get_clim() for picture in shown}
    assert limits == {(3.0, 15.0)}
    titles = [axes.get_title() for axes in figure.axes if axes.get_title()]
    assert titles == ["image", "SACT\nponder cost", "PSACT\nexpected units"] * 2
    assert figure.axes[-1].get_ylabel() == "summed over blocks"


def test_blocks_share_one_scale_and_the_sum_has_its_own():
    maps = made_up(3, 4, 10)
    with show_blocks(images(3), maps) as figure:
        shown = pictures(figure)
    assert len(shown) == 3 * 4
    assert {picture.get_clim() for n, picture in enumerate(shown) if n % 4 < 3} == {(2.0, 5.0)}
    assert {picture.get_clim() for picture in shown[3::4]} == {(4.0, 10.0)}
    assert np.array_equal(shown[6].get_array(), maps.blocks[1][1])
    titles = [axes.get_title() for axes in figure.axes if axes.get_title()]
    assert titles == ["image", "block 1", "block 2", "sum over blocks"]


def test_names_stand_beside_their_images():
    names = ["a.png", "$x$.png", "a-holiday-by-the-sea-2016.jpeg"]
    shown = ["a.png", "$x$.png", "a-holiday-…2016.jpeg"]
    maps = made_up(3, 3, 9)
    for sheet, columns in (
        (compare_maps(images(3), [("PSACT", maps)], names=names), 2),
        (show_blocks(images(3), maps, names=names), 4),
    ):
        with sheet as figure:
            beside = [picture.axes.get_position() for picture in pictures(figure)][::columns]
        assert [text.get_text() for text in figure.texts] == shown
        for text, place in zip(figure.texts, beside, strict=True):
            assert text.get_position()[1] == pytest.approx((place.y0 + place.y1) / 2)
            assert 0 < place.x0 - text.get_position()[0] < 0.03


def test_titles_of_more_lines_have_room():
    heights = []
    for title in ("PSACT", "ResNet-32\nPSACT\nevaluated as ACT"):
        with compare_maps(images(1), [(title, made_up(1, 3, 9))]) as figure:
            figure.draw_without_rendering()
            extents = [axes.title.get_window_extent() for axes in figure.axes]
            assert all(extent.y1 <= figure.bbox.height for extent in extents)
        heights.append(figure.get_size_inches()[1])
    assert heights[1] > heights[0]


def test_maps_that_hardly_differ_are_not_stretched_over_all_colours():
    with compare_maps(images(1), [("PSACT", made_up(1, 9.9, 10.0))]) as figure:
        assert pictures(figure)[1].get_clim() == (8.0, 10.0)


@pytest.mark.parametrize("count", [1, 4])
def test_every_pixel_is_a_square_of_its_colour(tmp_path, count):
    pixels, maps = images(count), made_up(count, 3, 9)
    with compare_maps(pixels, [("PSACT", maps)], across=1) as figure:
        png, pdf = save(figure, tmp_path / "new", "maps")
    assert {path.name for path in (tmp_path / "new").iterdir()} == {"maps.png", "maps.pdf"}
    assert pdf.read_bytes().startswith(b"%PDF")
    sheet = np.asarray(Image.open(png).convert("RGB"))
    side = round(SIDE * DOTS)
    bottom, left = len(sheet) - round(MARGIN * DOTS), round(MARGIN * DOTS)
    seven = np.ones((7, 7, 1), dtype=np.uint8)
    shown = sheet[bottom - side : bottom, left : left + side]
    assert np.array_equal(shown, np.kron(pixels[-1].permute(1, 2, 0), seven))
    left += round((SIDE + GAP) * DOTS)
    shown = sheet[bottom - side : bottom, left : left + side]
    colours = colormaps["viridis"]((maps.total[-1].numpy() - 3) / 6, bytes=True)[..., :3]
    difference = np.abs(shown.astype(int) - np.kron(colours, seven))
    assert difference.max() <= 3  # a neighbouring entry of the colour table, where rounding differs
