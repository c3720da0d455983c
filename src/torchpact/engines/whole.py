"""Ways to run a network as a whole, measured: as a copy with runners in it, or as a sequence of runners."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from torch import Tensor, nn

from torchpact.checks import one_line
from torchpact.core.call_args import CallArgs, channels_last
from torchpact.core.ponder import Ponder
from torchpact.engines.autotune import Notes, fastest
from torchpact.engines.base import NetworkRunner, Runner
from torchpact.engines.generic.dense import DENSE
from torchpact.engines.graphs import Graphed, as_called, generators_of
from torchpact.engines.hooked import PatchedLayers
from torchpact.engines.patching import PatchedPart, Patches, patch, patched
from torchpact.engines.reference import BlockRunner, Reference
from torchpact.engines.sequential import BlockByBlock, Whole
from torchpact.engines.timing import PATIENCE, interleaved, timed
from torchpact.specs import NetworkSpec, has_gated_execution


def as_copy(
    own: nn.Module,
    given: CallArgs,
    patches: Patches,
    ponders: Mapping[str, Sequence[Ponder | None]],
    names: Sequence[str],
    notes: Notes,
) -> tuple[str, dict[str, float], bool]:
    """Patch the copy of a network with runners if that is faster than without.

    Args:
        own: The copy.
        given: What it is called with.
        patches: What stands for each part.
        ponders: What each part did in its calls.
        names: The engines to choose from.
        notes: Gets a line for each way that fails.

    Returns:
        "blocks" or "dense", the seconds of each way, and whether maps are given channels last.

    """
    skipping = {part: each for part, each in patches.items() if each.runner is not None}
    plain = {
        part: _plain(each, ponders[each.spec.name])
        for part, each in patches.items()
        if ponders[each.spec.name]
    }
    gated = {part: each for part, each in patches.items() if _skips_itself(each)}
    dense: dict[nn.Module, PatchedPart | PatchedLayers] = {
        part: PatchedPart(each.spec, BlockRunner(each.spec)) for part, each in gated.items()
    }
    ways: dict[str, Patches] = {"dense": dense, "plain": plain}
    if skipping:
        ways["blocks"] = skipping
    runs: dict[str, _Rebuilt] = {}
    for name, some in ways.items():
        try:
            runs[name] = _Rebuilt(own, given, some)
        except Exception as error:
            if name == "dense":
                raise
            notes[f"{name}: {one_line(error)}"] = None
    calls = {f"{n} {i}": run for n, way in runs.items() for i, run in enumerate(way.runs)}
    first = {f"{n} {i}": each for n, way in runs.items() for i, each in enumerate(way.seconds)}
    times = interleaved(calls, limit=PATIENCE, first=first)
    by_layout = {n: [times[f"{n} {i}"] for i in range(len(way.runs))] for n, way in runs.items()}
    seconds = {name: min(each) for name, each in by_layout.items()}
    among = [name for name in ("blocks", "dense") if name in seconds]
    if "blocks" in seconds and "dense" not in names:
        among = ["blocks"]  # as was asked for
    best = fastest(seconds, among)
    if best == "dense":
        for part, each in patches.items():
            instead: Any = dense[part].runner if part in dense else None
            each.runner = instead
    patch(patches)
    return best, seconds, by_layout[best].index(seconds[best]) > 0


def _plain(patched: PatchedPart | PatchedLayers, ponders: Sequence[Ponder | None]) -> Any:
    """Return what runs all steps of a part and decides nothing."""
    if isinstance(patched, PatchedLayers):
        return PatchedLayers(patched.spec, None, adaptive=False)
    return PatchedPart(patched.spec, DENSE.build_plain(patched.spec, ponders))


def _skips_itself(patched: PatchedPart | PatchedLayers) -> bool:
    """Whether steps of a part compute active positions only by themselves, unless told not to."""
    return not patched.spec.hooked and any(has_gated_execution(step) for step in patched.spec.steps)


class _Rebuilt:
    """A network with other parts, in both layouts of its inputs that it can be given."""

    def __init__(self, net: nn.Module, given: CallArgs, patches: Patches) -> None:
        self.net, self.patches = net, patches
        self.layouts = [given]
        self.seconds = [self._fit(given)]
        """Of the first call in each layout."""
        last = given.map(channels_last)
        if any(x is not y for x, y in zip(last.values, given.values, strict=True)):
            with suppress(RuntimeError):  # not all code can view it in another shape
                self.seconds.append(timed(partial(self._run, last)))
                self.layouts.append(last)

    def _run(self, given: CallArgs) -> None:
        with patched(self.patches):
            given.call(self.net)

    def _fit(self, given: CallArgs) -> float:
        """Maps that engines make are channels last: where that does not do, they are copied."""
        try:
            return timed(partial(self._run, given))
        except RuntimeError:
            for each in self.patches.values():
                each.contiguous = True
            return timed(partial(self._run, given))

    @property
    def runs(self) -> list[Callable[[], None]]:
        """A call for each layout that will do."""
        return [partial(self._run, given) for given in self.layouts]


def as_sequence(
    spec: NetworkSpec,
    images: Tensor,
    runners: Mapping[str, Runner | None],
    wholes: Mapping[str, NetworkRunner],
    notes: Notes,
) -> tuple[str, dict[str, float], NetworkRunner]:
    """Return the fastest runner of a network: one engine for all of it, or one for each block.

    Args:
        spec: What the network is.
        images: The example.
        runners: Those of the blocks, by name; None is the block itself.
        wholes: Those of engines that run all of it, by name.
        notes: Gets a line where there is no CUDA graph, or where it runs as a whole.

    Returns:
        The name of the way, the seconds of each, and the runner.

    """
    generators = generators_of(block.mode for block in spec.blocks)
    in_turn = BlockByBlock(spec, [runners[b.name] or Reference(b) for b in spec.blocks])
    plain = BlockByBlock(spec, [DENSE.build_plain(block) for block in spec.blocks])
    ways: dict[str, NetworkRunner] = {}
    for name, network in wholes.items():
        otherwise: NetworkRunner = in_turn
        if network.skip_cuda_graph and images.device.type == "cuda" and not in_turn.host_sync:
            otherwise = Graphed(in_turn, generators)  # of sizes that are yet to come
        ways[name] = Whole(network, otherwise)
    ways |= {"blocks": in_turn, "plain": plain}
    called = {name: as_called(way, images, generators) for name, way in ways.items()}
    calls = {name: partial(way, images) for name, (way, _) in called.items()}
    seconds = interleaved(calls, limit=PATIENCE)
    best = fastest(seconds, [name for name in ways if name != "plain"])
    runner, problem = called[best]
    if problem is not None:
        notes[problem] = None
    if best != "blocks":
        notes[f"{best} runs the network as a whole; by block is what it was compared with"] = None
    return best, seconds, runner
