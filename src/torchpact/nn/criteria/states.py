"""Criteria that look at the state: learned ones, its change, and none of it at all."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchpact.checks import check_count, check_number
from torchpact.core import state
from torchpact.core.criterion import Exit
from torchpact.core.layer_run import Per
from torchpact.nn.criteria.base import StateCriterion, first, last, log, pooled


class Linear(StateCriterion):
    """A learned linear criterion: the logit w·u + b of each position, or of the mean over real positions.

    It starts with w = 0, so that h = σ(b) everywhere.

    Args:
        width: The features of the state; None is what the network has where :func:`torchpact.adapt` or
            :class:`~torchpact.use_heads` put the criterion.
        bias: b at the start.
        normalize: Whether each position is normalised first, less its mean and over its standard deviation.
        per: "token", "pixel" or "example"; None is as the network decides.

    Raises:
        ValueError: A number is out of its range.

    Example:
        >>> block = tp.AdaptiveBlock(nn.Tanh(), Linear(8), max_steps=3)
        >>> block(torch.randn(4, 8))[1].probs.shape
        torch.Size([3, 4, 1])

    """

    def __init__(
        self,
        width: int | None = None,
        *,
        bias: float = -5.0,
        normalize: bool = False,
        per: Per | None = None,
    ) -> None:
        start = check_number("bias", bias, open_low=True, open_high=True)
        super().__init__(per, {"width": width, "bias": start, "normalize": normalize})
        self.start, self.normalize = start, normalize
        self.function: nn.Module | None = None
        if width is not None:
            self.function = self.made(check_count("width", width))

    def made(self, width: int) -> nn.Module:
        """Return the function of the features."""
        linear = nn.Linear(width, 1)
        nn.init.zeros_(linear.weight)
        nn.init.constant_(linear.bias, self.start)
        return linear

    def place(self, net: nn.Module, per: Per | None, width: int) -> None:
        """See :meth:`Criterion.place`; the weights are made where the width was not known before."""
        super().place(net, per, width)
        if self.function is None and width:
            self.function = self.made(width)

    def forward(self, exit: Exit) -> Tensor:
        """Return the logits."""
        if self.function is None:
            raise ValueError("expected a criterion with a width, or one that tp.adapt was given; got neither")
        u = first(exit)
        if self.normalize:
            rows = last(u)
            rows = F.layer_norm(rows, (rows.size(-1),))
            u = rows.movedim(-1, 1) if u.dim() == 4 else rows
        rows = pooled(u, exit) if self.per == "example" else last(u)
        return self.shaped(self.function(rows).squeeze(-1), exit)


class MLP(Linear):
    """A learned criterion with one hidden layer: the logit w·gelu(W u + c) + b, see :class:`Linear`.

    Args:
        width: The features of the state; None is what the network has.
        hidden: The size of the hidden layer.
        bias: b at the start, where w = 0.
        normalize: Whether each position is normalised first.
        per: "token", "pixel" or "example"; None is as the network decides.

    Raises:
        ValueError: A number is out of its range.

    Example:
        >>> MLP(8, hidden=4).function
        Sequential(
          (0): Linear(in_features=8, out_features=4, bias=True)
          (1): GELU(approximate='none')
          (2): Linear(in_features=4, out_features=1, bias=True)
        )

    """

    def __init__(
        self,
        width: int | None = None,
        *,
        hidden: int = 32,
        bias: float = -5.0,
        normalize: bool = False,
        per: Per | None = None,
    ) -> None:
        self.hidden = check_count("hidden", hidden)
        super().__init__(width, bias=bias, normalize=normalize, per=per)
        assert self.settings is not None
        self.settings["hidden"] = hidden

    def made(self, width: int) -> nn.Module:
        """Return the function of the features."""
        return nn.Sequential(nn.Linear(width, self.hidden), nn.GELU(), super().made(self.hidden))


class LatentChange(StateCriterion):
    """How little a step changed the state: −log(‖u − u before‖ / ‖u before‖).

    ``Thresholds(-math.log(0.03))`` halts where the state moved by less than 3 % of its norm. Per example the
    norms are over all real positions. Where the step changed the shape of the state, nothing halts.

    Args:
        per: "token", "pixel" or "example"; None is as the network decides.

    Example:
        >>> import math
        >>> step = lambda u: (u + 1 / u) / 2  # Newton's iteration for the root of 1
        >>> block = tp.AdaptiveBlock(step, LatentChange(), max_steps=9, mode="thresholded")
        >>> block(torch.tensor([[9.0], [1.5]]), thresholds=tp.Thresholds(-math.log(0.03)))[1].steps.flatten()
        tensor([6, 3])

    """

    learned = False

    def __init__(self, *, per: Per | None = None) -> None:
        super().__init__(per, {})

    def forward(self, exit: Exit) -> Tensor:
        """Return the logits."""
        u, before = first(exit), state.parts(exit.before)[0]
        if u.shape != before.shape:
            values = self.reduced(torch.zeros_like(last(u)[..., 0]), exit)
            return self.shaped(torch.full_like(values, -math.inf), exit)
        kind = torch.promote_types(u.dtype, torch.float32)
        now, then = last(u).to(kind), last(before).to(kind)
        moved, size = (
            self.reduced(x.square().sum(-1), exit) for x in (now - then, then)
        )  # means of both, so that their ratio is that of sums
        values = 0.5 * (log(size) - log(moved))
        return self.shaped(torch.where(moved == 0, torch.inf, values), exit)


class RandomExit(StateCriterion):
    """Exits at random, with a histogram of depths of one's own: what a criterion has to beat.

    In mode ``Discrete`` a position halts after step l with probability ``probabilities[l − 1]``, whatever it
    is: use it as a baseline with the depths of a criterion, or to train every exit. Its logits are those of
    p_l / (p_l + … + p_L).

    Args:
        probabilities: Those of halting after step 1, …, L; they sum to 1.
        per: "token", "pixel" or "example"; None is as the network decides.

    Raises:
        ValueError: They are no probabilities that sum to 1.

    Example:
        >>> random = RandomExit([0.25, 0.25, 0.5])
        >>> block = tp.AdaptiveBlock(nn.Tanh(), random, max_steps=3, mode="discrete")
        >>> _, ponder = block(torch.zeros(1000, 1))
        >>> ponder.probs[:, 0, 0]
        tensor([0.2500, 0.3333, 1.0000])

    """

    learned = False

    def __init__(self, probabilities: Sequence[float], *, per: Per | None = None) -> None:
        shares = [check_number("a probability", p, 0, 1) for p in probabilities]
        if not math.isclose(sum(shares), 1, abs_tol=1e-6):
            raise ValueError(f"expected probabilities that sum to 1, got a sum of {sum(shares):.6g}")
        super().__init__(per, {"probabilities": shares})
        self.probabilities = tuple(shares)

    def forward(self, exit: Exit) -> Tensor:
        """Return the logits, the same for all positions."""
        given = self.probabilities
        if exit.index is None:
            raise ValueError("expected examples after as many steps each, got those of a stream")
        if exit.index + 1 >= max(len(given), 2):
            raise ValueError(
                f"expected probabilities for as many steps as the block has, got {len(given)} in a block of "
                f"{exit.index + 2} or more"
            )
        now, later = given[exit.index], sum(given[exit.index + 1 :])
        logit = math.inf if later <= 0 else math.log(now / later) if now > 0 else -math.inf
        like = last(first(exit))[..., 0]
        like = like.to(torch.promote_types(like.dtype, torch.float32))
        values = like.new_full(like.shape[:1] if self.per == "example" else like.shape, logit)
        return self.shaped(values, exit)
