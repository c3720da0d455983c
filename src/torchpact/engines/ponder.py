"""What a run without gradients leaves behind, made into a Ponder."""

from functools import cache

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


@cache
def unknown(device: torch.device) -> Tensor:
    """Return the NaN, one for all, that stands for what a run has not kept."""
    with torch.inference_mode(False):
        return torch.full((), torch.nan, device=device)


def is_unknown(x: Tensor) -> bool:
    """Return whether a tensor is made of that NaN, which nobody may change.

    >>> is_unknown(unknown(torch.device("cpu")).expand(2, 3)), is_unknown(torch.full((2, 3), torch.nan))
    (True, False)
    """
    return x.data_ptr() == unknown(x.device).data_ptr()


def without_details(ponder: Ponder) -> Ponder:
    """Return the decisions of a thresholded run alone.

    >>> ponder = Ponder(torch.ones(3, 2), torch.tensor([1, 1]), torch.ones(2), torch.ones(2), None)
    >>> without_details(ponder).probs.isnan().all(), without_details(ponder).steps
    (tensor(True), tensor([1, 1]))
    """
    nan = unknown(ponder.steps.device)
    return ponder._replace(
        probs=nan.expand(ponder.probs.shape), expected_steps=nan.expand(ponder.steps.shape)
    )
