"""Networks of one's own: a copy runs, and what engines make of its blocks stands in for them."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import nn

from torchpact._state import parts
from torchpact.block import AdaptiveBlock, use_mode
from torchpact.engines import dense
from torchpact.engines.checking import check_block
from torchpact.engines.choosing import deploy_block, running, sizes_of
from torchpact.engines.compact import CompactBlock, compacted
from torchpact.engines.deployed import Fixed
from torchpact.engines.folding import FoldedBlock, Runner, Unsupported
from torchpact.engines.registry import Notes
from torchpact.engines.report import Measurement, Report
from torchpact.engines.timing import interleaved
from torchpact.metering import Call, Inputs, Spent, adaptive_parts, leading, metered, recorded
from torchpact.models.units import Bottleneck, ResidualUnit
from torchpact.modes import Mode

Forward = Callable[..., Any]


class DeployedNetwork(Fixed):
    """A network of one's own made by :func:`deploy`; called like it, with whatever it takes."""

    def __init__(self, own: nn.Module, inputs: Inputs) -> None:
        like = next((p for p in own.parameters() if p.is_floating_point()), leading(inputs))
        super().__init__(own, like)

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """Return what the network returns; without gradients."""
        return self._run(*inputs, **options)

    def extra_repr(self) -> str:
        """Return what runs its blocks for ``print``."""
        rows = [f"{each.name}: {each.engine}" for each in self.report.measurements]
        return f"{type(self.network).__name__}, {', '.join(rows)}"


def of_units(block: AdaptiveBlock) -> bool:
    """Whether the steps of a block are residual units, as engines know them."""
    return any(type(step) in (ResidualUnit, Bottleneck) for step in block.steps)


def deploy_network(
    net: nn.Module, inputs: Inputs, mode: Mode | None, names: Sequence[str], details: bool | None
) -> DeployedNetwork:
    """Return a network whose blocks run by the fastest of these engines, or as they are."""
    own = _copied(net, mode, details)
    found = adaptive_parts(own)
    blocks = {name: part for name, part in found.items() if isinstance(part, AdaptiveBlock)}
    if not blocks:
        _refuse(net, bool(found))
    if not len(leading(inputs)):
        raise ValueError("expected an example of at least one input, got none")
    notes: Notes = {
        f"{name}: leaves halted sequences out by itself": None for name in found if name not in blocks
    }
    fast = DeployedNetwork(own, inputs)
    rows = []
    with running(leading(inputs)):
        spent, rest = _counted(own, inputs, notes)
        with recorded(blocks, keep=True) as calls:
            own(*inputs)
        plain: dict[AdaptiveBlock, Forward] = {}
        stand_ins: dict[AdaptiveBlock, Forward] = {}
        for name, block in blocks.items():
            reason = _why_as_it_is(block, calls[name])
            plain[block] = _Plain(block, calls[name])
            if reason is not None:
                notes[_with_name(name, reason)] = None
                continue
            row, stand_in = _choose(block, calls[name][0], names, name, notes)
            rows.append(_with_flops(row, spent[name], name))
            if stand_in is not None:
                stand_ins[block] = stand_in
        calls.clear()
        for each in (stand_ins, plain):
            _fit_layouts(own, inputs, each)
        ways: dict[str, Mapping[AdaptiveBlock, Forward]] = {"blocks": stand_ins, "dense": {}, "plain": plain}
        seconds = interleaved({name: partial(_run_with, own, way, inputs) for name, way in ways.items()})
    best = "blocks" if stand_ins and seconds["blocks"] <= seconds["dense"] else "dense"
    if best == "dense" and stand_ins:
        notes["as a whole, the network is fastest as it is: no engine runs"] = None
    for block, stand_in in (stand_ins if best == "blocks" else {}).items():
        block.forward = stand_in  # type: ignore[method-assign]
    flops = sum(float(each.flops.double().mean()) for each in spent.values())
    active = [each.active for name, each in spent.items() if name in blocks]
    without = sum(each.plain for each in spent.values())
    if not stand_ins:
        del seconds["blocks"]  # the same
    rows.append(
        Measurement("all", "", best, sum(active) / len(active), seconds, flops + rest, without + rest)
    )
    fast.report = Report(len(leading(inputs)), rows, [*notes], "examples")
    return fast


def _counted(own: nn.Module, inputs: Inputs, notes: Notes) -> tuple[dict[str, Spent], float]:
    """Count FLOPs; where they cannot be counted, nothing is known of them, and all else goes on."""
    try:
        return metered(own, inputs)
    except Exception as error:  # whatever somebody's network makes of a single example
        notes[f"FLOPs are not counted: {' '.join(str(error).split())}"] = None
        nan = Spent(torch.full((1,), torch.nan), torch.nan, torch.nan)
        return dict.fromkeys(adaptive_parts(own), nan), torch.nan


def _refuse(net: nn.Module, recurrent: bool) -> None:
    got = type(net).__name__
    if recurrent:
        raise TypeError(
            f"expected a network with adaptive blocks, got {got}, whose recurrent layers leave halted "
            "sequences out by themselves: call it as it is, within torch.no_grad()"
        )
    raise TypeError(f"expected a network with adaptive blocks, got {got} without any")


