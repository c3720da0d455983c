"""Images, and their way into the network: padded, cropped and flipped at random, then standardised.

Everything runs on the images' device in a fixed number of kernels, without a look at any value from
the host, so that a whole training step can be compiled or captured in a CUDA graph.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from torchpact.checks import check_count, readable


@dataclass(frozen=True, eq=False)
class Images:
    """Images as bytes, (N, channels, height, width), and their classes, (N,) int64."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def random(self, count: int, seed: int) -> "Images":
        """Return ``count`` different ones of them, by chance.

        >>> Images(torch.zeros(9, 3, 32, 32, dtype=torch.uint8), torch.arange(9)).random(4, seed=0).labels
        tensor([8, 0, 2, 3])
        """
        if not 1 <= count <= len(self):
            raise ValueError(f"expected 1 to {len(self)} images, got {count}")
        chosen = torch.randperm(len(self), generator=torch.Generator().manual_seed(seed))[:count]
        return Images(self.images[chosen], self.labels[chosen])


def as_input(images: Tensor) -> Tensor:
    """Standardise raw images, and lay them out as a GPU likes them."""
    x = standardize(images)
    return x.contiguous(memory_format=torch.channels_last) if x.is_cuda else x


def standardize(images: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Give each image zero mean and unit variance: (x − mean) / max(std, 1/√pixels).

    Mean and standard deviation are over all channels and positions of an image, in at least single
    precision; the result is rounded to ``dtype``. An image of one colour becomes 0.

    >>> standardize(torch.tensor([[[[0, 10]]]], dtype=torch.uint8))
    tensor([[[[-1.,  1.]]]])
    """
    _check_images(images)
    if not dtype.is_floating_point:
        raise ValueError(f"expected dtype to be a floating point type, got {dtype}")
    x = images.to(torch.promote_types(dtype, torch.float32))
    # Counted from one of its own pixels, an image of little contrast loses no digits to its level
    x = x - x[:, :1, :1, :1]
    x = x - x.mean(dim=(1, 2, 3), keepdim=True)
    std = x.square().mean(dim=(1, 2, 3), keepdim=True).sqrt()
    return (x / std.clamp(min=1 / math.sqrt(math.prod(images.shape[1:])))).to(dtype)


def augment(images: Tensor, generator: torch.Generator | None = None, pad: int = 2) -> Tensor:
    """Shift each image by up to ``pad`` pixels and flip it or not, at random.

    That is: pad by zeros, crop to the old size anywhere, flip left to right with probability ½. The
    ``generator``, on the images' device, makes it reproducible; the default one is what
    torch.compile can trace and CUDA graphs advance by themselves.

    >>> augment(torch.ones(8, 3, 32, 32, dtype=torch.uint8)).shape
    torch.Size([8, 3, 32, 32])
    """
    _check_images(images)
    check_count("pad", pad, minimum=0)
    top, left = torch.randint(2 * pad + 1, (2, len(images)), device=images.device, generator=generator)
    flip = torch.randint(2, (len(images),), device=images.device, generator=generator)
    return _crop_and_flip(images, top, left, flip.bool(), pad)


def crop_and_flip(images: Tensor, top: Tensor, left: Tensor, flip: Tensor, pad: int = 2) -> Tensor:
    """Pad each image by zeros, crop it from row ``top`` and column ``left``, flip it if ``flip``.

    The three have one entry an image; rows and columns are of the padded image, 0 to 2·pad.

    >>> image = torch.tensor([[[[1, 2, 3]]]], dtype=torch.uint8)
    >>> crop_and_flip(image, torch.tensor([1]), torch.tensor([2]), torch.tensor([True]), pad=1)
    tensor([[[[0, 3, 2]]]], dtype=torch.uint8)
    """
    _check_images(images)
    check_count("pad", pad, minimum=0)
    for name, value, dtype in (
        ("top", top, torch.int64),
        ("left", left, torch.int64),
        ("flip", flip, torch.bool),
    ):
        if value.shape != images.shape[:1] or value.dtype != dtype:
            raise ValueError(
                f"expected {name} to be {dtype} of shape {tuple(images.shape[:1])}, "
                f"got {value.dtype} of shape {tuple(value.shape)}"
            )
        if dtype == torch.int64 and readable(value):
            bad = value[(value < 0) | (value > 2 * pad)]
            if len(bad):
                raise ValueError(f"expected {name} in [0, {2 * pad}], got {int(bad[0])}")
    return _crop_and_flip(images, top, left, flip, pad)


def _crop_and_flip(images: Tensor, top: Tensor, left: Tensor, flip: Tensor, pad: int) -> Tensor:
    _, channels, height, width = images.shape
    column = torch.arange(width, device=images.device)
    column = torch.where(flip[:, None], width - 1 - column, column) + left[:, None]
    row = torch.arange(height, device=images.device) + top[:, None]
    index = row[:, :, None] * (width + 2 * pad) + column[:, None, :]
    # One index serves all channels: expand() takes no memory
    index = index.flatten(1).unsqueeze(1).expand(-1, channels, -1)
    padded = F.pad(images, (pad, pad, pad, pad)).flatten(2)
    return padded.gather(2, index).view(images.shape)


def _check_images(images: Tensor) -> None:
    if images.dim() != 4 or 0 in images.shape[1:]:
        raise ValueError(f"expected images of shape (N, channels, height, width), got {tuple(images.shape)}")
