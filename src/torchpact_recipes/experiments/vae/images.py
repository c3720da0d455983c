"""Binary images: Fashion-MNIST with a threshold, or the bundled sample cut to the same size."""

from pathlib import Path
from typing import Literal

from torch import Tensor

from torchpact_recipes.data import Images, load_fashion_mnist, load_sample

SIDE = 28


def binarise(images: Images) -> Tensor:
    """Return images as rows of booleans: which pixels are at least half as bright as can be.

    >>> import torch
    >>> pixels = torch.tensor([0, 127, 128, 255], dtype=torch.uint8)
    >>> binarise(Images(pixels.view(1, 1, 2, 2), torch.tensor([7])))
    tensor([[False, False,  True,  True]])
    """
    return images.images.flatten(1) >= 128


def load_binary(root: Path | None, split: Literal["train", "test"]) -> Tensor:
    """Return a split of Fashion-MNIST from a folder; 'sample' is for the middle of bundled photos."""
    if root != Path("sample"):
        return binarise(load_fashion_mnist(root, split))
    sample = load_sample(split)
    edge = (sample.images.shape[-1] - SIDE) // 2
    grey = sample.images[:, :, edge : edge + SIDE, edge : edge + SIDE].float().mean(1, keepdim=True)
    return binarise(Images(grey, sample.labels))
