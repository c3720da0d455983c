"""The halting loop as a value: its state between two steps, and the function that moves it on.

Everything that halts is driven by this loop: :class:`~torchpact.AdaptiveBlock`, recurrent layers, engines
that drop halted rows, and networks that own their ``for`` loop. Steps and heads are the caller's.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchpact.checks import at_least_single, check_count, readable
from torchpact.core import state
from torchpact.core.call_args import CallArgs
from torchpact.core.criterion import Exit, Head, Memory, asked
from torchpact.core.exits import exits_of
from torchpact.core.modes import Mode, Thresholded, as_mode
from torchpact.core.ponder import Ponder, decisions_only, ponder_of_logits
from torchpact.core.rolling import Rolling, asked_of_all, break_sticks
from torchpact.core.state import State

_NO_CONTEXT = CallArgs()


class Rules(NamedTuple):
    """What stays as it is through a run of the loop."""

    mode: Mode
    max_steps: int
    bounds: tuple[float, ...] | None
    """What the logits must exceed, for each of the L − 1 decisions; None is the mode's own threshold."""
    gated: bool
    """Whether steps take the gate, and leave closed positions as they are."""
    interpolated: bool
    """Whether the loop freezes halted positions itself: u + a·(step(u) − u)."""
    learning: bool
    """Whether gradients were enabled at the start."""
    may_stop: bool
    """Whether the run may end once all positions have halted."""
    keeps_logits: bool
    keeps_exits: bool = False
    """Whether the states after all steps are kept."""


