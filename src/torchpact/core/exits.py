"""Exits: the states after all steps of a run and the halting logits there, kept on request."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from torchpact.checks import check_count
from torchpact.core.halting_module import halting_modules
from torchpact.core.state import State
from torchpact.core.thresholds import Thresholds


class Exits(NamedTuple):
    """The state after each of the L steps of a run, and the halting logits there.

    A run keeps them if it is asked to, by ``collect(net, exits=True)`` or ``block(u, exits=True)``; it takes
    all L steps then, with or without gradients. Gradients reach steps and heads through all of them.

    Example:
        >>> block = tp.AdaptiveBlock(nn.Tanh(), nn.Linear(8, 1), max_steps=3)
        >>> output, ponder = block(torch.randn(4, 8), exits=True)
        >>> len(ponder.exits.states), ponder.exits.logits.shape
        (3, torch.Size([3, 4, 1]))

    """

    states: tuple[State, ...]
    """The state after each step, as the run went on with it: where steps take the gate, and in runs of layers
    that a network calls itself, halted positions have kept theirs. The batch is the first dimension."""
    logits: Tensor
    """Those of h after each step, in fp32 or better, L of them along dim 0; the last row is +∞."""

    def map_logits(self, function: Callable[[Tensor], Tensor]) -> "Exits":
        """Return exits with the logits changed by a function."""
        return Exits(self.states, function(self.logits))


def exits_of(states: Sequence[State], logits: Sequence[Tensor], like: Tensor) -> Exits:
    """Return the exits of a run.

    Args:
        states: Those after each of the L steps.
        logits: Those after each step but the last.
        like: Numbers of all positions, of the precision of logits.

    """
    always = torch.full_like(like, torch.inf)
    return Exits(tuple(states), torch.stack([*logits, always]))


def exit_thresholds(net: nn.Module, step: int) -> Thresholds:
    """Return thresholds by which all positions of every block halt after a step, whatever heads say.

    With them a network applies its own read-out to that exit: the losses of all exits are L calls.

    Args:
        net: A network with adaptive blocks, or a deployed one.
        step: The step after which all halt, from 1; blocks of fewer steps run all of theirs.

    Returns:
        Thresholds for ``use_thresholds(net, …)``, ``block(u, thresholds=…)`` or ``fast(x, thresholds=…)``.

    Raises:
        TypeError: The step is no integer, or the network no module.
        ValueError: The network has no adaptive blocks, or none of so many steps.

    Example:
        >>> block = tp.AdaptiveBlock(nn.Tanh(), nn.Linear(8, 1), max_steps=4, mode="thresholded")
        >>> u = torch.randn(3, 8)
        >>> output, ponder = block(u, thresholds=exit_thresholds(block, 2))
        >>> torch.equal(output, u.tanh().tanh()), ponder.steps.flatten()
        (True, tensor([2, 2, 2]))

    """
    check_count("step", step)
    blocks = halting_modules(net)
    most = max((block.max_steps for block in blocks.values()), default=0)
    if step > most:
        what = f"a step of 1 to {most}" if blocks else "a network with adaptive blocks"
        raise ValueError(f"expected {what}, got {step if blocks else type(net).__name__}")
    never, always = Thresholds.NEVER, Thresholds.ALWAYS
    return Thresholds(
        {
            name: [never if index + 1 < step else always for index in range(block.max_steps - 1)]
            for name, block in blocks.items()
        }
    )
