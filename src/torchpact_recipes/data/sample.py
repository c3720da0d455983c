"""Three thousand images of CIFAR-10, in the package, so that examples and tests need no download."""

from importlib.resources import files
from typing import Literal

import numpy as np
import torch
from PIL import Image

from torchpact_recipes.data.augment import Images
from torchpact_recipes.data.cifar10_formats import CLASSES

COLUMNS = 25


def load_sample(split: Literal["train", "test"] = "train", device: torch.device | str = "cpu") -> Images:
    """Return 2,000 training or 1,000 test images: the first of each class, the classes taking turns.

    >>> sample = load_sample("test")
    >>> sample.images.shape, sample.labels.bincount().tolist()
    (torch.Size([1000, 3, 32, 32]), [100, 100, 100, 100, 100, 100, 100, 100, 100, 100])
    """
    if split not in ("train", "test"):
        raise ValueError(f"expected split to be 'train' or 'test', got {split!r}")
    with (files("torchpact_recipes.data") / "sample" / f"{split}.webp").open("rb") as file:
        mosaic = torch.from_numpy(np.array(Image.open(file).convert("RGB")))
    tiles = mosaic.view(-1, 32, COLUMNS, 32, 3).permute(0, 2, 4, 1, 3).reshape(-1, 3, 32, 32)
    labels = torch.arange(len(tiles)) % len(CLASSES)
    return Images(tiles.contiguous().to(device), labels.to(device))
