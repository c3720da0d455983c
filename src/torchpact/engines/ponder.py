"""What a run without gradients leaves behind, made into a Ponder."""

import torch
from torch import Tensor

from torchpact.block import Ponder
from torchpact.halting import _steps_from_survival
from torchpact.modes import Mode


def make_ponder(asked: list[Tensor], iterations: int, steps: Tensor, mode: Mode) -> Ponder:
    """Return the ponder of a run; ``asked`` holds +∞ for who had halted, and ends where nobody was left.

    >>> asked = [torch.tensor([0.0, 2.0])]
    >>> make_ponder(asked, 3, steps=torch.tensor([3, 1]), mode=tp.Thresholded()).probs
    tensor([[0.5000, 0.8808],
            [1.0000, 1.0000],
            [1.0000, 1.0000]])
    """
    always = torch.full(steps.shape, torch.inf, dtype=torch.float32, device=steps.device)
    logits = torch.stack(asked + [always] * (iterations - len(asked)))
    probs = torch.sigmoid(logits)
    expected = _steps_from_survival(torch.sigmoid(-logits[:-1]), 0)
    cost = steps.to(expected.dtype) if mode.hard else mode.cost(probs, steps, expected)
    return Ponder(probs, steps, expected, cost, mode.log_prob(logits, steps))
