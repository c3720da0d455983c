"""What runs in the place of the blocks of somebody's network, and how long the network takes with it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from torchpact.core.block import AdaptiveBlock
from torchpact.engines.block_spec import FoldedBlock, Runner, Unsupported
from torchpact.engines.generic import dense
from torchpact.engines.timing import interleaved
from torchpact.engines.validation import check_block
from torchpact.flops.call_capture import Call, Given

Forward = Callable[..., Any]


class StandIn:
    """What an engine made of a block; what that does not know, the block runs itself."""

    def __init__(self, block: AdaptiveBlock, run: Forward) -> None:
        self.block, self.run = block, run
        self.knows: Callable[..., bool] = getattr(run, "knows", _knows_maps)
        self.contiguous = False  # the layout of maps that it returns; else channels last

    def __call__(self, u: Any, *context: Any, **options: Any) -> Any:
        """Return the output, and what the block did."""
        told = any(value is not None for value in options.values())
        if not told and self.knows(u, *context):
            with suppress(Unsupported):
                output, ponder = self.run(u, *context)
                return _as_wanted(output, self.contiguous), ponder
        return AdaptiveBlock.forward(self.block, u, *context, **options)


class Plain:
    """All steps of a block, and no decisions; ponders are those that the example had before."""

    def __init__(self, block: AdaptiveBlock, calls: Sequence[Call]) -> None:
        self.block, self.ponders, self.turn = block, [call.ponder for call in calls], 0
        self.contiguous = False
        self.folded: Runner | None = None
        with suppress(TypeError, ValueError):  # others have no batch norms that we know of
            check_block(block)
            self.folded = dense.build_plain(FoldedBlock(block))

    def __call__(self, u: Any, *context: Any, **_options: Any) -> Any:
        """Return the last state."""
        self.turn += 1
        ponder = self.ponders[self.turn % len(self.ponders) - 1]
        if self.folded is not None:
            u, _ = self.folded(u.contiguous(memory_format=torch.channels_last))
            return _as_wanted(u, self.contiguous), ponder
        for index in range(self.block.max_steps):
            gate = torch.ones(ponder.steps.shape, device=ponder.steps.device) if index else None
            u = self.block.run_step(index, u, gate, context)
        return u, ponder


def _knows_maps(u: Any, *context: Any) -> bool:
    return not context


def _as_wanted(output: Any, contiguous: bool) -> Any:
    return output.contiguous() if contiguous and isinstance(output, Tensor) else output


StandIns = Mapping[AdaptiveBlock, StandIn | Plain]


def put_in(stand_ins: StandIns) -> None:
    """Have others run in the place of blocks, whoever refers to these and from wherever."""
    for block, stand_in in stand_ins.items():
        block.forward = stand_in  # type: ignore[method-assign]


@contextmanager
def standing_in(stand_ins: StandIns) -> Iterator[None]:
    """Do so for a while."""
    put_in(stand_ins)
    try:
        yield
    finally:
        for block in stand_ins:
            del block.forward


def with_channels_last(given: Given) -> Given:
    """Return inputs with maps in another layout, as engines and most convolutions like them."""
    named = {name: _channels_last(x) for name, x in given.named.items()}
    return Given(tuple(_channels_last(x) for x in given.inputs), named)


def _channels_last(x: Any) -> Any:
    is_map = isinstance(x, Tensor) and x.dim() == 4
    return x.contiguous(memory_format=torch.channels_last) if is_map else x


class Rebuilt:
    """A network with other blocks, measured in both layouts of its inputs."""

    def __init__(self, net: nn.Module, given: Given, stand_ins: StandIns) -> None:
        self.net, self.stand_ins = net, stand_ins
        self.layouts = [given]
        self._fit(given)
        last = with_channels_last(given)
        if any(x is not y for x, y in zip(last.values, given.values, strict=True)):
            with suppress(RuntimeError):  # not all code can view it in another shape
                self._run(last)
                self.layouts.append(last)

    def _run(self, given: Given) -> None:
        with standing_in(self.stand_ins):
            given.to(self.net)

    def _fit(self, given: Given) -> None:
        """Maps that engines make are channels last: where that does not do, they are copied."""
        try:
            self._run(given)
        except RuntimeError:
            for stand_in in self.stand_ins.values():
                stand_in.contiguous = True
            self._run(given)

    @property
    def runs(self) -> list[Callable[[], None]]:
        """A call for each layout that will do."""
        return [partial(self._run, given) for given in self.layouts]


def seconds_of(ways: Mapping[str, Rebuilt]) -> dict[str, list[float]]:
    """Return how long each takes, for each layout; all of them take turns."""
    runs = {(name, i): run for name, way in ways.items() for i, run in enumerate(way.runs)}
    times = interleaved({f"{name} {i}": run for (name, i), run in runs.items()})
    return {name: [times[f"{name} {i}"] for i in range(len(way.layouts))] for name, way in ways.items()}
