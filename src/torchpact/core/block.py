"""The adaptive block: run a step, ask the head, tell the mode, accumulate."""

from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchpact.checks import at_least_single, check_count, readable
from torchpact.core import state as _state
from torchpact.core.callables import as_modules, is_gated, is_indexed
from torchpact.core.halting import _steps_from_survival, iteration_index
from torchpact.core.modes import Mode, Relaxed, Thresholded, as_mode
from torchpact.core.state import State


class Ponder(NamedTuple):
    """What a block did, and what the objective needs to know of it.

    Positions have the shape of the halting logits; their first dimension is the batch.

    With gradients enabled all L iterations run, in every mode, since N needs every h. Without them
    a mode that can be done early skips what it can: ``probs`` of an iteration that a position did
    not run then hold 1, ``expected_steps`` counts no further than the iterations that were run, which
    makes it a lower bound of N, and ``cost`` of the hard modes is z, which is what the prior charges for
    the decisions taken.

    Where steps take the gate, h after halting is that of a frozen state, so that N is the paper's eq. 24
    given the masks that were drawn; it is E[z] exactly for plain steps only.

    A block that keeps no ``details`` (see :class:`use_mode`) leaves NaN in ``probs`` and ``expected_steps``
    then, of which a single number is stored.

    ``log_prob`` is None outside Discrete mode, which ``torch.func.vmap`` cannot return: let the function
    under it return the fields it needs. Heads that give NaN are not refused; NaN shows in ``probs``.
    """

    probs: Tensor
    """The halting probabilities h, L of them along dim 0; the last is 1."""
    steps: Tensor
    """The iterations run per position: z, or ACT's N; relaxed, those with r > clip. Integer."""
    expected_steps: Tensor
    """N, the expected number of iterations under q (eq. 24); differentiable."""
    cost: Tensor
    """What the objective penalises: N, or ACT's ρ = N + R, differentiable; z where N is unknown."""
    log_prob: Tensor | None
    """In Discrete mode log q(z) of the decisions taken (eq. 15), per position; elsewhere None."""

    @property
    def active(self) -> Tensor:
        """Which positions ran which iteration: L booleans along dim 0; the first row is all true."""
        return iteration_index(len(self.probs), self.steps) <= self.steps


class Trace(NamedTuple):
    """What a run of the loop leaves behind, from which a :class:`Ponder` is made."""

    output: State
    asked: list[Tensor]
    """The logits of h after each iteration, up to the last that anyone was asked about."""
    remaining: Tensor
    steps: Tensor


