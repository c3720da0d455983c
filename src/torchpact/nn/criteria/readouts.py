"""Criteria that look at the predictions of a read-out: how sure they are, and whether they still change."""

import math
from typing import Literal

import torch
from torch import Tensor

from torchpact.checks import check_count
from torchpact.core.criterion import Exit
from torchpact.core.layer_run import Per
from torchpact.nn.criteria.base import Pool, Readout, ReadoutCriterion, log, real_positions

Measure = Literal["probability", "margin", "entropy"]


class Confidence(ReadoutCriterion):
    """How sure the prediction of a read-out is: the logit of a number in [0, 1].

    "probability" is max p, "margin" is the largest less the second largest probability, and "entropy" is
    1 − H(p) / log(number of classes). ``use_thresholds(net, 0.9)`` halts where it exceeds 0.9. Of read-outs
    with class logits for every position, a criterion per example takes the mean of these numbers over real
    positions. A read-out of a single logit has two classes.

    Args:
        readout: Class logits of the state, see :class:`~torchpact.criteria.ReadoutCriterion`.
        measure: "probability", "margin" or "entropy".
        per: "token", "pixel" or "example"; None is as the network decides.
        pool: Whether the read-out is given the "mean" over real positions or the "first" token.
        detach: Whether the read-out runs without gradients.

    Raises:
        TypeError: ``readout`` is neither callable nor names.
        ValueError: ``measure``, ``per`` or ``pool`` is something else.

    Example:
        >>> sure = Confidence(lambda u: u)  # states that are class logits
        >>> block = tp.AdaptiveBlock(lambda u: 2 * u, sure, max_steps=5, mode="thresholded")
        >>> u = torch.tensor([[0.3, 0.0], [1.0, 0.0]])
        >>> block(u, thresholds=0.9)[1].steps.flatten()
        tensor([3, 2])

    """

    learned = False

    def __init__(
        self,
        readout: Readout,
        measure: Measure = "probability",
        *,
        per: Per | None = None,
        pool: Pool | None = None,
        detach: bool = True,
    ) -> None:
        if measure not in ("probability", "margin", "entropy"):
            raise ValueError(f"expected measure='probability', 'margin' or 'entropy', got {measure!r}")
        super().__init__(readout, per, pool, detach, {"measure": measure})
        self.measure = measure

    def forward(self, exit: Exit) -> Tensor:
        """Return the logits of the measure."""
        found = {"probability": _probability, "margin": _margin, "entropy": _entropy}[self.measure](
            self.classes(exit)
        )
        if self.per == "example" and found.dim() > 1:
            mean = self.reduced(found.sigmoid(), exit)
            found = log(mean) - log(1 - mean)
        return self.shaped(found, exit)


