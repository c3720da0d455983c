"""Small blocks of every kind of step, state and head, with an input each."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import torchpact as tp


class LSTMStep(nn.Module):
    """A step on a pair of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(2, 3)
        self.register_buffer("x", torch.linspace(-1, 1, 2))

    def forward(self, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        h, c = self.cell(self.get_buffer("x").expand(len(state[0]), 2), state)
        return h, c


class FirstPart(nn.Module):
    """A head that looks at the first tensor of a state."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1)

    def forward(self, state: tuple[Tensor, Tensor]) -> Tensor:
        logits: Tensor = 4 * self.linear(state[0])
        return logits


class PerImage(nn.Module):
    """A head of one logit an image."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1)

    def forward(self, u: Tensor) -> Tensor:
        logits: Tensor = 3 * self.linear(u.mean((2, 3)))
        return logits[:, :, None, None]


def per_pixel() -> nn.Module:
    return nn.Conv2d(3, 1, 3, padding=1)


def plain_vectors(length: int) -> tuple[tp.AdaptiveBlock, Any]:
    steps = [nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(length)]
    return tp.AdaptiveBlock(steps, [nn.Linear(3, 1) for _ in range(length - 1)]), torch.randn(6, 3)


def shared_step(length: int) -> tuple[tp.AdaptiveBlock, Any]:
    step = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    return tp.AdaptiveBlock(step, nn.Linear(3, 1), max_steps=length), torch.randn(6, 3)


def plain_pixels(length: int) -> tuple[tp.AdaptiveBlock, Any]:
    steps = [nn.Conv2d(3, 3, 3, padding=1) for _ in range(length)]
    return tp.AdaptiveBlock(steps, [per_pixel() for _ in range(length - 1)]), torch.randn(2, 3, 4, 5)


def gated_pixels(length: int) -> tuple[tp.AdaptiveBlock, Any]:
    steps = [tp.Residual(nn.Conv2d(3, 3, 3, padding=1)) for _ in range(length)]
    return tp.AdaptiveBlock(steps, [per_pixel() for _ in range(length - 1)]), torch.randn(2, 3, 4, 5)


def gated_images(length: int) -> tuple[tp.AdaptiveBlock, Any]:
    steps = [tp.Residual(nn.Conv2d(3, 3, 3, padding=1)) for _ in range(length)]
    return tp.AdaptiveBlock(steps, [PerImage() for _ in range(length - 1)]), torch.randn(5, 3, 4, 4)


def pairs(length: int) -> tuple[tp.AdaptiveBlock, Any]:
    block = tp.AdaptiveBlock([LSTMStep() for _ in range(length)], [FirstPart() for _ in range(length - 1)])
    return block, (torch.randn(6, 3), torch.randn(6, 3))


KINDS: dict[str, Callable[[int], tuple[tp.AdaptiveBlock, Any]]] = {
    "plain vectors": plain_vectors,
    "shared step": shared_step,
    "plain pixels": plain_pixels,
    "gated pixels": gated_pixels,
    "gated images": gated_images,
    "pairs": pairs,
}
