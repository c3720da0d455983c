"""Any image file as a network of ours takes it."""

import warnings
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from torchpact_recipes.data.files import DataError

MOST_PIXELS = 50_000_000


def read_picture(path: Path, size: int = 32) -> Tensor:
    """Return the square in the middle of a picture, resized to ``size``, as bytes (3, size, size).

    Its orientation is that of its EXIF data, transparent parts are white, and of 16 bits the upper 8
    remain. What is no picture, or one of more than 50 megapixels, is refused.

    >>> read_picture(Path("nowhere.png"))
    Traceback (most recent call last):
    torchpact_recipes.data.files.DataError: nowhere.png: no such file
    """
    if not path.is_file():
        got = f"expected an image file, got {'a folder' if path.is_dir() else 'something else'}"
        raise DataError(f"{path}: {got if path.exists() else 'no such file'}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about damage that can be read around, and sizes
            with Image.open(path) as picture:
                # before decoding: a small file may claim to hold a huge picture
                if picture.width * picture.height > MOST_PIXELS:
                    raise DataError(
                        f"{path}: expected at most {MOST_PIXELS // 1_000_000} megapixels, "
                        f"got {picture.width}×{picture.height} pixels"
                    )
                square = _as_rgb(_middle(ImageOps.exif_transpose(picture)))
                resized = square.resize((size, size), Image.Resampling.BICUBIC)
    except DataError:
        raise
    except UnidentifiedImageError:
        raise DataError(f"{path}: not an image") from None
    except Image.DecompressionBombError:
        raise DataError(f"{path}: expected at most {MOST_PIXELS // 1_000_000} megapixels") from None
    except Exception as error:  # of damaged files decoders raise whatever they stumble over
        raise DataError(f"{path}: not an image that can be read ({' '.join(str(error).split())})") from error
    return torch.from_numpy(np.array(resized)).permute(2, 0, 1).contiguous()


def _middle(picture: Image.Image) -> Image.Image:
    side = min(picture.size)
    left, top = (picture.width - side) // 2, (picture.height - side) // 2
    return picture.crop((left, top, left + side, top + side))


def _as_rgb(picture: Image.Image) -> Image.Image:
    if picture.mode == "F":
        raise ValueError("expected 8 or 16 bits a value, got floating point")
    if picture.mode.startswith("I"):  # 16 bits of grey, where convert would clip values above 255
        values = np.asarray(picture).clip(0, 65535) // 256
        return Image.fromarray(values.astype(np.uint8)).convert("RGB")
    if picture.has_transparency_data:
        picture = picture.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture).convert("RGB")
    return picture.convert("RGB")
