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
from torchpact.core.criterion import Criterion
from torchpact.core.loop import HaltingLoop
from torchpact.core.modes import Mode
from torchpact.core.ponder import Ponder
from torchpact.core.state import State
from torchpact.engines.base import Unsupported
from torchpact.engines.generic.compact import run_compacted
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
        if not call.mode.can_exit_early:
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
        """Run a time step."""
        block = self.module.block
        loop = HaltingLoop.start(mode, block.max_steps, bounds=bounds, may_stop=False)
        # later steps do not look at the input of the first one
        return run_compacted(block, u, ((first, again), {}), ((False, True), {}), loop)
