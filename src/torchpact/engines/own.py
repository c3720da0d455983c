"""Networks of one's own: a copy runs, and what engines make of its blocks stands in for them."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
from torch import nn

from torchpact.checks import one_line
from torchpact.core.block import AdaptiveBlock
from torchpact.core.modes import Mode
from torchpact.core.state import parts
from torchpact.engines.autotune import deploy_block, running, sizes_of
from torchpact.engines.block_spec import Unsupported
from torchpact.engines.deployed import Fixed
from torchpact.engines.registry import STEP_ENGINES, Notes, built
from torchpact.engines.report import Measurement, Report
from torchpact.engines.snapshot import copied, kept
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
from torchpact.engines.validation import is_changed
from torchpact.flops.call_capture import Call, Given, Inputs, adaptive_parts, leading, recorded
from torchpact.flops.metering import Spent, metered, says_its_cost
from torchpact.nn.conv_units import Bottleneck, ResidualUnit
from torchpact.nn.residual import Residual


class DeployedNetwork(Fixed):
    """A network of one's own made by :func:`deploy`; called like it, with whatever it takes."""

    def __init__(self, own: nn.Module, given: Given) -> None:
        like = next((p for p in own.parameters() if p.is_floating_point()), leading(given))
        super().__init__(own, like)
        self.channels_last = False

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """Return what the network returns; without gradients."""
        if self.channels_last:
            inputs, options = with_channels_last(Given(inputs, options))
        return self._run(*inputs, **options)

    def extra_repr(self) -> str:
        """Return what runs its blocks for ``print``."""
        rows = [f"{each.name}: {each.engine}" for each in self.report.measurements]
        return f"{type(self.network).__name__}, {', '.join(rows)}"


def of_units(block: AdaptiveBlock) -> bool:
    """Whether the steps of a block are residual units, as engines know them."""
    return any(isinstance(step, ResidualUnit | Bottleneck) for step in block.steps)


def deploy_network(
    net: nn.Module, given: Given, mode: Mode | None, names: Sequence[str], details: bool | None
) -> DeployedNetwork:
    """Return a network whose blocks run by the fastest of these engines, or as they are.

    What cannot be tried is noted, and the block runs as it is: a network that runs deploys.
    """
    if not len(leading(given)):
        raise ValueError("expected an example of at least one input, got none")
    own = copied(net, mode, details)
    found = adaptive_parts(own)
    blocks = {name: part for name, part in found.items() if isinstance(part, AdaptiveBlock)}
    if not blocks:
        _refuse(net, bool(found))
    notes: Notes = {
        f"{name}: leaves halted sequences out by itself": None for name in found if name not in blocks
    }
    fast = DeployedNetwork(own, given)
    rows = []
    stand_ins: dict[AdaptiveBlock, StandIn] = {}
    with running(leading(given)), kept(net, own):
        with recorded(blocks, keep=True) as calls:
            given.to(own)
        spent, rest = _counted(own, given, notes)
        plain = {b: Plain(b, calls[name]) for name, b in blocks.items() if calls[name] and not is_changed(b)}
        for name, block in blocks.items():
            reason = _why_as_it_is(block, calls[name])
            choice = None if reason else _choose(block, calls[name][0], names, name, notes)
            if choice is None:
                if reason:
                    notes[_with_name(name, reason)] = None
                continue
            rows.append(choice.measurement(name, spent[name]))
            if choice.run is not None:
                stand_ins[block] = StandIn(block, choice.run)
        calls.clear()
        by_layout = _as_a_whole(own, given, {"dense": {}, "plain": plain, "blocks": stand_ins}, notes)
    seconds = {name: min(each) for name, each in by_layout.items()}
    best = "blocks" if seconds.get("blocks", math.inf) <= seconds["dense"] else "dense"
    if best == "blocks":
        put_in(stand_ins)
    elif "blocks" in seconds:
        notes["as a whole, the network is fastest as it is: no engine runs"] = None
        rows = [replace(row, engine="dense") for row in rows]
    fast.channels_last = by_layout[best].index(seconds[best]) > 0
    rows.append(_total(best, seconds, spent, rest, [*blocks], any(math.isnan(row.flops) for row in rows)))
    fast.report = Report(len(leading(given)), rows, [*notes], "examples")
    return fast


def _refuse(net: nn.Module, recurrent: bool) -> NoReturn:
    got = type(net).__name__
    if recurrent:
        raise TypeError(
            f"expected a network with adaptive blocks, got {got}, whose recurrent layers leave halted "
            "sequences out by themselves: call it as it is, within torch.no_grad()"
        )
    raise TypeError(f"expected a network with adaptive blocks, got {got} without any")


def _counted(own: nn.Module, given: Given, notes: Notes) -> tuple[dict[str, Spent], float]:
    """Count FLOPs; where they cannot be counted, nothing is known of them, and all else goes on."""
    try:
        return metered(own, given)
    except Exception as error:  # whatever somebody's network makes of a run in which nobody halts
        notes[f"FLOPs are not counted: {one_line(error)}"] = None
        nan = Spent(torch.full((1,), torch.nan), torch.nan, torch.nan)
        return dict.fromkeys(adaptive_parts(own), nan), torch.nan


