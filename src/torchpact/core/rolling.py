"""Halting loops whose examples begin at different times, as those of a stream do.

Such a loop is a :class:`~torchpact.HaltingLoop` with a :class:`Rolling`, moved on by ``advance`` as any
other: thresholds and the last step go by the number of steps that each example has taken.
:mod:`torchpact.core.refill` puts examples into a loop and takes them out.
"""

from typing import NamedTuple, cast

import torch
from torch import Tensor

from torchpact.core.criterion import Exit, Head, Memory, asked, map_memory
from torchpact.core.modes import Mode, Thresholded


class Rolling(NamedTuple):
    """What each example has of its own, in a loop whose examples begin at different times."""

    limits: Tensor
    """After how many steps an example halts at the latest, of shape (batch,)."""
    bounds: Tensor | None = None
    """What logits must exceed after 1, 2, … steps; None is the mode's own threshold."""
    history: Tensor | None = None
    """The logits after 1, 2, … steps of each position, L along dim 0, +∞ once it has halted; None where they
    are not kept."""


def break_sticks(
    mode: Mode, rolling: Rolling, remaining: Tensor, logits: Tensor, steps: Tensor
) -> tuple[Tensor, Tensor, Rolling]:
    """Break the sticks of all positions once, each as after the number of steps that it has run.

    Args:
        mode: What decides.
        rolling: What each example has of its own.
        remaining: What remains of the stick at each position.
        logits: Those of the halting probabilities after the step.
        steps: How many steps each position has run.

    Returns:
        The weight of the step in the output, what remains, and the examples with their logits.

    Example:
        >>> rolling = Rolling(torch.tensor([3, 3]), bounds=torch.tensor([0.0, 2.0, 0.0]))
        >>> ones, logits = torch.ones(2, 1), torch.ones(2, 1)
        >>> break_sticks(Thresholded(), rolling, ones, logits, torch.tensor([[1], [2]]))[1]
        tensor([[0.],
                [1.]])

    """
    index = steps.long() - 1
    if rolling.bounds is None:
        weight, left = mode.halt(remaining, logits)
    else:
        weight, left = cast(Thresholded, mode).halt(remaining, logits, bound=rolling.bounds[index])
    last = steps >= _like(rolling.limits, steps)
    if rolling.history is not None:
        place = index.unsqueeze(0)
        decides = ((remaining > 0) & ~last).unsqueeze(0)
        now = torch.where(decides, logits.unsqueeze(0), rolling.history.gather(0, place))
        rolling = rolling._replace(history=rolling.history.scatter(0, place, now))
    return torch.where(last, remaining, weight), torch.where(last, 0.0, left), rolling


def asked_of_all(head: Head, exit: Exit, steps: Tensor | None) -> tuple[Tensor, Memory]:
    """Ask a head about examples after different numbers of steps.

    A criterion that remembers is asked twice, since at their first exit examples have no memory.

    Args:
        head: The head.
        exit: What is known of the exits; criteria find no number of the step in it.
        steps: How many steps each position has run; None where all are at their first.

    Returns:
        The logits, and the memory.

    """
    exit = exit._replace(index=cast(int, None))
    logits, memory = asked(head, exit)
    if exit.memory is None or memory is None or steps is None:
        return logits, memory
    anew, first_memory = asked(head, exit._replace(memory=None))
    is_first = (steps == 1).flatten(1).all(1)
    logits = _picked(is_first, anew, logits)
    return logits, map_memory(lambda new, old: _picked(is_first, new, old), first_memory, memory)


def _picked(first: Tensor, new: Tensor, old: Tensor) -> Tensor:
    return torch.where(_like(first, new), new, old)


def _like(rows: Tensor, x: Tensor) -> Tensor:
    """Return one number an example with as many dimensions as ``x``."""
    return rows.view(-1, *[1] * (x.dim() - 1))
