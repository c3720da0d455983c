"""Do maps of computation follow the object? What another network still recognises tells, not an opinion."""

from dataclasses import dataclass

import torch
from torch import Tensor

from torchpact.models import ResNet
from torchpact_recipes import zoo
from torchpact_recipes.data import Images, as_input

JUDGE = "resnet32-plain"
"""A network that had no part in making the maps."""
KEPT = 0.5


@dataclass(frozen=True)
class Shown:
    """What another network names if only a part of the pixels is left to it, as shares of all images."""

    judge: str
    images: int
    kept: float
    own: float
    """By the maps of the images themselves."""
    others: float
    """By maps of other images: as ragged and as much in the middle, but they know nothing of the object."""
    whole: float
    """Of images that are left whole."""


def what_maps_show(maps: Tensor, data: Images, *, kept: float = KEPT) -> Shown:
    """Leave the pixels of each image where most was computed, and let another network name what it sees.

    The rest becomes the image's mean. That it names more by an image's own map than by that of another is
    what maps know of the object.

    >>> from torchpact_recipes.data import load_sample
    >>> data = load_sample("test").random(4, seed=0)
    >>> shown = what_maps_show(torch.rand(4, 32, 32), data)
    >>> shown.images, shown.kept
    (4, 0.5)
    """
    if maps.shape != (len(data), *data.images.shape[2:]):
        raise ValueError(
            f"expected a map as large as its image for each of {len(data)}, got {tuple(maps.shape)}"
        )
    judge = zoo.load(JUDGE)
    own, others, whole = (
        _named(judge, data, mask)
        for mask in (most(maps, kept), most(maps.roll(1, 0), kept), torch.ones_like(maps))
    )
    return Shown(JUDGE, len(data), kept, own, others, whole)


def most(maps: Tensor, share: float) -> Tensor:
    """Where the values of a map are among its largest, in exactly this share of it; ties by a fixed draw."""
    generator = torch.Generator().manual_seed(0)
    draw = torch.rand(maps.shape[1:], generator=generator).flatten()
    # two stable sorts: by the draw, then by value, so that equal values keep the order of the draw
    drawn = draw.argsort()
    ranked = drawn[maps.flatten(1)[:, drawn].argsort(dim=1, descending=True, stable=True)]
    count = round(share * ranked.shape[1])
    mask = torch.zeros(ranked.shape, dtype=torch.bool).scatter_(1, ranked[:, :count], True)
    return mask.view(maps.shape)


@torch.no_grad()
def _named(judge: ResNet, data: Images, masks: Tensor) -> float:
    right = 0
    for images, labels, mask in zip(
        data.images.split(100), data.labels.split(100), masks.split(100), strict=True
    ):
        # standardised images have a mean of 0
        logits, _ = judge(as_input(images) * mask[:, None])
        right += int((logits.argmax(1) == labels).sum())
    return right / len(data)