class Unchanged(ReadoutCriterion):
    """Whether the prediction of a read-out has stayed the same for some steps: patience.

    Its logits are the number of steps in a row that did not change the prediction, less ``steps``, plus ½:
    ``use_thresholds(net, 0.5)`` halts after ``steps`` of them, ``Thresholds(1.0)`` after one more. Per
    example, all real positions have to stay the same.

    Args:
        readout: Class logits of the state, see :class:`~torchpact.criteria.ReadoutCriterion`.
        steps: How many steps in a row, at least 1.
        per: "token", "pixel" or "example"; None is as the network decides.
        pool: Whether the read-out is given the "mean" over real positions or the "first" token.

    Raises:
        TypeError: ``readout`` is neither callable nor names, or ``steps`` no integer.
        ValueError: ``steps`` is below 1, or ``per`` or ``pool`` is something else.

    Example:
        >>> turn = lambda u: u + torch.tensor([0.0, 1.0])
        >>> block = tp.AdaptiveBlock(turn, Unchanged(lambda u: u, steps=2), max_steps=6, mode="thresholded")
        >>> u = torch.tensor([[1.5, 0.0], [0.5, 0.0]])  # predictions 0 1 1 1 … and 1 1 1 …
        >>> block(u, thresholds=0.5)[1].steps.flatten()
        tensor([4, 3])

    """

    learned = False

    def __init__(
        self, readout: Readout, steps: int = 1, *, per: Per | None = None, pool: Pool | None = None
    ) -> None:
        super().__init__(readout, per, pool, True, {"steps": check_count("steps", steps)})
        if self.settings is not None:
            del self.settings["detach"]
        self.steps = steps

    def forward(self, exit: Exit) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return the logits, and the prediction with the number of steps that it is unchanged for."""
        classes, before = self.classes(exit), exit.memory
        prediction = classes.argmax(-1)
        same = torch.zeros_like(prediction, dtype=torch.bool)
        if isinstance(before, tuple) and isinstance(before[0], Tensor):
            same = torch.eq(prediction, before[0])
        if self.per == "example" and same.dim() > 1:
            real = real_positions(exit, same)
            same = (same if real is None else same | ~real).flatten(1).all(1)
        count = torch.zeros_like(same, dtype=classes.dtype)
        if isinstance(before, tuple) and isinstance(before[1], Tensor):
            count = torch.where(same, before[1] + 1, count)
        return self.shaped(count - self.steps + 0.5, exit), (prediction, count)


class Divergence(ReadoutCriterion):
    """How little a step changed the predictions of a read-out: −log KL(p after the step ‖ p before it).

    ``Thresholds(-math.log(1e-3))`` halts where the divergence is below 1e-3, in nats; per example its mean
    over real positions. At the first exit, before which no prediction was made, nothing halts. It keeps the
    log-probabilities of all classes from one exit to the next.

    Args:
        readout: Class logits of the state, see :class:`~torchpact.criteria.ReadoutCriterion`.
        per: "token", "pixel" or "example"; None is as the network decides.
        pool: Whether the read-out is given the "mean" over real positions or the "first" token.
        detach: Whether the read-out runs without gradients.

    Raises:
        TypeError: ``readout`` is neither callable nor names.
        ValueError: ``per`` or ``pool`` is something else.

    Example:
        >>> import math
        >>> step = lambda u: u / 2
        >>> block = tp.AdaptiveBlock(step, Divergence(lambda u: u), max_steps=9, mode="thresholded")
        >>> u = torch.tensor([[4.0, 0.0], [1.0, 0.0]])
        >>> block(u, thresholds=tp.Thresholds(-math.log(1e-3)))[1].steps.flatten()
        tensor([6, 4])

    """

    learned = False

    def __init__(
        self, readout: Readout, *, per: Per | None = None, pool: Pool | None = None, detach: bool = True
    ) -> None:
        super().__init__(readout, per, pool, detach, {})

    def forward(self, exit: Exit) -> tuple[Tensor, Tensor]:
        """Return the logits, and the log-probabilities."""
        now = self.classes(exit).log_softmax(-1)
        if exit.memory is None:
            values = self.reduced(torch.zeros_like(now[..., 0]), exit)
            return self.shaped(torch.full_like(values, -math.inf), exit), now
        assert isinstance(exit.memory, Tensor)
        share = now.exp()  # what has probability 0 counts nothing
        gain = share * (_finite(now) - torch.where(share == 0, 0.0, exit.memory))
        return self.shaped(-log(self.reduced(gain.sum(-1), exit)), exit), now


def _probability(classes: Tensor) -> Tensor:
    """Return the logit of the largest probability, exact where 1 − p has rounded to 0."""
    top, index = classes.max(-1, keepdim=True)
    return top.squeeze(-1) - classes.scatter(-1, index, -math.inf).logsumexp(-1)


def _margin(classes: Tensor) -> Tensor:
    """Return the logit of the difference of the two largest probabilities."""
    (first, second), whole = classes.topk(2, -1).values.unbind(-1), classes.logsumexp(-1)
    others = first - whole - _probability(classes)  # log(1 − p) of the largest
    below = torch.logaddexp(others, second - whole)
    return first - whole + log(-torch.expm1(second - first)) - below


def _finite(logs: Tensor) -> Tensor:
    """Return log-probabilities with 0 in the place of −∞; NaN stays."""
    return torch.where(logs == -math.inf, 0.0, logs)


def _entropy(classes: Tensor) -> Tensor:
    """Return the logit of 1 − H(p) / log(number of classes)."""
    logs = classes.log_softmax(-1)
    entropy = -(logs.exp() * _finite(logs)).sum(-1).clamp(max=0)
    share = entropy / math.log(classes.size(-1))
    return log(1 - share) - log(share)