class AdaptiveBlock(nn.Module):
    """Iterates ``u ← step(u)`` up to L times, and decides at each position when to stop.

    ``steps`` are L callables ``u -> u``, or a single one with ``max_steps=L`` that shares its
    weights. The first may change the shape of the state, the others may not. ``halting`` are the
    heads ``u -> logits`` of the halting probabilities: one for every step, or for every step but the
    last (which needs none), or a single shared one. Logits have as many dimensions as the state and
    broadcast to it: ``(B, 1)`` or ``(B, 1, 1, 1)`` for one decision an example, ``(B, 1, H, W)`` for
    one a pixel. Only what is an ``nn.Module`` has its parameters registered. A step with a true attribute
    ``indexed`` is told the number of its iteration, from 1, as ``iteration``.

    Plain steps run whoever has halted: the output is the weighted sum of their results or, in the hard
    modes, the one at halting. Steps that take the mask, as :class:`~torchpact.Residual` does, freeze halted
    positions; use them where positions see each other, so that halted ones need not be computed. In the
    hard modes frozen states are the output in the end and no running sum is kept; so it is with plain
    steps and one decision an example, when there are no gradients. Steps must leave their input as it is.

    >>> step = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    >>> block = AdaptiveBlock(step, halting=nn.Linear(8, 1), max_steps=5)
    >>> output, ponder = block(torch.randn(4, 8))
    >>> output.shape, ponder.probs.shape, ponder.cost.shape
    (torch.Size([4, 8]), torch.Size([5, 4, 1]), torch.Size([4, 1]))
    >>> output, ponder = block(torch.randn(4, 8), mode="thresholded")
    """

    details: bool
    """Whether probabilities are kept where only decisions count; see :class:`use_mode`."""

    def __init__(
        self,
        steps: Callable[..., State] | Iterable[Callable[..., State]],
        halting: Callable[..., Tensor] | Iterable[Callable[..., Tensor]],
        *,
        mode: Mode | str | None = None,
        max_steps: int | None = None,
    ) -> None:
        super().__init__()
        step_list, shared_step = as_modules("steps", steps)
        head_list, shared_head = as_modules("halting", halting)
        if shared_step:
            if max_steps is None:
                raise ValueError(
                    "expected max_steps=L with a single shared step, or a list of steps; got neither"
                )
            self.max_steps = check_count("max_steps", max_steps)
        else:
            self.max_steps = check_count("the number of steps", len(step_list))
            if max_steps not in (None, self.max_steps):
                raise ValueError(
                    f"expected max_steps={self.max_steps} for a list of as many steps, got {max_steps}"
                )
        if not shared_head and self.max_steps - len(head_list) not in (0, 1):
            raise ValueError(
                f"expected {self.max_steps - 1} or {self.max_steps} halting heads for "
                f"{self.max_steps} steps, or a single shared one; got a list of {len(head_list)}"
            )
        self.steps = nn.ModuleList(step_list)
        self.halting = nn.ModuleList(head_list)
        self.mode = Relaxed() if mode is None else as_mode(mode)
        self.details = True

    def extra_repr(self) -> str:
        """Return the settings for ``print(block)``."""
        return f"max_steps={self.max_steps}, mode={self.mode}"

    def forward(self, u: State, *context: Any, mode: Mode | str | None = None) -> tuple[State, Ponder]:
        """Run the block on ``u``; ``context`` goes to every step as further arguments."""
        mode = self.mode if mode is None else as_mode(mode)
        learning = torch.is_grad_enabled()
        keep = self.details or learning or not isinstance(mode, Thresholded)
        trace = self._iterate(u, context, mode, mode.leaves and not learning, keep)
        if not keep:
            return trace.output, _decisions(self.max_steps, trace.steps, trace.steps.float())
        return trace.output, self._ponder(trace.asked, trace.remaining, trace.steps, mode, learning)

    def _iterate(
        self, u: State, context: tuple[Any, ...], mode: Mode, skips: bool, keep: bool = True
    ) -> Trace:
        """Run the loop; with ``skips``, no further than somebody is active. Logits are kept if asked for."""
        learning = torch.is_grad_enabled()
        u = self._advance(0, u, None, context, freeze=False)
        logits = self._ask(0, u)
        # Plain iterations are what they are, whoever has halted: h of frozen states would give a wrong N,
        # and heads may look at neighbours. So the output is picked on the way, unless nobody would see
        # the difference.
        alone = logits.shape == _state.per_example(logits)
        freeze = mode.hard and (self._heeds_gate or (alone and not learning))
        remaining = torch.ones_like(logits)
        # what is held while a step runs adds to the peak of memory
        small = torch.uint8 if self.max_steps < 256 and not learning else torch.long
        steps = torch.ones_like(logits, dtype=small)
        asked: list[Tensor] = []
        output: State | None = None
        for index in range(1, self.max_steps):
            if index > 1:
                logits = self._ask(index - 1, u, like=remaining)
            if skips:
                logits = torch.where(remaining > 0, logits, torch.inf)
            if keep:
                asked.append(logits)
            weight, remaining = mode.halt(remaining, logits)
            if not freeze:
                output = _state.accumulate(output, u, weight, mode.hard)
            gate = mode.gate(remaining)
            open_gate = gate > 0
            if skips and readable(open_gate) and not open_gate.any():
                break
            steps = steps + open_gate
            if mode.hard and not learning:
                remaining = gate  # which it equals
            del logits, weight, open_gate
            u = self._advance(index, u, gate, context, freeze)
        output = u if freeze else _state.accumulate(output, u, remaining, mode.hard)
        return Trace(_state.like(output, u), asked, remaining, steps.long())

    @property
    def _heeds_gate(self) -> bool:
        """Whether any step after the first takes the gate."""
        return any(is_gated(step) for step in (self.steps[1:] if len(self.steps) > 1 else self.steps))

    def _step(self, index: int) -> nn.Module:
        """Return the step at ``index``, be it one that all iterations share."""
        return self.steps[index if len(self.steps) > 1 else 0]

    def _advance(
        self, index: int, u: State, gate: Tensor | None, context: tuple[Any, ...], freeze: bool
    ) -> State:
        step = self._step(index)
        # a step that takes the gate leaves closed positions as they are; for others the block does
        freezes_itself = gate is not None and is_gated(step)
        before = _state.versions(u)
        told: dict[str, Any] = {"iteration": index + 1} if is_indexed(step) else {}
        if gate is not None and freezes_itself:
            told["gate"] = gate.to(_state.parts(u)[0].dtype)
        moved: State = step(u, *context, **told)
        if index == 0:
            return moved
        if before != _state.versions(u):
            raise ValueError(
                f"step {index + 1} changed its input in place, expected a new state and the old as it was"
            )
        if _state.shape_of(moved) != _state.shape_of(u):
            raise ValueError(
                f"step {index + 1} changed the shape of the state: "
                f"expected {_state.shape_of(u)}, got {_state.shape_of(moved)}"
            )
        if gate is None or freezes_itself or not freeze:
            return moved
        return _state.where(gate > 0, moved, u)

    def _ask(self, index: int, u: State, like: Tensor | None = None) -> Tensor:
        """Return the halting logits after the step at ``index``, checked, in fp32 or better."""
        first = _state.parts(u)[0]
        if not self.halting:  # a single step and no head: one position an example
            return at_least_single(first.new_zeros(_state.per_example(first)))
        logits = self.halting[index if len(self.halting) > 1 else 0](u)
        for part in _state.parts(u):
            if not isinstance(logits, Tensor) or not _state.broadcasts(logits, part):
                raise ValueError(
                    f"halting head {index + 1} gave {_state.shape_of(logits)}, expected logits that "
                    f"broadcast to the state's {tuple(part.shape)} without adding dimensions, "
                    f"such as {_state.per_example(part)}"
                )
        if like is not None and logits.shape != like.shape:
            raise ValueError(
                f"halting head {index + 1} gave {tuple(logits.shape)}, "
                f"expected the first's {tuple(like.shape)}"
            )
        return at_least_single(logits)

    def _ponder(self, asked: list[Tensor], like: Tensor, steps: Tensor, mode: Mode, learning: bool) -> Ponder:
        always = torch.full_like(like, torch.inf)
        logits = torch.stack(asked + [always] * (self.max_steps - len(asked)))
        asked.clear()
        expected = _steps_from_survival(torch.sigmoid(-logits[:-1]), 0)
        probs = torch.sigmoid(logits)
        known = learning or not mode.hard
        return Ponder(
            probs=probs,
            steps=steps,
            expected_steps=expected,
            cost=mode.cost(probs, steps, expected) if known else steps.to(expected.dtype),
            log_prob=mode.log_prob(logits, steps),
        )