class HaltingLoop(NamedTuple):
    """The state of a halting loop between two steps: immutable, moved on by :func:`advance`.

    A loop of your own around any steps does what an :class:`~torchpact.AdaptiveBlock` does:

    >>> steps, heads = [nn.Tanh(), nn.Tanh(), nn.Tanh()], [nn.Linear(8, 1), nn.Linear(8, 1), None]
    >>> u = torch.randn(4, 8)
    >>> loop = HaltingLoop.start("relaxed", max_steps=3)
    >>> for step, head in zip(steps, heads):
    ...     loop, u = advance(loop, u, step(u), head)
    >>> output, ponder = loop.result(u)
    >>> ponder.steps.shape
    torch.Size([4, 1])
    """

    rules: Rules
    taken: int = 0
    """The steps taken so far."""
    remaining: Tensor | None = None
    """What remains of the stick at each position; None before the first step."""
    gate: Tensor | None = None
    """The active positions mask a of the next step; None before the first, which runs everywhere."""
    steps: Tensor | None = None
    """The iterations that each position runs, the next one included."""
    logits: tuple[Tensor, ...] = ()
    """Those of the halting probabilities so far."""
    output: State | None = None
    """The weighted sum of states so far, or the states at halting; None where it is the last state."""
    frozen: bool = False
    """Whether halted positions keep their state, so that the last state is the output."""
    memory: Memory = None
    """What a :class:`~torchpact.core.criterion.Criterion` kept at the last exit."""
    states: tuple[State, ...] = ()
    """Those after the steps so far, if exits are kept."""
    rolling: Rolling | None = None
    """Where examples begin at different times, as in a stream: what each of them has of its own. ``taken``
    stays 0 then, and ``steps`` counts for each position; see :mod:`torchpact.core.rolling`."""

    @classmethod
    def start(
        cls,
        mode: Mode | str,
        max_steps: int,
        *,
        bounds: Sequence[float] | None = None,
        gated: bool = False,
        interpolated: bool = False,
        may_stop: bool | None = None,
        keeps_logits: bool = True,
        keeps_exits: bool = False,
    ) -> "HaltingLoop":
        """Return the loop before its first step. Gradients are, or are not, wanted as they are now.

        Args:
            mode: What turns halting probabilities into decisions.
            max_steps: L, at most how many steps are taken.
            bounds: What logits must exceed, for each of the L − 1 decisions, in thresholded mode.
            gated: Whether the steps take ``loop.gate`` and leave closed positions as they are.
            interpolated: Whether the loop freezes halted positions, for steps that are no residuals:
                the state goes on as u + a·(step(u) − u), in the hard modes as one or the other.
            may_stop: Whether the run may end once all positions have halted, see :attr:`done`; by default
                where the mode allows it and there are no gradients.
            keeps_logits: Without, the ponder has decisions only.
            keeps_exits: Whether the ponder has :class:`~torchpact.core.exits.Exits`; all steps are taken.

        Raises:
            ValueError: The mode is unknown, or compares nothing with the bounds; ``max_steps`` is below 1, or
                there are not L − 1 bounds.

        """
        mode, learning = as_mode(mode), torch.is_grad_enabled()
        check_count("max_steps", max_steps)
        if bounds is not None and not isinstance(mode, Thresholded):
            raise ValueError(f"expected the mode thresholded with thresholds, got {mode}")
        stops = mode.can_exit_early and not learning if may_stop is None else may_stop
        stops, keeps_logits = stops and not keeps_exits, keeps_logits or keeps_exits
        fixed = None if bounds is None else tuple(bounds)
        if fixed is not None and len(fixed) != max_steps - 1:
            raise ValueError(f"expected {max_steps - 1} bounds for max_steps={max_steps}, got {len(fixed)}")
        rules = Rules(mode, max_steps, fixed, gated, interpolated, learning, stops, keeps_logits, keeps_exits)
        return cls(rules)

    @property
    def done(self) -> bool:
        """Whether all positions have halted and the run may end: a look at values, so it waits for a GPU.

        Call :meth:`draw_the_rest` where you end a run early in a mode that samples.
        """
        if not self.rules.may_stop or self.gate is None or not readable(self.gate):
            return False
        return not bool((self.gate > 0).any())

    def draw_the_rest(self) -> None:
        """Draw the noise of the decisions that are left out: draws must not depend on what has halted."""
        assert self.remaining is not None
        for _ in range(self.taken, self.rules.max_steps - 1):
            if self.rules.mode.noise(self.remaining) is None:
                break

    def output_of(self, u: State) -> State:
        """Return the output of the block, if ``u`` is the last state."""
        if self.frozen:
            return u
        assert self.remaining is not None
        output = state.accumulate(self.output, u, self.remaining, self.rules.mode.hard)
        return state.like(output, u)

    def ponder(self) -> Ponder:
        """Return what every position did."""
        assert self.remaining is not None
        assert self.steps is not None
        steps = self.steps.long()
        if not self.rules.keeps_logits:
            return decisions_only(self.rules.max_steps, steps, steps.to(self.remaining.dtype))
        found = ponder_of_logits(
            self.logits,
            self.rules.max_steps,
            steps,
            self.rules.mode,
            self.rules.learning,
            self.remaining.dtype,
        )
        if not self.rules.keeps_exits:
            return found
        return found.with_exits(exits_of(self.states, self.logits, self.remaining))

    def result(self, u: State) -> tuple[State, Ponder]:
        """Return the output and the ponder of a run that ended with the state ``u``.

        Raises:
            ValueError: No step was taken.

        """
        if self.remaining is None:
            raise ValueError("expected at least one step before the result, got none")
        return self.output_of(u), self.ponder()


