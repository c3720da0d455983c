"""The time steps of a recurrent layer: each is a run of the halting loop, and all of them make one ponder."""

from collections.abc import Callable, Sequence
from itertools import zip_longest

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from torchpact.checks import at_least_single
from torchpact.core import state as _state
from torchpact.core.loop import HaltingLoop
from torchpact.core.modes import Mode
from torchpact.core.ponder import Ponder, ponder_of_logits
from torchpact.core.state import State
from torchpact.nn.cells import Transition
from torchpact.specs.blocks import Bounds

Read = Callable[[PackedSequence, State, Mode, Bounds], tuple[Tensor, State, Ponder]]
"""Reads packed sequences: returns outputs and ponder of packed rows, and the state after each sequence."""
TimeStep = Callable[[State, Tensor, Tensor, Mode, Bounds], tuple[HaltingLoop, State]]
"""Runs a time step, given the state before it and its input with the flag up and down."""


def repeated(
    transition: Transition, max_steps: int, u: State, first: Tensor, again: Tensor, mode: Mode
) -> tuple[HaltingLoop, State]:
    """Run all iterations of a time step as the halting loop does where no head ever halts, without a head.

    Args:
        transition: The step.
        max_steps: L.
        u: The state before.
        first: The input with the flag up.
        again: The input with the flag down.
        mode: The mode of the run, which has nothing to decide.

    Returns:
        The loop after the last iteration, and the state then.

    """
    for iteration in range(1, max_steps + 1):
        u = transition(u, first, again, iteration=iteration)
    remaining = at_least_single(_state.parts(u)[0].new_ones(len(first), 1))
    loop = HaltingLoop.start(mode, max_steps)._replace(
        taken=max_steps,
        remaining=remaining,
        steps=torch.full_like(remaining, max_steps, dtype=torch.long),
        logits=(torch.full_like(remaining, -torch.inf),) * (max_steps - 1),
    )
    return loop, u


def ponder_of_loops(loops: Sequence[HaltingLoop], max_steps: int, mode: Mode) -> Ponder:
    """Return one ponder of all time steps: a few large operations instead of many small ones.

    Args:
        loops: The loop of each time step, after its last iteration.
        max_steps: L.
        mode: The mode of the run.

    Returns:
        A ponder whose positions are the rows of all time steps, one after the other.

    """
    rows = [(loop.steps, loop.remaining) for loop in loops]
    known = [(s.long(), r) for s, r in rows if s is not None and r is not None]
    steps = torch.cat([each for each, _ in known])[:, 0]
    always = [torch.full_like(each, torch.inf) for _, each in known]
    logits = [
        torch.cat([inf if each is None else each for each, inf in zip(row, always, strict=True)])[:, 0]
        for row in zip_longest(*(loop.logits for loop in loops))
    ]
    return ponder_of_logits(logits, max_steps, steps, mode, torch.is_grad_enabled(), always[0].dtype)
