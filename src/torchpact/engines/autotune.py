"""What deploy does for a block: the engines that can run it are measured, and the fastest stays."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from torchpact.core.block import AdaptiveBlock
from torchpact.core.modes import Mode
from torchpact.core.ponder import Ponder
from torchpact.engines.block_spec import FoldedBlock, Runner
from torchpact.engines.deployed import BlockByBlock, Deployed, DeployedBlock, OneBlock, Whole
from torchpact.engines.generic import dense
from torchpact.engines.graphs import Graphed, generators_of
from torchpact.engines.registry import ENGINES, Network, Notes, built, measured, tuned
from torchpact.engines.report import Measurement, Report
from torchpact.engines.validation import check_block
from torchpact.flops.conv import block_flops, plain_flops


class Choice(NamedTuple):
    """What was found for a block, or for the network, which has no output shape."""

    engine: str
    seconds: dict[str, float]
    shape: torch.Size | None


def choose(
    block: FoldedBlock,
    names: Sequence[str],
    u: Tensor,
    generators: Sequence[torch.Generator],
    notes: Notes,
) -> tuple[Runner, Choice, tuple[Tensor, Ponder | None]]:
    """Return the fastest of the engines that can run a block, what was measured, and what it makes of u."""
    runners = built({n: partial(tuned, partial(ENGINES[n], block), u) for n in names}, notes)
    runners = runners or {"dense": dense.build(block)}
    seconds = measured(runners | {"plain": dense.build_plain(block)}, u, generators)
    best = min(runners, key=seconds.__getitem__)
    outputs = runners[best](u)
    return runners[best], Choice(best, seconds, outputs[0].shape), outputs


@contextmanager
def running(example: Tensor) -> Iterator[None]:
    """Measure as what is deployed will run: without gradients, on the example's device, in its precision."""
    current = torch.cuda.device(example.device) if example.device.type == "cuda" else nullcontext()
    with torch.no_grad(), torch.autocast(example.device.type, enabled=False), current:
        yield


def as_called(
    network: Whole | BlockByBlock | OneBlock, example: Tensor, generators: Sequence[torch.Generator]
) -> tuple[Network, str | None]:
    """Return the network as users will call it, in CUDA graphs where those help; or why there are none."""
    if example.device.type != "cuda" or network.direct:
        return network, None
    if network.waits:
        return network, "no CUDA graph: an engine waits for the device to know how much is left"
    graphed = Graphed(network, generators)
    graphed.record(example)
    return (graphed, None) if graphed.problem is None else (network, graphed.problem)


def check_example(fast: Deployed | DeployedBlock, example: Tensor) -> None:
    """Refuse an example that does not fit, or of nothing."""
    fast.check(example)
    if not len(example):
        raise ValueError("expected an example of at least one image, got none")


def deploy_block(
    block: AdaptiveBlock, example: Tensor, mode: Mode | None, names: Sequence[str], details: bool | None
) -> DeployedBlock:
    """Return a block of residual units as the fastest of these engines runs it."""
    check_block(block)
    folded = FoldedBlock(block, mode, details)
    fast = DeployedBlock(folded, OneBlock(dense.build(folded), folded.details))
    check_example(fast, example)
    notes: Notes = {}
    generators = generators_of([folded.mode])
    with running(example):
        example = example.contiguous(memory_format=torch.channels_last)
        among = [name for name in names if name in ENGINES]
        run, choice, (output, ponder) = choose(folded, among, example, generators, notes)
        assert ponder is not None  # there are heads
        fast.network, problem = as_called(OneBlock(run, folded.details), example, generators)
        if problem is not None:
            notes[problem] = None
    size = output.shape[2:]
    flops = float(block_flops(folded, ponder.steps, *size).double().mean())
    active = float(ponder.steps.double().mean()) / block.max_steps
    row = Measurement(
        "1", sizes_of(output.shape), choice.engine, active, choice.seconds, flops, plain_flops(folded, *size)
    )
    fast.report = Report(len(example), [row], [*notes])
    return fast


def sizes_of(shape: Sequence[int]) -> str:
    """Return what an example of this shape looks like, for people.

    >>> sizes_of((64, 16, 32, 32))
    '16×32×32'
    """
    return "×".join(str(size) for size in shape[1:])