def advance(
    loop: HaltingLoop,
    before: State,
    after: State,
    logits: Tensor | Head | None,
    *,
    held: bool | None = None,
    weights: Tensor | None = None,
    context: CallArgs = _NO_CONTEXT,
) -> tuple[HaltingLoop, State]:
    """Move a loop on by one step: freeze what has halted, decide what halts, gather the output.

    Args:
        loop: The loop before the step; it stays as it is.
        before: The state before the step.
        after: What the step made of it.
        logits: The logits of h after this step, or the head that gives them, which is asked about the state
            to go on with, or a :class:`~torchpact.core.criterion.Criterion`, which is asked about the exit;
            None after the last step, which always halts. They have as many dimensions as the state and
            broadcast to it.
        held: Whether this step left halted positions as they are; by default as ``gated`` says.
        weights: How much each position counts, for criteria; None where all do.
        context: What the step was given besides the state, for criteria.

    Returns:
        The loop after the step, and the state to go on with.

    Raises:
        ValueError: The loop has taken all of its steps, or there are no logits after a step before the last.

    Example:
        >>> loop = HaltingLoop.start("thresholded", max_steps=2)
        >>> u = torch.zeros(2, 1)
        >>> loop, u = advance(loop, u, u + 1, torch.tensor([[3.0], [-3.0]]))
        >>> loop.gate
        tensor([[0.],
                [1.]])

    """
    rules, rolling = loop.rules, loop.rolling
    if loop.taken >= rules.max_steps:
        raise ValueError(f"expected at most max_steps={rules.max_steps} steps, got one more")
    u = _held(loop, before, after, rules.gated if held is None else held)
    if rules.keeps_exits:
        loop = loop._replace(states=(*loop.states, u))
    if rolling is None and loop.remaining is not None and loop.taken + 1 >= rules.max_steps:
        return loop._replace(taken=loop.taken + 1, gate=None, memory=None), u
    if logits is None and rules.max_steps > 1:
        raise ValueError(
            f"expected logits or a head after step {loop.taken + 1} of {rules.max_steps}, got None"
        )
    memory = loop.memory
    if logits is None:  # a single step and no head: one position an example
        first = state.parts(u)[0]
        logits = first.new_zeros(state.per_example(first))
    elif not isinstance(logits, Tensor):
        exit = Exit(u, before, loop.taken, weights, memory, context)
        logits, memory = asked(logits, exit) if rolling is None else asked_of_all(logits, exit, loop.steps)
    given = checked_logits(logits, u, loop.taken, loop.remaining)
    if loop.remaining is None:
        # Plain steps are what they are, whatever has halted: h of frozen states would give a wrong N, and
        # heads may look at neighbours. So the output is picked on the way, unless the difference cannot be
        # seen.
        alone = given.shape == state.per_example(given)
        holds = rules.gated or rules.interpolated
        unseen = alone and not (rules.learning or rules.keeps_exits)
        loop = loop._replace(frozen=rules.mode.hard and (holds or unseen))
    loop, weight = decide(loop._replace(memory=memory), given)
    if not (loop.frozen or weight is None):
        loop = loop._replace(output=state.accumulate(loop.output, u, weight, rules.mode.hard))
    return loop, u