def _copied(net: nn.Module, mode: Mode | None, details: bool | None) -> nn.Module:
    """Return a copy in evaluation, and in a mode; modes stay the same objects, for generators are theirs."""
    blocks = [module for module in net.modules() if isinstance(module, AdaptiveBlock)]
    own = copy.deepcopy(net, {id(block.mode): block.mode for block in blocks}).eval()
    for block in (module for module in own.modules() if isinstance(module, AdaptiveBlock)):
        use_mode(block, mode or block.mode, details=block.details if details is None else details)
    return own.requires_grad_(False)


def _why_as_it_is(block: AdaptiveBlock, calls: Sequence[Call]) -> str | None:
    """Return why a block stays as it is, whatever its steps are like."""
    if type(block).forward is not AdaptiveBlock.forward:
        return f"{type(block).__name__} has a forward of its own, which engines do not know"
    if not calls:
        return "the example does not come to it"
    if any(call.options for call in calls):
        return f"called with {', '.join(calls[0].options)}, which is not fixed"
    if not block.mode.leaves:
        return f"nothing can be skipped in the mode {block.mode}"
    return None


def _choose(
    block: AdaptiveBlock, call: Call, names: Sequence[str], name: str, notes: Notes
) -> tuple[Measurement, Forward | None]:
    """Return what was measured of a block on what the example gave it, and what stands in for it, if any."""
    output = sizes_of(parts(call.output[0])[0].shape)
    if of_units(block) and len(call.inputs) == 1:
        try:
            fast = deploy_block(block, call.inputs[0], None, names, None)
        except (TypeError, ValueError) as reason:  # changed units, or others among them
            notes[_with_name(name, str(reason))] = None
        else:
            [row] = fast.report.measurements
            notes.update({_with_name(name, note): None for note in fast.report.notes})
            return row, StandIn(block, fast)
    ways: dict[str, Forward] = {"dense": block}
    if "compact" in names:
        try:
            ways["compact"] = compacted(block, *call.inputs)
        except Unsupported as reason:
            notes[_with_name(name, f"compact: {reason}")] = None
    timed: dict[str, Forward] = ways | {"plain": _Plain(block, [call])}
    seconds = interleaved({each: partial(way, *call.inputs) for each, way in timed.items()})
    among = [each for each in ways if each in names] or ["dense"]
    best = min(among, key=seconds.__getitem__)
    row = Measurement(name, output, best, 0.0, seconds, 1.0, 1.0)
    return row, StandIn(block, ways[best]) if best != "dense" else None


class StandIn:
    """What runs in a block's place; what it does not know, the block runs itself."""

    def __init__(self, block: AdaptiveBlock, run: Forward) -> None:
        self.block, self.run = block, run
        self.contiguous = False

    def __call__(self, u: Any, *context: Any, **options: Any) -> Any:
        """Return the output, and what the block did."""
        if options or (context and not isinstance(self.run, CompactBlock)):
            return AdaptiveBlock.forward(self.block, u, *context, **options)
        output, ponder = self.run(u, *context)
        return (output.contiguous() if self.contiguous else output), ponder


class _Plain:
    """All steps of a block, and no decisions; the ponders are those that the example had before."""

    def __init__(self, block: AdaptiveBlock, calls: Sequence[Call]) -> None:
        self.block, self.ponders, self.turn = block, [call.ponder for call in calls], 0
        self.folded: Runner | None = None
        self.contiguous = False
        with suppress(TypeError, ValueError):  # others have no batch norms that we know of
            check_block(block)
            self.folded = dense.build_plain(FoldedBlock(block))

    def __call__(self, u: Any, *context: Any, **_options: Any) -> Any:
        """Return the last state."""
        self.turn += 1
        ponder = self.ponders[self.turn % len(self.ponders) - 1]
        if self.folded is not None:
            u, _ = self.folded(u.contiguous(memory_format=torch.channels_last))
            return u.contiguous() if self.contiguous else u, ponder
        for index in range(self.block.max_steps):
            u = self.block._advance(index, u, None, context, freeze=False)
        return u, ponder


@contextmanager
def _standing_in(stand_ins: Mapping[AdaptiveBlock, Forward]) -> Iterator[None]:
    """Have others run in the place of blocks, whoever refers to these and from wherever."""
    try:
        for block, stand_in in stand_ins.items():
            block.forward = stand_in  # type: ignore[method-assign]
        yield
    finally:
        for block in stand_ins:
            del block.forward


def _run_with(own: nn.Module, stand_ins: Mapping[AdaptiveBlock, Forward], inputs: Inputs) -> Any:
    with _standing_in(stand_ins):
        return own(*inputs)


def _fit_layouts(own: nn.Module, inputs: Inputs, stand_ins: Mapping[AdaptiveBlock, Any]) -> None:
    """Maps come channels last, which not all code can view in another shape: then they are copied."""
    try:
        _run_with(own, stand_ins, inputs)
    except RuntimeError:
        for stand_in in stand_ins.values():
            stand_in.contiguous = True
        _run_with(own, stand_ins, inputs)


def _with_flops(row: Measurement, spent: Spent, name: str) -> Measurement:
    flops = float(spent.flops.double().mean())
    return Measurement(name or "1", row.output, row.engine, spent.active, row.seconds, flops, spent.plain)


def _with_name(name: str, note: str) -> str:
    return f"{name}: {note}" if name else note
