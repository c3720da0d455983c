"""CIFAR-10 for a frozen network that has seen all training images: splits, and images as hard as new ones.

The networks of the zoo were trained on all 50,000 training images, so that images held out of these are
easier for them than the test set: resnet32-plain has 97 % of them right, and 91 % of the test set. Thresholds
that are chosen there overrun their budget on new images. ``distorted`` images are rotated, scaled and shifted
at random, by as much as makes the network's accuracy on held-out training images that of its card; nothing
else is known of the test set. Every program here chooses on such images, and shows what comes of choosing on
plain ones besides.
"""

import math
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import torchpact as tp
from torchpact_recipes import zoo
from torchpact_recipes.data import Images, load_cifar10, standardize
from torchpact_recipes.data.augment import augment

Net = TypeVar("Net", bound=nn.Module)
NETWORK = "resnet32-plain"
READOUTS, HEADS, VALIDATION = range(16_000), range(40_000, 45_000), range(45_000, 50_000)
"""Training images for read-outs, for heads, and to choose by."""


class Split(NamedTuple):
    """Images as the network takes them, and their classes."""

    inputs: Tensor
    labels: Tensor


def as_inputs(images: Tensor) -> Tensor:
    """Return standardised images of bytes, channels last."""
    return standardize(images).to(memory_format=torch.channels_last)


def plain_network() -> tp.models.ResNet:
    """Return the network as it is, in evaluation and channels last."""
    return channels_last(tp.models.resnet32(pretrained="plain")).requires_grad_(False).eval()


def channels_last(net: Net) -> Net:
    """Return a network with its weights channels last, which convolutions on CPUs are faster with."""
    for parameter in net.parameters():
        if parameter.dim() == 4:
            parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
    return net


def distorted(images: Tensor, strength: float, generator: torch.Generator) -> Tensor:
    """Return images flipped, shifted, rotated and scaled at random, as bytes.

    Args:
        images: Bytes.
        strength: The largest rotation is 60° times it, the largest change of scale 60 %.
        generator: Of the random numbers.

    """
    count = len(images)
    angle, scale = (2 * torch.rand(2, count, generator=generator) - 1) * strength
    angle, scale = angle * math.pi / 3, 1 + 0.6 * scale
    cos, sin, zero = angle.cos() / scale, angle.sin() / scale, torch.zeros(count)
    theta = torch.stack([torch.stack([cos, -sin, zero], 1), torch.stack([sin, cos, zero], 1)], 1)
    grid = F.affine_grid(theta, [count, 3, *images.shape[2:]], align_corners=False)
    moved = F.grid_sample(images.float(), grid, padding_mode="reflection", align_corners=False)
    return augment(moved.round().clamp(0, 255).to(torch.uint8), generator)


def card_accuracy(name: str = NETWORK, mode: str = "plain") -> float:
    """Return the accuracy on the test set that the zoo's card has for a network."""
    card = next(each for each in zoo.entries() if each.name == name).card
    return float(card["results"][mode]["accuracy"])


def matched_strength(correct: Callable[[Tensor], float], images: Images, wanted: float) -> float:
    """Return the strength at which the share that is right is as wanted, by bisection.

    Args:
        correct: Returns the share of bytes of images that the network has right.
        images: Held-out ones.
        wanted: The accuracy of the network's card.

    """
    low, high = 0.0, 1.0
    for _ in range(6):
        middle = (low + high) / 2
        share = correct(distorted(images.images, middle, torch.Generator().manual_seed(0)))
        low, high = (middle, high) if share > wanted else (low, middle)
    return (low + high) / 2


def split(images: Images, part: range, strength: float | None, seed: int) -> Split:
    """Return a part of the training images: plain, or distorted."""
    own, labels = images.images[part.start : part.stop], images.labels[part.start : part.stop]
    if strength is not None:
        own = distorted(own, strength, torch.Generator().manual_seed(seed))
    return Split(as_inputs(own), labels)


def train_images() -> Images:
    """Return the training set."""
    return load_cifar10(split="train")


def test_split() -> Split:
    """Return the test set."""
    images = load_cifar10(split="test")
    return Split(as_inputs(images.images), images.labels)
