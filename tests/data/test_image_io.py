"""Image files of all kinds."""

import numpy as np
import pytest
import torch
from PIL import Image

from torchpact_recipes.data import DataError, load_sample, read_picture

COLOURS = np.array([[[255, 0, 0], [0, 255, 0]], [[0, 0, 255], [9, 9, 9]]], dtype=np.uint8)


@pytest.fixture
def write(tmp_path):
    def save(picture, name="a.png", **options):
        picture.save(tmp_path / name, **options)
        return tmp_path / name

    return save


def test_an_image_of_the_right_size_is_read_bit_by_bit(write):
    pixels = load_sample("test").images[7]
    path = write(Image.fromarray(pixels.permute(1, 2, 0).numpy()))
    assert torch.equal(read_picture(path), pixels)


def test_of_others_it_is_the_square_in_the_middle(write):
    wide = np.zeros((40, 200, 3), dtype=np.uint8)
    wide[:, 80:120] = 200
    found = read_picture(write(Image.fromarray(wide)), size=20)
    assert found.shape == (3, 20, 20)
    assert (found == 200).all()


@pytest.mark.parametrize(
    ("picture", "value"),
    [
        (Image.new("L", (32, 32), 77), (77, 77, 77)),
        (Image.new("1", (32, 32), 1), (255, 255, 255)),
        (Image.new("I;16", (32, 32), 77 * 256 + 3), (77, 77, 77)),
        (Image.new("RGBA", (32, 32), (10, 20, 30, 255)), (10, 20, 30)),
        (Image.new("RGBA", (32, 32), (10, 20, 30, 0)), (255, 255, 255)),
        (Image.new("LA", (32, 32), (50, 255)), (50, 50, 50)),
        (Image.new("RGB", (32, 32), (10, 20, 30)).quantize(4), (10, 20, 30)),
        (Image.new("RGB", (1, 500), (10, 20, 30)), (10, 20, 30)),
    ],
    ids=["grey", "bits", "16 bits", "opaque", "transparent", "grey with alpha", "palette", "thin"],
)
def test_any_kind_of_colour_becomes_rgb(write, picture, value):
    assert read_picture(write(picture)).flatten(1).unique(dim=1).flatten().tolist() == list(value)


def test_a_photo_is_turned_upright_as_its_camera_says(write):
    exif = Image.Exif()
    exif[0x0112] = 3  # upside down
    found = read_picture(write(Image.fromarray(COLOURS), exif=exif), size=2)
    assert torch.equal(found.permute(1, 2, 0), torch.from_numpy(COLOURS[::-1, ::-1].copy()))


def test_what_cannot_be_read_is_told_in_one_line(write, tmp_path):
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    whole = write(Image.fromarray(noise), "whole.png").read_bytes()
    (tmp_path / "half.png").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "text.png").write_text("not an image")
    (tmp_path / "empty.png").touch()
    write(Image.new("1", (10_000, 5_001)), "huge.png")
    write(Image.new("1", (20_000, 20_000)), "bomb.png")
    write(Image.new("F", (32, 32)), "float.tif")
    for name, message in {
        "none.png": "no such file",
        ".": "expected an image file, got a folder",
        "half.png": "not an image that can be read (image file is truncated",
        "text.png": "not an image",
        "empty.png": "not an image",
        "huge.png": "expected at most 50 megapixels, got 10000×5001 pixels",
        "bomb.png": "expected at most 50 megapixels",
        "float.tif": "expected 8 or 16 bits a value, got floating point",
    }.items():
        with pytest.raises(DataError) as caught:
            read_picture(tmp_path / name)
        assert str(caught.value).startswith(f"{tmp_path / name}: ")
        assert message in str(caught.value)
        assert "\n" not in str(caught.value)
