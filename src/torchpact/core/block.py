"""The adaptive block: run a step, ask the head, move the halting loop on."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from torchpact.checks import check_count
from torchpact.core import state
from torchpact.core.call_args import CallArgs
from torchpact.core.callables import as_modules, is_gated, is_indexed
from torchpact.core.collect import report, wants_exits
from torchpact.core.criterion import Exit, Memory, asked, never_bounds
from torchpact.core.halting_module import HaltingModule
from torchpact.core.loop import HaltingLoop, advance, checked_logits
from torchpact.core.modes import Mode, Relaxed, Thresholded, as_mode
from torchpact.core.ponder import Ponder
from torchpact.core.state import State
from torchpact.core.thresholds import Thresholds


class AdaptiveBlock(HaltingModule):
    """Iterates ``u ← step(u)`` up to L times, and decides at each position when to stop.

    ``steps`` are L callables ``u -> u``, or a single one with ``max_steps=L`` that shares its
    weights. The first may change the shape of the state, the others may not. ``halting`` are the
    heads ``u -> logits`` of the halting probabilities: one for every step, or for every step but the
    last (which needs none), or a single shared one. Logits have as many dimensions as the state and
    broadcast to it: ``(B, 1)`` or ``(B, 1, 1, 1)`` for one decision an example, ``(B, 1, H, W)`` for
    one a pixel. A head may be a :class:`~torchpact.criteria.Criterion`, which sees more than the state; where
    all are criteria that are not learned, the block starts at the threshold *never*, see
    :class:`~torchpact.use_thresholds`. Only what is an ``nn.Module`` has its parameters registered. A step
    with a true attribute ``indexed`` is told the number of its iteration, from 1, as ``iteration``.

    Plain steps run at all positions, halted or not: the output is the weighted sum of their results or, in
    the hard modes, the one at halting. Steps that take the mask, as :class:`~torchpact.Residual` does,
    freeze halted positions; use them where positions see each other, so that halted ones need not be
    computed. In the hard modes the frozen states are the output and no running sum is kept, as with plain
    steps and one decision an example, when there are no gradients. Steps must not change their input.

    Args:
        steps: L callables, or a single one with ``max_steps``.
        halting: The heads: L or L − 1 callables, or a single one.
        mode: What turns halting probabilities into decisions, or its name; by default relaxed.
        max_steps: L, for a single shared step.
        name: What the block is called in ponders and errors.
        price: What a step costs, relative to those of other blocks; for budgets.

    Raises:
        TypeError: A step or head is not callable.
        ValueError: There are too many or too few steps or heads, or the mode is unknown.

    Example:
        >>> step = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        >>> block = AdaptiveBlock(step, halting=nn.Linear(8, 1), max_steps=5)
        >>> output, ponder = block(torch.randn(4, 8))
        >>> output.shape, ponder.probs.shape, ponder.cost.shape
        (torch.Size([4, 8]), torch.Size([5, 4, 1]), torch.Size([4, 1]))
        >>> output, ponder = block(torch.randn(4, 8), mode="thresholded")

    """

    mode: Mode
    """What turns halting probabilities into decisions."""

    def __init__(
        self,
        steps: Callable[..., State] | Iterable[Callable[..., State]],
        halting: Callable[..., Tensor] | Iterable[Callable[..., Tensor]],
        *,
        mode: Mode | str | None = None,
        max_steps: int | None = None,
        name: str = "",
        price: float = 1.0,
    ) -> None:
        step_list, shared_step = as_modules("steps", steps)
        head_list, shared_head = as_modules("halting", halting)
        if shared_step:
            if max_steps is None:
                raise ValueError(
                    "expected max_steps=L with a single shared step, or a list of steps; got neither"
                )
            count = check_count("max_steps", max_steps)
        else:
            count = check_count("the number of steps", len(step_list))
            if max_steps not in (None, count):
                raise ValueError(f"expected max_steps={count} for a list of as many steps, got {max_steps}")
        if not shared_head and count - len(head_list) not in (0, 1):
            raise ValueError(
                f"expected {count - 1} or {count} halting heads for "
                f"{count} steps, or a single shared one; got a list of {len(head_list)}"
            )
        super().__init__(count, Relaxed() if mode is None else as_mode(mode), name, price)
        self.steps = nn.ModuleList(step_list)
        self.halting = nn.ModuleList(head_list)
        self.bounds = never_bounds(self.halting, count - 1)

    @property
    def all_heads(self) -> nn.ModuleList:
        """Its heads."""
        return self.halting

    def put_heads(self, heads: nn.ModuleList) -> None:
        """Put other heads in their place."""
        self.halting = heads

    def extra_repr(self) -> str:
        """Return the settings for ``print(block)``."""
        return f"max_steps={self.max_steps}, mode={self.mode}"

    def forward(
        self,
        u: State,
        *context: Any,
        mode: Mode | str | None = None,
        thresholds: Thresholds | float | None = None,
        weights: Tensor | None = None,
        exits: bool = False,
        max_steps: int | None = None,
        **named: Any,
    ) -> tuple[State, Ponder]:
        """Run the block.

        Args:
            u: The state to begin with, a tensor or a tuple of them.
            context: Goes to every step as further arguments.
            mode: The mode of this run; by default that of the block.
            thresholds: What halts in this run, in thresholded mode: a number as ``Thresholded(number)`` takes
                it, or :class:`~torchpact.Thresholds`.
            weights: How much each position counts in objectives and FLOPs, of a shape that broadcasts to the
                decisions'; 0 for padding. Criteria see them, too; they change nothing else.
            exits: Whether the ponder has the states and logits after all steps, see
                :class:`~torchpact.core.exits.Exits`; all L steps run then.
            max_steps: L of this run: any number if all iterations share step and head, otherwise fewer.
                Of thresholds of single heads the first are used, and the last one goes on.
            named: Goes to every step by name.

        Returns:
            The output, and what every position did.

        Raises:
            ValueError: A step or head gives a state or logits of the wrong shape, thresholds are given in
                another mode, or there are fewer steps or heads than ``max_steps`` asks for.

        """
        state.check_state(u)
        mode = self.present_mode if mode is None else as_mode(mode)
        count = self.steps_of_run(max_steps)
        keep = self.details or torch.is_grad_enabled() or not isinstance(mode, Thresholded)
        loop, u = self.iterate(
            u,
            context,
            named,
            mode=mode,
            bounds=self.bounds_of(mode, thresholds, count),
            keeps_logits=keep,
            keeps_exits=exits or wants_exits(self),
            weights=weights,
            max_steps=count,
        )
        output, ponder = loop.result(u)
        if weights is not None:
            weights = self.checked_weights(weights, ponder.steps)
        # not by _replace, which torch.compile of 2.11 cannot trace
        probs, steps, expected, cost, log_prob, _, _, _, kept = ponder
        ponder = Ponder(probs, steps, expected, cost, log_prob, weights, self.name, self.price, kept)
        report(self, ponder)
        return output, ponder

    def iterate(
        self,
        u: State,
        context: tuple[Any, ...] = (),
        named: Mapping[str, Any] | None = None,
        *,
        mode: Mode,
        bounds: tuple[float, ...] | None = None,
        may_stop: bool | None = None,
        keeps_logits: bool = True,
        keeps_exits: bool = False,
        weights: Tensor | None = None,
        max_steps: int | None = None,
    ) -> tuple[HaltingLoop, State]:
        """Run the steps and heads of the block in a halting loop.

        Args:
            u: The state to begin with.
            context: Goes to every step.
            named: Goes to every step by name.
            mode: What decides.
            bounds: See :meth:`HaltingLoop.start`, as for ``may_stop`` and ``keeps_logits``.
            may_stop: Whether the run ends when all positions have halted.
            keeps_logits: Whether probabilities are wanted.
            keeps_exits: Whether states and logits after all steps are.
            weights: How much each position counts, for criteria.
            max_steps: L of this run.

        Returns:
            The loop after the last step that was run, and the state then.

        """
        steps, heads = [*self.steps], [*self.halting]
        gated = [is_gated(step) for step in steps]
        told = CallArgs(context, {} if named is None else named)
        count = self.steps_of_run(max_steps)
        asks = range(max(count - 1, 1))
        loop = HaltingLoop.start(
            mode,
            count,
            bounds=bounds,
            gated=any(gated[1:] or gated),
            may_stop=may_stop,
            keeps_logits=keeps_logits,
            keeps_exits=keeps_exits,
        )
        for index in range(count):
            which = index if len(steps) > 1 else 0
            after = self._run(steps[which], gated[which], index, u, loop.gate, context, named)
            head = heads[index if len(heads) > 1 else 0] if heads and index in asks else None
            loop, u = advance(loop, u, after, head, held=gated[which], weights=weights, context=told)
            del after  # which would be held while the next step runs
            if loop.done:
                loop.draw_the_rest()
                break
        return loop, u

    def steps_of_run(self, max_steps: int | None) -> int:
        """Return L of a run: that of the block, or as many as are asked for, if it has them.

        Raises:
            ValueError: It has a step or a head for each, and more are asked for.

        """
        if max_steps is None:
            return self.max_steps
        count = check_count("max_steps", max_steps)
        if count > self.max_steps and max(len(self.steps), len(self.halting)) > 1:
            what = "steps" if len(self.steps) > 1 else "heads"
            raise ValueError(
                f"expected max_steps of at most {self.max_steps}, as there is a list of {what}, got {count}"
            )
        return count

    def step_at(self, index: int) -> nn.Module:
        """Return the step at ``index``, be it one that all iterations share."""
        return self.steps[index if len(self.steps) > 1 else 0]

    def run_step(
        self,
        index: int,
        u: State,
        gate: Tensor | None = None,
        context: tuple[Any, ...] = (),
        named: Mapping[str, Any] | None = None,
    ) -> State:
        """Return what the step at ``index`` makes of a state, checked to be a state of the same shape."""
        step = self.step_at(index)
        return self._run(step, is_gated(step), index, u, gate, context, named)

    @staticmethod
    def _run(
        step: nn.Module,
        gated: bool,
        index: int,
        u: State,
        gate: Tensor | None,
        context: tuple[Any, ...],
        named: Mapping[str, Any] | None,
    ) -> State:
        before = state.versions(u) if index else None
        told: dict[str, Any] = {**named} if named else {}
        if is_indexed(step):
            told["iteration"] = index + 1
        if gate is not None and gated:
            told["gate"] = gate.to(state.parts(u)[0].dtype)
        moved: State = step(u, *context, **told)
        if index == 0:  # it may change the shape
            return moved
        if before != state.versions(u):
            raise ValueError(
                f"step {index + 1} changed its input in place, expected a new state and the old as it was"
            )
        if state.shape_of(moved) != state.shape_of(u):
            raise ValueError(
                f"step {index + 1} changed the shape of the state: "
                f"expected {state.shape_of(u)}, got {state.shape_of(moved)}"
            )
        return moved

    def halting_logits(self, index: int, u: State, like: Tensor | None = None) -> Tensor:
        """Return the halting logits after the step at ``index``, checked, in fp32 or better."""
        return self.ask(Exit(u, u, index), like)[0]

    def ask(self, exit: Exit, like: Tensor | None = None) -> tuple[Tensor, Memory]:
        """Return the halting logits at an exit, checked, in fp32 or better, and the memory of a criterion.

        Args:
            exit: What is known of the exit.
            like: Logits or other values of all positions, of the shape that is expected.

        """
        u, index = exit.state, exit.index
        if not len(self.halting):  # a single step and no head: one position an example
            first = state.parts(u)[0]
            return checked_logits(first.new_zeros(state.per_example(first)), u, index, like), None
        logits, memory = asked(self.halting[index if len(self.halting) > 1 else 0], exit)
        return checked_logits(logits, u, index, like), memory
