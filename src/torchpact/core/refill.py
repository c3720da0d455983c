"""Examples that enter a halting loop while it runs, and leave it: what streams are made of.

Functions of a :class:`~torchpact.HaltingLoop` with a :class:`~torchpact.core.rolling.Rolling`; each returns a
new loop, and ``advance`` moves it on in between.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchpact.core import state
from torchpact.core.criterion import map_memory
from torchpact.core.loop import HaltingLoop
from torchpact.core.modes import Mode
from torchpact.core.ponder import Ponder, decisions_only, ponder_of_logits
from torchpact.core.rolling import Rolling
from torchpact.core.state import State


def start_rolling(
    mode: Mode | str,
    max_steps: int,
    limits: Tensor,
    *,
    bounds: Sequence[float] | None = None,
    gated: bool = False,
    keeps_logits: bool = True,
) -> HaltingLoop:
    """Return a loop before its first step, whose examples may be replaced by others.

    Args:
        mode: What decides; one in which positions can be done early, and which draws nothing.
        max_steps: L, at most how many steps any example takes.
        limits: At most how many each of the first examples takes, (batch,).
        bounds: What logits must exceed, for each of the L − 1 decisions, in thresholded mode.
        gated: Whether the steps leave closed positions as they are.
        keeps_logits: Without, ponders have decisions only.

    Raises:
        ValueError: As for :meth:`HaltingLoop.start`.

    """
    loop = HaltingLoop.start(
        mode, max_steps, bounds=bounds, gated=gated, may_stop=True, keeps_logits=keeps_logits
    )
    # the last decision is no decision, whatever its bound is
    all_bounds = None if bounds is None else torch.tensor([*bounds, 0.0], device=limits.device)
    rules = loop.rules._replace(bounds=None)  # a compiled step serves all thresholds
    return loop._replace(rules=rules, rolling=Rolling(limits, all_bounds))


def take_rows(loop: HaltingLoop, index: Tensor) -> HaltingLoop:
    """Return a loop of some of its examples, or of some more than once, to be renewed."""

    def rows(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.index_select(0, index)

    rolling = loop.rolling
    assert rolling is not None
    history = None if rolling.history is None else rolling.history.index_select(1, index)
    return loop._replace(
        remaining=rows(loop.remaining),
        gate=rows(loop.gate),
        steps=rows(loop.steps),
        output=None if loop.output is None else state.rows_of(loop.output, index),
        memory=map_memory(lambda x: x.index_select(0, index), loop.memory),
        rolling=Rolling(rolling.limits.index_select(0, index), rolling.bounds, history),
    )


def renew_rows(loop: HaltingLoop, index: Tensor, limits: Tensor) -> HaltingLoop:
    """Return a loop in which some examples are before their first step.

    Args:
        loop: The loop, after a step at least.
        index: Which examples begin anew.
        limits: At most how many steps each of them takes.

    """
    rolling = loop.rolling
    assert rolling is not None
    assert loop.remaining is not None
    assert loop.steps is not None
    assert loop.gate is not None
    output, history = loop.output, rolling.history
    if output is not None and not loop.rules.mode.hard:  # else each position is written to before it is read
        output = state.map_state(lambda part: part.index_fill(0, index, 0.0), output)
    if history is not None:
        history = history.index_fill(1, index, torch.inf)
    return loop._replace(
        remaining=loop.remaining.index_fill(0, index, 1.0),
        gate=loop.gate.index_fill(0, index, 1.0),
        steps=loop.steps.index_fill(0, index, 1),
        output=output,
        rolling=Rolling(rolling.limits.index_copy(0, index, limits), rolling.bounds, history),
    )


class Finished(NamedTuple):
    """Examples that have left a loop, in the order of some index."""

    output: State
    steps: Tensor
    """The number of steps that each position ran."""
    history: Tensor | None
    """The logits of each position, L along dim 0; None where they are not kept."""
    weights: Tensor | None = None
    """How much each position counts."""

    def take(self, index: Tensor) -> "Finished":
        """Return some of them."""
        history = None if self.history is None else self.history.index_select(1, index)
        weights = None if self.weights is None else self.weights.index_select(0, index)
        return Finished(
            state.rows_of(self.output, index), self.steps.index_select(0, index), history, weights
        )

    def ponder(self, loop: HaltingLoop) -> Ponder:
        """Return what every position did, in a loop that they have left."""
        rules, steps = loop.rules, self.steps.long()
        kind = torch.float32 if loop.remaining is None else loop.remaining.dtype
        if self.history is None:
            found = decisions_only(rules.max_steps, steps, steps.to(kind))
        else:
            logits = self.history[:-1].unbind(0)
            found = ponder_of_logits(logits, rules.max_steps, steps, rules.mode, dtype=kind)
        return found._replace(weights=self.weights)


def joined(groups: Sequence[Finished]) -> Finished:
    """Return several groups as one, in their order."""
    if len(groups) == 1:
        return groups[0]
    histories = [each.history for each in groups if each.history is not None]
    weights = [each.weights for each in groups if each.weights is not None]
    return Finished(
        state.map_state(lambda *parts: torch.cat(parts), *[each.output for each in groups]),
        torch.cat([each.steps for each in groups]),
        torch.cat(histories, 1) if histories else None,
        torch.cat(weights) if weights else None,
    )


def finished_rows(loop: HaltingLoop, u: State, index: Tensor) -> Finished:
    """Return the results of examples that have halted at all positions.

    Args:
        loop: The loop after a step.
        u: The state to go on with.
        index: Which examples.

    """
    assert loop.rolling is not None
    assert loop.steps is not None
    output = u if loop.frozen else loop.output
    assert output is not None
    taken = state.rows_of(output, index)
    if not loop.frozen:  # as HaltingLoop.output_of: a sum was taken in the precision of the weights
        taken = state.like(taken, u)
    history = loop.rolling.history
    return Finished(
        taken,
        loop.steps.index_select(0, index),
        None if history is None else history.index_select(1, index),
    )
