"""Modes as users write them, for tests of what drives modes."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

import torchpact as tp
from torchpact.core.modes import Mode


class Dithering(Mode):
    """Soft and deterministic: half of what remains times h is broken off at every iteration."""

    can_exit_early: ClassVar[bool] = False

    def halt(self, remaining: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        weight = remaining * torch.sigmoid(logits) / 2
        return weight, remaining - weight


@dataclass(frozen=True)
class Median(Mode):
    """Hard: halts once the probability of having gone on is no more than ``level``; keeps it as remaining.

    After halting ``remaining`` is 0 with ``ends``, and else what it was, with a gate that is closed.
    """

    hard: ClassVar[bool] = True

    level: float = 0.5
    ends: bool = True

    def gate(self, remaining: Tensor) -> Tensor:
        return (remaining > self.level).to(remaining.dtype)

    def halt(self, remaining: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        left = remaining * torch.sigmoid(-logits)
        fires = (remaining > self.level) & (left <= self.level)
        weight = fires.to(left.dtype)
        return weight, torch.where(fires, torch.zeros_like(left), left) if self.ends else left


def seeded(name: str, seed: int = 0) -> Mode:
    """A mode by name, with a generator of its own where it draws."""
    generator = torch.Generator().manual_seed(seed)
    modes: dict[str, Mode] = {
        "relaxed": tp.Relaxed(generator=generator),
        "discrete": tp.Discrete(generator=generator),
        "thresholded": tp.Thresholded(0.45),
        "act": tp.ACT(eps=0.05),
        "dithering": Dithering(),
        "median": Median(),
        "open-ended median": Median(ends=False),
    }
    return modes[name]


NAMES = ["relaxed", "discrete", "thresholded", "act", "dithering", "median", "open-ended median"]
