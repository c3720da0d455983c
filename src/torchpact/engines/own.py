"""Networks of one's own: a copy runs, and what engines make of its blocks stands in for them."""

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from torchpact._state import parts
from torchpact.block import AdaptiveBlock
from torchpact.engines.choosing import deploy_block, running, sizes_of
from torchpact.engines.deployed import Fixed
from torchpact.engines.registry import STEP_ENGINES, Notes, built
from torchpact.engines.report import Measurement, Report
from torchpact.engines.standing_in import (
    Forward,
    Plain,
    Rebuilt,
    StandIn,
    put_in,
    seconds_of,
    with_channels_last,
)
from torchpact.engines.timing import interleaved
from torchpact.metering import Call, Inputs, Spent, adaptive_parts, leading, metered, recorded
from torchpact.models.units import Bottleneck, ResidualUnit
from torchpact.modes import Mode


class DeployedNetwork(Fixed):
    """A network of one's own made by :func:`deploy`; called like it, with whatever it takes."""

    def __init__(self, own: nn.Module, inputs: Inputs) -> None:
        like = next((p for p in own.parameters() if p.is_floating_point()), leading(inputs))
        super().__init__(own, like)
        self.channels_last = False

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """Return what the network returns; without gradients."""
        return self._run(*(with_channels_last(inputs) if self.channels_last else inputs), **options)

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
    stand_ins: dict[AdaptiveBlock, StandIn] = {}
    with running(leading(inputs)):
        spent, rest = _counted(own, inputs, notes)
        with recorded(blocks, keep=True) as calls:
            own(*inputs)
        plain = {block: Plain(block, calls[name]) for name, block in blocks.items() if calls[name]}
        for name, block in blocks.items():
            reason = _why_as_it_is(block, calls[name])
            if reason is not None:
                notes[_with_name(name, reason)] = None
                continue
            row, run = _choose(block, calls[name][0], names, name, notes)
            rows.append(_with_flops(row, spent[name], name))
            if run is not None:
                stand_ins[block] = StandIn(block, run)
        calls.clear()
        ways = {"dense": Rebuilt(own, inputs, {}), "plain": Rebuilt(own, inputs, plain)}
        if stand_ins:
            ways["blocks"] = Rebuilt(own, inputs, stand_ins)
        by_layout = seconds_of(ways)
    seconds = {name: min(each) for name, each in by_layout.items()}
    best = "blocks" if stand_ins and seconds["blocks"] <= seconds["dense"] else "dense"
    if best == "blocks":
        put_in(stand_ins)
    elif stand_ins:
        notes["as a whole, the network is fastest as it is: no engine runs"] = None
    fast.channels_last = by_layout[best].index(seconds[best]) > 0
    if fast.channels_last:
        own.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    rows.append(_total(best, seconds, spent, rest, [*blocks]))
    fast.report = Report(len(leading(inputs)), rows, [*notes], "examples")
    return fast


def _total(
    best: str, seconds: dict[str, float], spent: dict[str, Spent], rest: float, blocks: Sequence[str]
) -> Measurement:
    """Return what was measured of the network."""
    flops = sum(float(each.flops.double().mean()) for each in spent.values())
    active = sum(spent[name].active for name in blocks) / len(blocks)
    plain = sum(each.plain for each in spent.values())
    return Measurement("all", "", best, active, seconds, flops + rest, plain + rest)


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
        block.mode, block.details = mode or block.mode, block.details if details is None else details
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
    """Return what was measured of a block on what it was given, and what runs it then, if not itself."""
    output = sizes_of(parts(call.output[0])[0].shape)
    if of_units(block) and len(call.inputs) == 1:
        try:
            fast = deploy_block(block, call.inputs[0], None, names, None)
        except (TypeError, ValueError) as reason:  # changed units, or others among them
            notes[_with_name(name, str(reason))] = None
        else:
            [row] = fast.report.measurements
            notes.update({_with_name(name, note): None for note in fast.report.notes})
            return row, fast
    makers = {n: partial(make, block, *call.inputs) for n, make in STEP_ENGINES.items() if n in names}
    refused: Notes = {}
    ways: dict[str, Forward] = {"dense": block} | built(makers, refused)
    notes.update({_with_name(name, note): None for note in refused})
    timed: dict[str, Forward] = ways | {"plain": Plain(block, [call])}
    seconds = interleaved({each: partial(way, *call.inputs) for each, way in timed.items()})
    among = [each for each in ways if each in names] or ["dense"]
    best = min(among, key=seconds.__getitem__)
    row = Measurement(name, output, best, 0.0, seconds, 1.0, 1.0)
    return row, ways[best] if best != "dense" else None


def _with_flops(row: Measurement, spent: Spent, name: str) -> Measurement:
    flops = float(spent.flops.double().mean())
    return Measurement(name or "1", row.output, row.engine, spent.active, row.seconds, flops, spent.plain)


def _with_name(name: str, note: str) -> str:
    return f"{name}: {note}" if name else note
