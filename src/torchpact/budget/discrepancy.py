"""How far an output is from that of a teacher, one number an example or position, with gradients."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchpact.budget.scores import main_tensor

DistillLoss = Callable[[Any, Any, Any], Tensor]
"""The output, the teacher's output and the batch → a loss for each example, or for each of its positions."""


class Losses(NamedTuple):
    """Losses of examples, (batch,), or of their positions, (batch, length)."""

    values: Tensor
    weights: Tensor
    """How much each counts: 0 for padding and where there is none."""

    @property
    def by_example(self) -> Tensor:
        """The mean of each example, (batch,)."""
        if self.values.dim() == 1:
            return self.values
        return (self.values * self.weights).sum(1) / self.weights.sum(1).clamp(min=1)

    @property
    def mean(self) -> Tensor:
        """The mean over all that count."""
        return (self.values * self.weights).sum() / self.weights.sum().clamp(min=1)


def discrepancy(output: Any, teacher: Any, logits: bool | None = None) -> Tensor:
    """Return how far an output is from that of the teacher, one number an example or position.

    Of class logits it is KL(teacher ‖ output), of states and embeddings the squared distance, relative to
    the squared norm of the teacher's (for vectors of equal norm, 2·(1 − cosine)).

    Args:
        output: What the student returns: its ``logits``, or else its first tensor of numbers.
        teacher: What the teacher returns.
        logits: Whether that are class logits; None asks for the name.

    Returns:
        (batch,), or (batch, length) of outputs for every position.

    Example:
        >>> discrepancy(torch.tensor([[1.0, 1.0]]), torch.tensor([[1.0, 0.0]]))
        tensor([1.])

    """
    (ours, _), (theirs, named) = main_tensor(output), main_tensor(teacher)
    ours, theirs = ours.float(), theirs.float()
    if ours.dim() == 4:  # maps
        ours, theirs = ours.movedim(1, -1), theirs.movedim(1, -1)
    if named if logits is None else logits:
        log_p = theirs.log_softmax(-1)
        each = (log_p.exp() * (log_p - ours.log_softmax(-1))).sum(-1)
    else:
        size = theirs.square().sum(-1)
        each = (ours - theirs).square().sum(-1) / torch.where(size > 0, size, torch.ones_like(size))
    return each.flatten(1).mean(1) if each.dim() > 2 else each


def losses_of(
    output: Any,
    teacher: Any,
    batch: Any,
    loss: DistillLoss | None,
    logits: bool | None,
    real: Tensor | None,
    examples: int,
) -> Losses:
    """Return the losses of an output.

    Args:
        output: The student's.
        teacher: The teacher's.
        batch: For the loss.
        loss: Of these three; None is :func:`discrepancy`. NaN at a position says that there is none.
        logits: For :func:`discrepancy`.
        real: False for padding, (batch, length).
        examples: How many there are.

    Raises:
        ValueError: It is not one number an example or position, or some are not finite.

    """
    found = (
        discrepancy(output, teacher, logits)
        if loss is None
        else torch.as_tensor(loss(output, teacher, batch))
    )
    if found.dim() not in (1, 2) or len(found) != examples:
        raise ValueError(
            f"expected a loss of each of {examples} examples, or of each of their positions, got shape "
            f"{tuple(found.shape)}"
        )
    weights = torch.ones_like(found)
    if found.dim() == 2:
        if real is not None and real.shape == found.shape:
            weights = real.to(found.dtype)
        if loss is not None:
            weights = torch.where(found.isnan(), 0.0, weights)
        if loss is None or bool(weights.any()):
            found = torch.where(weights > 0, found, 0.0)
    bad = int((~found.isfinite()).sum())
    if bad:
        raise ValueError(f"expected finite losses, got {bad} of {found.numel()} that are not")
    return Losses(found, weights)