def decide(loop: HaltingLoop, logits: Tensor) -> tuple[HaltingLoop, Tensor | None]:
    """Break the stick once: the decisions of :func:`advance`, for callers who keep the states themselves.

    Args:
        loop: The loop before the decision; it stays as it is.
        logits: The logits of h after the step, of all positions; +∞ for those that are not computed any more.

    Returns:
        The loop after the decision, and the weight of the step in the output; None after the last one.

    Example:
        >>> loop = HaltingLoop.start("thresholded", max_steps=2)
        >>> loop, weight = decide(loop, torch.tensor([[3.0], [-3.0]]))
        >>> weight, loop.steps
        (tensor([[1.],
                [0.]]), tensor([[1],
                [2]]))

    """
    rules, remaining, steps = loop.rules, loop.remaining, loop.steps
    taken = loop.taken + 1
    if remaining is None or steps is None:  # after the first step
        remaining = torch.ones_like(logits)
        # what is held while a step runs adds to the peak of memory
        small = torch.uint8 if rules.max_steps < 256 and not rules.learning else torch.long
        steps = torch.ones_like(logits, dtype=small)
    rolling = loop.rolling
    if taken >= rules.max_steps and rolling is None:
        return loop._replace(taken=taken, remaining=remaining, steps=steps, gate=None), None
    if rules.may_stop and loop.remaining is not None:
        logits = torch.where(remaining > 0, logits, torch.inf)
    if rolling is not None:
        taken = 0
        if rolling.history is None and rules.keeps_logits:
            rolling = rolling._replace(history=logits.new_full((rules.max_steps, *logits.shape), torch.inf))
        weight, remaining, rolling = break_sticks(rules.mode, rolling, remaining, logits, steps)
    elif rules.bounds is None:
        weight, remaining = rules.mode.halt(remaining, logits)
    else:
        assert isinstance(rules.mode, Thresholded)  # as start has seen
        weight, remaining = rules.mode.halt(remaining, logits, bound=rules.bounds[loop.taken])
    gate = rules.mode.gate(remaining)
    if rules.mode.hard and gate is not remaining:
        # a closed gate is a halt, though the mode may keep some of the stick
        remaining = torch.where(gate > 0, remaining, torch.zeros_like(remaining))
    kept = (*loop.logits, logits) if rules.keeps_logits and rolling is None else ()
    ran = steps + (gate > 0)
    output, frozen, memory, states = loop.output, loop.frozen, loop.memory, loop.states
    return HaltingLoop(
        rules, taken, remaining, gate, ran, kept, output, frozen, memory, states, rolling
    ), weight


def go_on(loop: HaltingLoop, logits: Tensor | None = None, steps: int = 1) -> HaltingLoop:
    """Move a loop on by steps after which no position halts: what :func:`decide` does then, in less time.

    Args:
        loop: The loop before the decision: thresholded, not before its first one, and not one that may stop.
        logits: As :func:`decide` takes them, if the loop keeps them; then of one step.
        steps: How many steps.

    Example:
        >>> loop = HaltingLoop.start("thresholded", max_steps=4, may_stop=False)
        >>> loop, _ = decide(loop, torch.tensor([[3.0], [-3.0]]))
        >>> logits = torch.tensor([[torch.inf], [-3.0]])
        >>> go_on(loop, logits).steps.equal(decide(loop, logits)[0].steps)
        True

    """
    assert loop.steps is not None
    assert loop.gate is not None
    kept = loop.logits if logits is None else (*loop.logits, logits)
    ran = loop.steps + (loop.gate > 0).to(loop.steps.dtype) * steps
    return loop._replace(taken=loop.taken + steps, steps=ran, logits=kept)


def checked_logits(logits: Tensor, u: State, index: int, like: Tensor | None = None) -> Tensor:
    """Return halting logits in fp32 or better, once they are seen to broadcast to the state.

    Args:
        logits: What a head gave.
        u: The state that it was asked about.
        index: The number of the head, from 0.
        like: Logits or other values of all positions, of the shape that is expected.

    Raises:
        ValueError: They have another shape.

    """
    for part in state.parts(u):
        if not isinstance(logits, Tensor) or not state.broadcasts(logits, part):
            raise ValueError(
                f"halting head {index + 1} gave {state.shape_of(logits)}, expected logits that "
                f"broadcast to the state's {tuple(part.shape)} without adding dimensions, "
                f"such as {state.per_example(part)}"
            )
    if like is not None and logits.shape != like.shape:
        raise ValueError(
            f"halting head {index + 1} gave {tuple(logits.shape)}, expected the first's {tuple(like.shape)}"
        )
    return at_least_single(logits)


def _held(loop: HaltingLoop, before: State, after: State, held: bool) -> State:
    """Return the state after a step, with halted positions as they were, if that is for the loop to do."""
    gate = loop.gate
    if gate is None or held:
        return after
    if loop.frozen:
        return state.where(gate > 0, after, before)
    if loop.rules.interpolated and not loop.rules.mode.hard:
        return state.map_state(lambda new, old: old + gate.to(old.dtype) * (new - old), after, before)
    return after