def _decisions(max_steps: int, steps: Tensor, cost: Tensor, nan: Tensor | None = None) -> Ponder:
    """Return a ponder of decisions only; all else is one ``nan``, which nobody but the caller may have."""
    if nan is None:
        nan = torch.full((), torch.nan, dtype=cost.dtype, device=steps.device)
    return Ponder(nan.expand(max_steps, *steps.shape), steps, nan.expand(steps.shape), cost, None)


class use_mode:
    """Set the mode of every adaptive block below ``model``; in a ``with`` statement, for its duration.

    Without ``details`` a thresholded run without gradients keeps ``steps`` and ``cost`` of the ponder only:
    the probabilities of all pixels can take more memory than the maps of a network of few channels do.

    >>> block = AdaptiveBlock(nn.Tanh(), nn.Linear(8, 1), max_steps=3)
    >>> with use_mode(block, "thresholded"):
    ...     block.mode
    Thresholded(threshold=0.5)
    >>> block.mode
    Relaxed(temperature=0.666..., clip=0.01)
    """

    def __init__(self, model: nn.Module, mode: Mode | str, *, details: bool = True) -> None:
        self._model, self._wanted = model, (as_mode(mode), details)
        if any(getattr(module, "_deployed", False) is True for module in model.modules()):
            raise ValueError(
                "expected a model, got what is deployed: deploy the model again, in another mode"
            )
        self._before: list[tuple[AdaptiveBlock, Mode, bool]] = []
        self._set()

    def _set(self) -> None:
        blocks = [m for m in self._model.modules() if isinstance(m, AdaptiveBlock)]
        self._before = [(block, block.mode, block.details) for block in blocks]
        for block in blocks:
            block.mode, block.details = self._wanted

    def __enter__(self) -> nn.Module:
        if any((block.mode, block.details) != self._wanted for block, _, _ in self._before):  # entered again
            self._set()
        return self._model

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for block, mode, details in self._before:
            block.mode, block.details = mode, details