def _why_as_it_is(block: AdaptiveBlock, calls: Sequence[Call]) -> str | None:
    """Return why a block stays as it is, whatever its steps are like."""
    if is_changed(block):
        return f"{type(block).__name__} has a forward of its own, which engines do not know"
    if not calls:
        return "the example does not come to it"
    told = {name for call in calls for name in call.options}
    if told:
        return f"called with {', '.join(sorted(told))}, which is not fixed"
    if not block.mode.leaves:
        return f"nothing can be skipped in the mode {block.mode}"
    return None


class _Choice(NamedTuple):
    """What was found for a block."""

    engine: str
    seconds: Mapping[str, float]
    output: str
    run: Forward | None
    """If not the block itself."""
    skips: bool = True
    """Whether there is an engine that could."""

    def measurement(self, name: str, spent: Spent) -> Measurement:
        """Return the row of the table."""
        flops = float(spent.flops.double().mean()) if self.skips else math.nan  # a promise that no one keeps
        return Measurement(
            name or "1", self.output, self.engine, spent.active, self.seconds, flops, spent.plain
        )


def _choose(
    block: AdaptiveBlock, call: Call, names: Sequence[str], name: str, notes: Notes
) -> _Choice | None:
    """Return what runs a block fastest on what it was given; None if there was nothing to choose from."""
    output = sizes_of(parts(call.output[0])[0].shape)
    if of_units(block) and len(call.inputs) == 1:
        try:
            fast = deploy_block(block, call.inputs[0], None, names, None)
        except (TypeError, ValueError) as reason:  # changed units, or others among them
            notes[_with_name(name, one_line(reason))] = None
        else:
            [row] = fast.report.measurements
            notes.update({_with_name(name, note): None for note in fast.report.notes})
            return _Choice(row.engine, row.seconds, output, fast)
    makers = {n: partial(_made, n, block, call.inputs) for n in STEP_ENGINES if n in names}
    refused: Notes = {}
    if not makers and "dense" not in names:
        refused[f"{', '.join(names)}: expected residual units or bottlenecks, got other steps"] = None
    ways: dict[str, Forward] = built(makers, refused)
    skip = _skip_by_themselves(block, call)
    if skip and not ways:
        refused = {"dense: its steps leave out by themselves who has halted": None}
    notes.update({_with_name(name, note): None for note in refused})
    timed: dict[str, Forward] = {"dense": block} | ways | {"plain": Plain(block, [call])}
    calls = {each: partial(way, *call.inputs) for each, way in timed.items()}
    runs = {each: run for each, run in calls.items() if _works(run, _with_name(name, each), notes)}
    if "dense" not in runs:
        return None
    seconds = interleaved(runs)
    among = [each for each in seconds if each in names and each != "plain"] or ["dense"]
    best = min(among, key=seconds.__getitem__)
    return _Choice(best, seconds, output, ways.get(best), skip or bool(ways))


def _skip_by_themselves(block: AdaptiveBlock, call: Call) -> bool:
    """Whether the steps that are given a gate compute nothing where it is closed."""
    gated = [*block.steps][1:] or [*block.steps]
    return all(says_its_cost(step) or _by_position(step, call) for step in gated)


def _by_position(step: Any, call: Call) -> bool:
    ours = type(step).forward is Residual.forward
    return ours and step.by_position and len(call.inputs) == 1  # with a context it runs everywhere


def _made(engine: str, block: AdaptiveBlock, inputs: Inputs) -> Forward:
    """Return what an engine makes of a block; it may fail in any way that somebody's steps do."""
    try:
        return STEP_ENGINES[engine](block, *inputs)
    except Unsupported:
        raise
    except Exception as error:
        raise Unsupported(f"{engine}: {one_line(error)}") from error


def _works(run: Callable[[], object], name: str, notes: Notes) -> bool:
    """Whether it runs, as it stands outside of its network; if not, why is noted."""
    try:
        run()
    except Exception as error:  # of autocast around it, say, or of states that nobody reaches
        notes[f"{name}: {one_line(error)}"] = None
        return False
    return True


def _as_a_whole(
    own: nn.Module, given: Given, ways: Mapping[str, Mapping[AdaptiveBlock, Any]], notes: Notes
) -> dict[str, list[float]]:
    """Return the seconds of ways to run the blocks, for each layout of the inputs; it runs as it is."""
    rebuilt: dict[str, Rebuilt] = {}
    for name, stand_ins in ways.items():
        if not stand_ins and name == "blocks":
            continue
        try:
            rebuilt[name] = Rebuilt(own, given, stand_ins)
        except Exception as error:
            if name == "dense":
                raise
            notes[f"{name}: {one_line(error)}"] = None
    return seconds_of(rebuilt)


def _total(
    best: str,
    seconds: dict[str, float],
    spent: dict[str, Spent],
    rest: float,
    blocks: Sequence[str],
    unknown: bool,
) -> Measurement:
    """Return what was measured of the network."""
    flops = math.nan if unknown else sum(float(each.flops.double().mean()) for each in spent.values())
    active = sum(spent[name].active for name in blocks) / len(blocks)
    plain = sum(each.plain for each in spent.values())
    return Measurement("all", "", best, active, seconds, flops + rest, plain + rest)


def _with_name(name: str, note: str) -> str:
    return f"{name}: {note}" if name else note
