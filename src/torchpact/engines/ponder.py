"""What a run without gradients leaves behind, made into a Ponder."""

import torch
from torch import Tensor

from torchpact.core.block import Ponder, _decisions
from torchpact.core.halting import _steps_from_survival
from torchpact.core.modes import Mode


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


def unknown(device: torch.device) -> Tensor:
    """Return a NaN to stand for what a run has not kept; a new one, for callers may write to it."""
    return torch.full((), torch.nan, dtype=torch.float32, device=device)


def is_unknown(x: Tensor) -> bool:
    """Return whether a tensor is a single number in many places.

    >>> is_unknown(unknown(torch.device("cpu")).expand(2, 3)), is_unknown(torch.full((2, 3), torch.nan))
    (True, False)
    """
    steps = [step for size, step in zip(x.shape, x.stride(), strict=True) if size > 1]
    return bool(steps) and not any(steps)


def without_details(ponder: Ponder, nan: Tensor | None = None) -> Ponder:
    """Return the decisions of a thresholded run alone.

    >>> ponder = Ponder(torch.ones(3, 2), torch.tensor([1, 1]), torch.ones(2), torch.ones(2), None)
    >>> without_details(ponder).probs.isnan().all(), without_details(ponder).steps
    (tensor(True), tensor([1, 1]))
    """
    return _decisions(len(ponder.probs), ponder.steps, ponder.cost, nan)
