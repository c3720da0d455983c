"""Recurrent networks that ponder: every time step is an adaptive block (section 4.2)."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence

from torchpact.checks import at_least_single, check_number
from torchpact.core import state as _state
from torchpact.core.block import AdaptiveBlock
from torchpact.core.callables import unwrapped
from torchpact.core.collect import report
from torchpact.core.loop import HaltingLoop
from torchpact.core.modes import Mode, as_mode
from torchpact.core.ponder import Ponder
from torchpact.core.state import State
from torchpact.core.thresholds import Thresholds
from torchpact.nn.cells import HaltingUnit, Transition, check_head, never_halt, probe
from torchpact.nn.packed_sequence import pack, pad, time_first, with_time
from torchpact.nn.time_steps import Read, TimeStep, ponder_of_loops, repeated
from torchpact.specs.blocks import BlockSpec, Bounds
from torchpact.specs.providers import block_spec, register_block

_COMPACT = "compact=... does nothing any more: use torchpact.deploy to skip halted examples"


class AdaptiveRNN(nn.Module):
    """A recurrent layer that decides at every time step how often to run its cell.

    ``cell`` is an ``nn.LSTMCell``, ``GRUCell`` or ``RNNCell`` for one input more than there are: the last
    tells the first iteration of a time step. Any module with an ``input_size`` that maps (input, state)
    to a new state will do, where a state is a tensor of shape (batch, size) or a tuple of them, the first
    of which is the output, and None stands for zeros. ``halting`` is a head from states to logits of
    shape (batch, 1), by default a :class:`HaltingUnit` whose bias starts at ``halting_bias``, as Graves
    has it; see also :func:`never_halt`.

    The call is that of ``nn.LSTM``, for batches: input of shape (time, batch, features), or (batch, time,
    features) with ``batch_first``, optionally with the ``lengths`` of the sequences, in any order; or a
    ``PackedSequence``. An initial state is what the cell takes, (batch, size) each. What comes back are
    the outputs in the form of the input, the state after each sequence's last time step, and a
    :class:`~torchpact.Ponder` with positions (batch, time), whatever ``batch_first``. Padding is not
    computed and costs nothing: there the outputs, ``steps``, ``cost`` and ``log_prob`` are 0.

    In the soft modes the state handed on is the mean of the iterations' states, in the hard ones the
    state at halting. ACT stops when every example has, in training too: its ``expected_steps`` then
    count the iterations that were run. The layer computes all examples of a time step until all of them
    have halted; :func:`~torchpact.deploy` puts an engine in its place that skips halted examples, and
    returns the same.

    An objective averages the cost of an example over its real time steps (the ponder's ``weights`` are 0
    for padding), so let its nll be their mean too: the sum over the real time steps of an example, divided
    by their number.

    Args:
        cell: A cell of torch, or another as above, with one input for the flag.
        max_steps: L, the most iterations of a time step.
        halting: The head; by default a :class:`HaltingUnit`.
        halting_bias: The initial bias of the default head.
        mode: What decides, or its name; by default relaxed.
        batch_first: Whether inputs and outputs are (batch, time, features).
        compact: Deprecated; it does nothing.

    Raises:
        TypeError: ``cell`` is no module.
        ValueError: The cell or the head does not work as above.

    Example:
        >>> rnn = AdaptiveRNN(nn.LSTMCell(8 + 1, 16), max_steps=5, batch_first=True)
        >>> output, (h, c), ponder = rnn(torch.randn(3, 7, 8), lengths=[7, 2, 4])
        >>> output.shape, h.shape, ponder.cost.shape
        (torch.Size([3, 7, 16]), torch.Size([3, 16]), torch.Size([3, 7]))

    """

    def __init__(
        self,
        cell: nn.Module,
        max_steps: int,
        *,
        halting: Callable[[State], Tensor] | None = None,
        halting_bias: float = 1.0,
        mode: Mode | str | None = None,
        batch_first: bool = False,
        compact: bool | None = None,
    ) -> None:
        super().__init__()
        if compact is not None:
            warnings.warn(_COMPACT, DeprecationWarning, stacklevel=2)
        check_number("halting_bias", halting_bias, open_low=True, open_high=True)
        state = probe(cell)
        # the layout of a state, without values
        self._example = _state.map_state(lambda part: part[:1].to("meta"), state)
        self.batch_first = batch_first
        output = _state.parts(state)[0]
        if halting is None:
            halting = HaltingUnit(output.size(1), halting_bias).to(output.device, output.dtype)
        self.block = AdaptiveBlock(Transition(cell), halting, mode=mode, max_steps=max_steps)
        check_head(halting, state)

    @property
    def cell(self) -> nn.Module:
        """The cell, which takes one input more than the layer."""
        cell: nn.Module = self._transition.cell
        return cell

    @property
    def input_size(self) -> int:
        """The number of features of the input."""
        return int(self.cell.input_size) - 1  # type: ignore[arg-type]

    @property
    def hidden_size(self) -> int:
        """The number of features of the output."""
        return _state.parts(self._example)[0].size(1)

    @property
    def max_steps(self) -> int:
        """L, the most iterations of a time step."""
        return self.block.max_steps

    @property
    def never_halts(self) -> bool:
        """Whether the head is :func:`never_halt`."""
        return unwrapped(self.block.halting[0]) is never_halt

    @property
    def _transition(self) -> Transition:
        transition = self.block.steps[0]
        assert isinstance(transition, Transition)
        return transition

    def forward(
        self,
        input: Tensor | PackedSequence,
        state: State | None = None,
        *,
        lengths: Tensor | Sequence[int] | None = None,
        mode: Mode | str | None = None,
        thresholds: Thresholds | float | None = None,
    ) -> tuple[Any, State, Ponder]:
        """Return the outputs, the final state, and what every time step did.

        Args:
            input: Sequences, (time, batch, features), or (batch, time, features) with ``batch_first``; or a
                ``PackedSequence``.
            state: What the sequences begin with; None is zeros.
            lengths: Of the sequences, in any order, where they differ.
            mode: The mode of this run; by default that of the block.
            thresholds: What halts in this run, in thresholded mode.

        Returns:
            The outputs in the form of the input, the state after each sequence's last time step, and a ponder
            with positions (batch, time).

        Raises:
            TypeError: The input is neither a tensor nor a ``PackedSequence``.
            ValueError: The input, the state or the lengths do not fit the layer or each other.

        """
        mode = self.block.mode if mode is None else as_mode(mode)
        bounds = self.block.bounds_of(mode, thresholds)
        output, final, ponder = self.run(input, state, lengths=lengths, mode=mode, bounds=bounds)
        report(self.block, ponder)
        return output, final, ponder

    def run(
        self,
        input: Tensor | PackedSequence,
        state: State | None = None,
        *,
        lengths: Tensor | Sequence[int] | None = None,
        mode: Mode,
        bounds: Bounds = None,
        read: Read | None = None,
    ) -> tuple[Any, State, Ponder]:
        """Do what :meth:`forward` does; an engine has the packed sequences read in another way.

        Args:
            input: As in :meth:`forward`, like ``state`` and ``lengths``.
            state: What the sequences begin with.
            lengths: Of the sequences.
            mode: What decides.
            bounds: What logits must exceed, for each of the L − 1 decisions, in thresholded mode.
            read: Reads the packed sequences; by default :meth:`read`.

        Returns:
            As :meth:`forward`.

        """
        if isinstance(input, PackedSequence):
            packed = pack(input, lengths, self.input_size)
            self.check_state(state, int(packed.batch_sizes[0]))
        else:
            by_time = time_first(input, self.input_size, self.batch_first)
            self.check_state(state, by_time.size(1))
            packed = pack(by_time, lengths, self.input_size)
        u = self._initial_state(state, packed)
        outputs, final, ponder = (read or self.read)(packed, u, mode, bounds)
        if packed.unsorted_indices is not None:
            final = _state.rows_of(final, packed.unsorted_indices)
        if isinstance(input, PackedSequence):
            ponder = with_time(ponder, packed, total=len(packed.batch_sizes))
            return packed._replace(data=outputs), final, self.named(ponder)
        total = input.size(1 if self.batch_first else 0)
        output = pad(outputs, packed, total)
        if not self.batch_first:
            output = output.transpose(0, 1)
        return output, final, self.named(with_time(ponder, packed, total))

    def named(self, ponder: Ponder) -> Ponder:
        """Return a ponder with the name and the price of the layer's block."""
        return ponder._replace(name=self.block.name, price=self.block.price)

    def read(
        self,
        packed: PackedSequence,
        u: State,
        mode: Mode,
        bounds: Bounds,
        time_step: TimeStep | None = None,
    ) -> tuple[Tensor, State, Ponder]:
        """Read packed sequences, one time step after the other.

        Args:
            packed: The sequences.
            u: The state that each begins with, the longest sequence first.
            mode: What decides.
            bounds: What logits must exceed, for each of the L − 1 decisions, in thresholded mode.
            time_step: Runs a time step; by default all examples until all have halted.

        Returns:
            The outputs of all time steps, the final state and the ponder, as they are packed.

        """
        time_step = time_step or self._time_step
        sizes: list[int] = packed.batch_sizes.tolist()
        loops, outputs, ended = [], [], []
        flagged = F.pad(packed.data, (0, 1), value=1.0).split(sizes)
        unflagged = F.pad(packed.data, (0, 1), value=0.0).split(sizes)
        for first, again in zip(flagged, unflagged, strict=True):
            # the longest sequences come first, so those that have ended are the last rows
            count, before = len(first), len(_state.parts(u)[0])
            if count < before:
                ended.append(_state.map_state(lambda part, n=count: part[n:], u))
                u = _state.map_state(lambda part, n=count: part[:n], u)
            loop, u = time_step(u, first, again, mode, bounds)
            loops.append(loop)
            outputs.append(_state.parts(u)[0])
        final = _state.map_state(lambda *parts: torch.cat(parts), u, *reversed(ended))
        return torch.cat(outputs), final, ponder_of_loops(loops, self.max_steps, mode)

    def unroll(self, input: Tensor, state: State | None = None) -> tuple[Tensor, Tensor]:
        """Run all L iterations of a single time step on input of shape (batch, features), halted or not.

        Returns their outputs, (L, batch, size), and the logits of their halting probabilities, (L, batch),
        the last of them +∞, as :func:`~torchpact.ponder_loss` takes them.

        >>> rnn = AdaptiveRNN(nn.GRUCell(8 + 1, 16), max_steps=5)
        >>> outputs, logits = rnn.unroll(torch.randn(3, 8))
        >>> outputs.shape, logits.shape
        (torch.Size([5, 3, 16]), torch.Size([5, 3]))
        """
        (input,) = time_first(input.unsqueeze(0), self.input_size, batch_first=False)
        self.check_state(state, len(input))
        u = self.zero_state(len(input), input) if state is None else state
        first, again = (F.pad(input, (0, 1), value=flag) for flag in (1.0, 0.0))
        outputs, logits = [], []
        for iteration in range(1, self.max_steps + 1):
            u = self._transition(u, first, again, iteration=iteration)
            outputs.append(_state.parts(u)[0])
            if iteration < self.max_steps:
                logits.append(at_least_single(self.block.halting[0](u))[:, 0])
        logits.append(at_least_single(input.new_full((len(input),), torch.inf)))
        return torch.stack(outputs), torch.stack(logits)

    def _time_step(
        self, u: State, first: Tensor, again: Tensor, mode: Mode, bounds: Bounds
    ) -> tuple[HaltingLoop, State]:
        if self.never_halts and bounds is None:
            return repeated(self._transition, self.max_steps, u, first, again, mode)
        may_stop = mode.can_exit_early and not (torch.is_grad_enabled() and mode.needs_every_h)
        loop, u = self.block.iterate(u, (first, again), mode=mode, bounds=bounds, may_stop=may_stop)
        return loop, loop.output_of(u)

    def _initial_state(self, state: State | None, packed: PackedSequence) -> State:
        if state is None:
            # in the precision of the input, as torch's cells do it
            return self.zero_state(int(packed.batch_sizes[0]), packed.data)
        return state if packed.sorted_indices is None else _state.rows_of(state, packed.sorted_indices)

    def zero_state(self, batch: int, like: Tensor) -> State:
        """Return zeros for so many sequences to begin with, of the type and on the device of ``like``.

        >>> rnn = AdaptiveRNN(nn.GRUCell(8 + 1, 16), max_steps=5)
        >>> rnn.zero_state(3, torch.empty(0)).shape
        torch.Size([3, 16])
        """
        return _state.map_state(lambda part: like.new_zeros(batch, part.size(1)), self._example)

    def check_state(self, state: State | None, batch: int) -> None:
        """Refuse an initial state that is not one for so many sequences."""
        if state is None:
            return
        shapes = tuple((batch, part.size(1)) for part in _state.parts(self._example))
        expected, given = shapes[0] if isinstance(self._example, Tensor) else shapes, _state.shape_of(state)
        if given != expected:
            raise ValueError(f"expected an initial state of shape {expected}, got {given}")


@register_block(AdaptiveRNN)
def _spec(rnn: AdaptiveRNN) -> BlockSpec:
    """Return what a time step is; the module is the layer, whose call differs from that of a block."""
    spec, batch_dim = block_spec(rnn.block), 0 if rnn.batch_first else 1
    return replace(spec, module=rnn, shared=True, batch_dim=batch_dim, recurrent=True)
