"""Whether halting heads are alive, and if not, why: the gradient, the advantage, or the bound."""

from dataclasses import dataclass

import torch
from torch import Tensor

from torchpact.budget.exit_losses import BlockExits
from torchpact.core.exit_objectives import continuation_values
from torchpact.core.modes import exceeds

DEAD = 0.005
"""A head is dead if it halts no more than this share of what gets there, or no less than the rest."""
_TINY = 0.01
_ORDERED = 0.3
_SHARE = 0.02


@dataclass(frozen=True)
class HeadState:
    """A halting head after training, on held-out examples."""

    block: str
    step: int
    h: float
    """The mean halting probability, over positions."""
    spread: float
    """Its standard deviation over positions."""
    fires: float
    """The share of the positions that get there which halt, at the present threshold."""
    slope: float
    """The mean of h(1 − h), a factor of the gradient."""
    better: float
    """The share of examples for which halting is no worse than going on as the heads now would."""
    correlation: float
    """The rank correlation of h with the advantage of halting, over examples."""
    reason: str
    """Of a dead head, "gradient", "advantage", "bound" or "order"; otherwise empty.

    "gradient": halting is better for some, but h(1 − h) is tiny. "advantage": dead is right. "bound": h
    orders examples well, but is on one side of the threshold. "order": it does not, though the gradient
    is not tiny: the head sees too little, or has not learned yet.
    """

    @property
    def dead(self) -> bool:
        """Whether it halts nothing, or everything."""
        return self.fires <= DEAD or self.fires >= 1 - DEAD


def head_states(exits: BlockExits, tau: float) -> list[HeadState]:
    """Return the state of each head of a block.

    Args:
        exits: What exits give.
        tau: The price of a step, in units of the loss.

    """
    losses = exits.raw.double()
    fires = torch.stack([exceeds(row, bound) for row, bound in zip(exits.logits, exits.bounds, strict=True)])
    decides = torch.stack(
        [exceeds(row.logit(), bound) for row, bound in zip(exits.h, exits.bounds, strict=True)]
    )
    advantages = continuation_values(losses, decides.double(), tau) - losses[:-1]
    noise = 1e-6 * float(losses.abs().max())
    there = torch.ones(exits.logits.size(1), dtype=torch.bool)
    found = []
    for step, logits in enumerate(exits.logits):
        h = logits.double().sigmoid()
        arrived = int(there.sum())
        share = (
            float((fires[step] & there).sum()) / arrived if arrived else float(fires[step].double().mean())
        )
        better = float((advantages[step] >= -noise).double().mean())
        slope = float((h * (1 - h)).mean())
        # without differences by the order of additions
        order = (1e4 * exits.h[step].double().logit()).round()
        correlation = rank_correlation(order, advantages[step])
        reason = ""
        if share <= DEAD or share >= 1 - DEAD:
            wanted = better if share <= DEAD else 1 - better
            if wanted < _SHARE:
                reason = "advantage"
            elif correlation >= _ORDERED:
                reason = "bound"
            else:
                reason = "gradient" if slope < _TINY else "order"
        spread = float(h.std(correction=0))
        found.append(
            HeadState(
                exits.name, step + 1, float(h.mean()), spread, share, slope, better, correlation, reason
            )
        )
        there &= ~fires[step]
    return found


def rank_correlation(one: Tensor, other: Tensor) -> float:
    """Return Spearman's correlation, with the mean rank for ties; 0 where one is constant.

    >>> rank_correlation(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 10.0, 100.0]))
    1.0
    """
    a, b = (_ranks(x) for x in (one, other))
    a, b = a - a.mean(), b - b.mean()
    size = float(a.norm() * b.norm())
    return round(float(a @ b) / size, 12) if size > 1e-9 else 0.0


def _ranks(x: Tensor) -> Tensor:
    _, place, count = x.double().unique(return_inverse=True, return_counts=True)
    ends = count.cumsum(0).double()
    ranks: Tensor = (ends - (count.double() - 1) / 2)[place]
    return ranks
