"""The parts of an adaptive recurrent layer: the transition, and heads that say when to halt."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from torchpact.checks import one_line
from torchpact.core import state as _state
from torchpact.core.criterion import Criterion
from torchpact.core.state import State
from torchpact.specs.heads import LinearHead, NeverHead
from torchpact.specs.providers import register_head, register_step
from torchpact.specs.steps import RecurrentCell


class HaltingUnit(nn.Module):
    """The logit Wu + b of the halting probability of a recurrent state; of an LSTM's, u is the output h.

    >>> HaltingUnit(16)((torch.zeros(2, 16), torch.zeros(2, 16))).flatten()
    tensor([1., 1.], grad_fn=...)
    """

    def __init__(self, size: int, bias: float = 1.0) -> None:
        super().__init__()
        self.linear = nn.Linear(size, 1)
        nn.init.constant_(self.linear.bias, bias)

    def forward(self, state: State) -> Tensor:
        """Return a logit for every example."""
        logits: Tensor = self.linear(_state.parts(state)[0])
        return logits


def never_halt(state: State) -> Tensor:
    """A head that never halts: with it a recurrent layer runs its cell ``max_steps`` times, always.

    >>> rnn = tp.AdaptiveRNN(nn.GRUCell(9, 16), max_steps=3, halting=never_halt)
    >>> rnn(torch.randn(5, 2, 8))[2].steps
    tensor([[3, 3, 3, 3, 3],
            [3, 3, 3, 3, 3]])
    """
    h = _state.parts(state)[0]
    return torch.full_like(h[:, :1], -torch.inf)


class Transition(nn.Module):
    """One iteration uˡ = F(x, [l = 1], uˡ⁻¹); the flag that a new time step begins is the last input.

    >>> step = Transition(nn.RNNCell(2, 4))
    >>> first, again = torch.tensor([[0.3, 1.0]]), torch.tensor([[0.3, 0.0]])
    >>> u = step(torch.zeros(1, 4), first, again, iteration=1)
    >>> u = step(u, first, again, iteration=2)
    """

    indexed = True

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, u: State, first: Tensor, again: Tensor, *, iteration: int) -> State:
        """Return the next state; ``first`` is the input with the flag up, ``again`` with the flag down."""
        state: State = self.cell(first if iteration == 1 else again, u)
        return state


def probe(cell: nn.Module) -> State:
    """Run a cell on three rows of zeros, to see that it is one and what its state looks like."""
    if not isinstance(cell, nn.Module):
        raise TypeError(f"expected a cell such as nn.LSTMCell(9, 16), got {type(cell).__name__}")
    size = getattr(cell, "input_size", None)
    if not isinstance(size, int) or size < 2:
        raise ValueError(
            "expected a cell whose input_size is at least 2, for the input and the flag; "
            f"got {type(cell).__name__} with {'none' if size is None else size}"
        )
    batch = 3
    zeros = next(cell.parameters(), torch.empty(0)).new_zeros(batch, size)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        state = _run(cell, zeros, None, "expected a cell that starts without a state")
        shape = _state.shape_of(state)
        parts = state if isinstance(state, tuple) and state else (state,)
        if any(not isinstance(part, Tensor) or part.dim() != 2 or len(part) != batch for part in parts):
            raise ValueError(
                "expected a cell whose state is a tensor of shape (batch, size) or a tuple of them, "
                f"got {shape} for a batch of {batch}"
            )
        again = _run(cell, zeros, state, f"expected a cell that takes the state it returns, {shape}")
    if _state.shape_of(again) != shape:
        raise ValueError(
            f"expected a cell whose state keeps its shape, {shape}; got {_state.shape_of(again)} after it"
        )
    return state  # type: ignore[no-any-return]


def check_head(halting: Callable[[State], Tensor], state: State) -> None:
    """Run a halting head on a state, to see that it gives one logit an example."""
    if isinstance(halting, Criterion):
        raise ValueError(f"expected a halting head of the state, got the criterion {type(halting).__name__}")
    batch = len(_state.parts(state)[0])
    with torch.no_grad():
        logits = halting(state)
    if not isinstance(logits, Tensor) or logits.shape != (batch, 1):
        raise ValueError(
            f"expected a halting head that gives (batch, 1), got {_state.shape_of(logits)} "
            f"for a batch of {batch}"
        )


def _run(cell: nn.Module, x: Tensor, state: Any, expected: str) -> Any:
    try:
        return cell(x, state)
    except Exception as error:  # a user's cell may raise anything
        why = f"{type(error).__name__}: {one_line(error)}"
        raise ValueError(f"{expected}; {type(cell).__name__} raised {why}") from error


@register_step(Transition)
def _cell_spec(step: Transition) -> RecurrentCell:
    """Return what a transition is with one of torch's own cells."""
    cell = step.cell
    if type(cell) is nn.LSTMCell:
        return RecurrentCell(cell, "lstm")
    if type(cell) is nn.GRUCell:
        return RecurrentCell(cell, "gru")
    if type(cell) is nn.RNNCell and cell.nonlinearity == "tanh":
        return RecurrentCell(cell, "rnn")
    raise TypeError(f"expected an nn.LSTMCell, an nn.GRUCell or an nn.RNNCell with tanh, got {cell}")


@register_head(HaltingUnit)
def _unit_spec(unit: HaltingUnit) -> LinearHead:
    if type(unit.linear) is not nn.Linear:
        raise TypeError(f"expected a halting unit with an nn.Linear, got {type(unit.linear).__name__}")
    return LinearHead(unit.linear.weight, unit.linear.bias, unit)


@register_head(never_halt)
def _never_spec(head: Any) -> NeverHead:
    return NeverHead(head)
