"""The engine ``stream``: of a large batch a part is under way at a time, and that part is kept full."""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from torchpact.core import state
from torchpact.core.block import AdaptiveBlock
from torchpact.core.call_args import CallArgs
from torchpact.core.modes import Mode, Thresholded
from torchpact.core.ponder import Ponder
from torchpact.core.state import State
from torchpact.engines.base import Engine, Unsupported
from torchpact.engines.generic.compact import CompactRunner
from torchpact.engines.generic.independence import check_independence
from torchpact.engines.generic.intake import Intake
from torchpact.engines.generic.lanes import Lanes, problem_of
from torchpact.engines.generic.streaming import Ends, Streaming
from torchpact.engines.timing import interleaved
from torchpact.specs import BlockSpec, NetworkSpec
from torchpact.specs.blocks import Bounds

WIDTHS = (64, 256, 1024)
"""How many examples may run side by side; ``deploy`` measures those that are less than half of the batch."""


class StreamRunner(CompactRunner):
    """Runs a block whose iterations share their step on a batch, a part of which is under way at a time.

    Args:
        block: The block.
        positions: Whether positions are examples of their own, see :class:`CompactRunner`.
        example: A call that independence was tested on.
        width: How many examples run side by side.

    Example:
        >>> block = tp.AdaptiveBlock(nn.Linear(8, 8), nn.Linear(8, 1), max_steps=4, mode="thresholded")
        >>> u = torch.randn(50, 8)
        >>> with torch.no_grad():
        ...     expected, _ = block(u)
        >>> output, ponder = StreamRunner(block, width=8)(u)
        >>> torch.allclose(output, expected, atol=1e-6)
        True

    """

    def __init__(
        self,
        block: AdaptiveBlock,
        positions: bool = False,
        example: tuple[State, CallArgs] | None = None,
        width: int = WIDTHS[0],
    ) -> None:
        super().__init__(block, positions, example)
        self.width = width

    def tune(self, u: State, context: CallArgs) -> None:
        """Choose the width.

        Raises:
            Unsupported: There are too few examples to keep a batch full.

        """
        first = state.parts(u)[0]
        count = first[..., 0].numel() if self.positions else len(first)
        widths = _widths(count)
        if not widths:
            raise Unsupported(f"stream: expected more than {2 * WIDTHS[0]} examples, got {count}")
        runners = {str(w): StreamRunner(self.block, self.positions, width=w) for w in widths}
        calls = {name: lambda run=run: run(u, context) for name, run in runners.items()}
        seconds = interleaved(calls, seconds=0, least=2) if len(widths) > 1 else {}
        self.width = min(widths, key=lambda width: seconds.get(str(width), 0.0))

    def _run(
        self, u: State, rest: tuple[Any, ...], per_example: Any, mode: Mode, bounds: Bounds
    ) -> tuple[State, Ponder]:
        block = self.block
        if not len(state.parts(u)[0]):
            raise Unsupported("stream: expected a batch of at least one example")
        keeps = block.details or not isinstance(mode, Thresholded)
        lanes = Lanes(block, mode, bounds, block.max_steps, keeps_logits=keeps, per_example=per_example)
        args, named = per_example
        examples: Any = True if isinstance(u, Tensor) else (True,) * len(u)
        given = CallArgs((u, *rest[0]), rest[1])
        intake = Intake(iter([given]), True, None, block.max_steps, CallArgs((examples, *args), named))
        (unit,) = Streaming(lanes, intake, self.width, Ends.of(block, mode, None, None), None).results()
        assert unit.ponder is not None
        return unit.output, unit.ponder._replace(name="", price=1.0)


class StreamEngine(Engine):
    """Blocks whose iterations share their step, on batches large enough to keep a narrower one full."""

    name = "stream"
    host_sync = True
    tolerance: ClassVar[Mapping[torch.dtype, float]] = {torch.float32: 1e-4, torch.bfloat16: 2e-2}

    def concerns(self, spec: BlockSpec | NetworkSpec) -> bool:
        """Whether a part is an adaptive block whose iterations share their step."""
        return isinstance(spec, BlockSpec) and isinstance(spec.module, AdaptiveBlock) and spec.shared

    def supports(self, spec: BlockSpec | NetworkSpec, example: CallArgs) -> str | None:
        """Blocks in a mode in which examples halt for good and that draws nothing."""
        if not isinstance(spec, BlockSpec) or not isinstance(spec.module, AdaptiveBlock) or not spec.heads:
            return "stream: expected an adaptive block"
        problem = problem_of(spec.module, spec.mode)
        return None if problem is None else f"stream: {problem}"

    def build(self, spec: BlockSpec | NetworkSpec, example: CallArgs) -> StreamRunner:
        """Return a runner, once steps are seen to treat examples, or positions, independently."""
        assert isinstance(spec, BlockSpec)
        assert isinstance(spec.module, AdaptiveBlock)
        u, context = example.args[0], CallArgs(example.args[1:], dict(example.kwargs))
        first = state.parts(u)[0]
        if not _widths(first[..., 0].numel()):
            raise Unsupported(f"stream: expected more than {2 * WIDTHS[0]} examples, got {len(first)}")
        positions = check_independence(spec.module, u, context)
        return StreamRunner(spec.module, positions, (u, context))


def _widths(count: int) -> list[int]:
    return [width for width in WIDTHS if 2 * width < count]
