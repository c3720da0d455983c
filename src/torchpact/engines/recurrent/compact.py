"""The engine "recurrent_compact": in every time step, examples that have halted are dropped from the batch.

Plain PyTorch, for any cell and head, and for all modes in which examples can be done early. It waits for the
device in every iteration, so it pays where the matrix products are large.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from torchpact.checks import readable
from torchpact.core import state as _state
from torchpact.core.criterion import Criterion
from torchpact.core.loop import HaltingLoop, decide
from torchpact.core.modes import Mode
from torchpact.core.ponder import Ponder
from torchpact.core.state import State
from torchpact.engines.base import Unsupported
from torchpact.engines.recurrent.runner import LayerCall, RecurrentEngine, RecurrentRunner, rnn_of
from torchpact.specs import BlockSpec
from torchpact.specs.blocks import Bounds


class CompactRecurrent(RecurrentEngine):
    """Batch compaction in every time step."""

    name: ClassVar[str] = "recurrent_compact"
    tolerance: ClassVar[Mapping[torch.dtype, float]] = {
        torch.float64: 1e-10,
        torch.float32: 1e-4,
        torch.float16: 2e-2,
        torch.bfloat16: 2e-2,
    }
    host_sync: ClassVar[bool] = True

    def check(self, spec: BlockSpec, call: LayerCall) -> None:
        """Raise :class:`Unsupported` if it cannot run such a layer on such a call."""
        reason = CompactRunner(spec).refusal(call)
        if reason is not None:
            raise Unsupported(reason)

    def make(self, spec: BlockSpec, call: LayerCall) -> "CompactRunner":
        """Return a runner of a layer that was checked."""
        return CompactRunner(spec)


class CompactRunner(RecurrentRunner):
    """A layer whose cell and head run on the active examples only."""

    host_sync = True

    def __init__(self, spec: BlockSpec) -> None:
        super().__init__(rnn_of(spec))

    def refusal(self, call: LayerCall) -> str | None:
        """Return None if it can run a call, or one line that says why not."""
        if not isinstance(call.data, Tensor) or not readable(call.data):
            return "expected values that can be read, got a call that is compiled, captured or transformed"
        if not call.mode.leaves:
            return f"expected a mode in which examples are done early, got {call.mode}"
        if any(isinstance(head, Criterion) for head in self.module.block.halting):
            return "expected a head of the state, got a criterion"
        if self.module.never_halts and call.bounds is None:
            return "expected a head that may halt, got never_halt"
        return None

    def run(self, call: LayerCall) -> Any:
        """Run a call that was not refused."""
        return self.module.run(
            call.input, call.state, lengths=call.lengths, mode=call.mode, bounds=call.bounds, read=self._read
        )

    def _read(
        self, packed: PackedSequence, u: State, mode: Mode, bounds: Bounds
    ) -> tuple[Tensor, State, Ponder]:
        return self.module.read(packed, u, mode, bounds, self._time_step)

    def _time_step(
        self, u: State, first: Tensor, again: Tensor, mode: Mode, bounds: Bounds
    ) -> tuple[HaltingLoop, State]:
        """Run a time step; logits and decisions are those of all examples, so that draws are, too."""
        block = self.module.block
        loop = HaltingLoop.start(mode, block.max_steps, bounds=bounds, may_stop=True)
        u = block.run_step(0, u, None, (first, again))
        logits = block.halting_logits(0, u)
        rows = torch.arange(len(logits), device=logits.device)
        output = _Output(u, mode.hard)
        for step in range(1, block.max_steps):
            if step > 1:
                found = block.halting_logits(step - 1, u)
                logits = torch.full_like(logits, torch.inf).index_copy_(0, rows, found)
            loop, weight = decide(loop, logits)
            assert loop.gate is not None
            if not mode.hard:
                assert weight is not None
                output.add(rows, u, weight.index_select(0, rows))
            goes_on = (loop.gate > 0)[:, 0].index_select(0, rows)
            stay = goes_on.nonzero()[:, 0]
            if len(stay) < len(rows):
                if mode.hard:
                    halted = (~goes_on).nonzero()[:, 0]
                    output.put(rows.index_select(0, halted), _state.rows_of(u, halted))
                rows, u = rows.index_select(0, stay), _state.rows_of(u, stay)
                again = again.index_select(0, stay)
            if not len(rows):
                loop.draw_the_rest()
                break
            u = block.run_step(step, u, None, (first, again))
        if block.max_steps == 1:
            loop, _ = decide(loop, logits)
        assert loop.remaining is not None
        if mode.hard:
            output.put(rows, u)
        else:
            output.add(rows, u, loop.remaining.index_select(0, rows))
        return loop, _state.like(output.state, u)


class _Output:
    """The output of a time step, in the order of the batch: the states at halting, or their weighted sum."""

    def __init__(self, u: State, hard: bool) -> None:
        def zeros(part: Tensor) -> Tensor:
            # one-hot weights sum up nothing; others do so in single precision at least
            kind = part.dtype if hard else torch.promote_types(part.dtype, torch.float32)
            return torch.zeros_like(part, dtype=kind)

        self.state = _state.map_state(zeros, u)

    def put(self, rows: Tensor, u: State) -> None:
        """Enter the states of some rows."""

        def put(total: Tensor, part: Tensor) -> Tensor:
            kind = torch.promote_types(total.dtype, part.dtype)  # autocast may change it on the way
            return total.to(kind).index_copy_(0, rows, part.to(kind))

        self.state = _state.map_state(put, self.state, u)

    def add(self, rows: Tensor, u: State, weight: Tensor) -> None:
        """Add the weighted states of some rows."""
        for total, part in zip(_state.parts(self.state), _state.parts(u), strict=True):
            total.index_add_(0, rows, (weight * part).to(total.dtype))
