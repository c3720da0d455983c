"""The random-halting baseline: every position halts with the same probability, whatever the input.

Units learn as usual. What learned decisions are worth is measured against it.
"""

import math
from collections.abc import Sequence

import torch

from torchpact.checks import check_count, check_number
from torchpact.models import ResNet


def halting_probability(mean_steps: float, max_steps: int) -> float:
    """The h which, after every step but the last, makes so many steps on average.

    >>> round(halting_probability(1.75, 3), 6)  # 1 + (1 − h) + (1 − h)²
    0.5
    """
    check_count("max_steps", max_steps, minimum=2)
    check_number("mean_steps", mean_steps, 1, max_steps, open_low=True, open_high=True)
    low, high = 0.0, 1.0
    for _ in range(60):
        h = (low + high) / 2
        steps = sum((1 - h) ** step for step in range(max_steps))
        low, high = (h, high) if steps > mean_steps else (low, h)
    return h


@torch.no_grad()
def halt_at_random(model: ResNet, mean_steps: Sequence[float]) -> None:
    """Make the halting heads of each block constants, for so many steps on average; they learn no more."""
    for block, steps in zip(model.blocks, mean_steps, strict=True):
        h = halting_probability(steps, model.config.units)
        for head in block.halting:  # type: ignore[union-attr]
            for parameter in head.parameters():
                parameter.zero_().requires_grad_(False)
            head.linear.bias.fill_(math.log(h) - math.log1p(-h))
