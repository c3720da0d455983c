"""deploy: the same network, or block, with halted work skipped."""

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from torchpact.checks import one_line
from torchpact.core.block import AdaptiveBlock
from torchpact.core.call_args import CallArgs, call_args, channels_last, first_tensor
from torchpact.core.callables import uncompiled
from torchpact.core.collect import uncollected
from torchpact.core.halting_module import check_module
from torchpact.core.modes import Mode, as_mode
from torchpact.engines.attention.outside import PackedModules
from torchpact.engines.autotune import Choice, Notes, built, choose, joined, measuring
from torchpact.engines.conv.support import conv_block_problem
from torchpact.engines.deployed import Deployed
from torchpact.engines.graphs import as_called_block
from torchpact.engines.hooked import PatchedLayers
from torchpact.engines.inputs import check_of
from torchpact.engines.patching import PatchedPart, Patches
from torchpact.engines.registry import names_among
from torchpact.engines.report import Measurement, Report, sizes_of
from torchpact.engines.snapshot import left_as_it_was, snapshot
from torchpact.engines.timing import CpuContention
from torchpact.engines.whole import as_copy, as_sequence
from torchpact.flops.blocks import BlockCost, Meter
from torchpact.specs import BlockSpec, block_spec, called_as_a_whole, network_spec
from torchpact.specs.call_capture import Call, adaptive_parts, captured
from torchpact.specs.providers import is_changed, is_watched


def deploy(
    model: nn.Module,
    example: Any,
    *,
    kwargs: Mapping[str, Any] | None = None,
    mode: Mode | str | None = None,
    engines: Iterable[str] | None = None,
    details: bool | None = None,
) -> Deployed:
    """Return a network with the outputs of ``model`` in evaluation, which skips halted work.

    A copy of the network runs, and each of its adaptive parts (blocks and recurrent layers) by the fastest of
    the engines that can run it, measured on the ``example``; or an engine runs the network as a whole.
    ``explain()`` says which, and what kept the others from being tried. Where nothing can be skipped, as in a
    soft mode, the dense engine runs, with a warning. The model stays as it is, and later changes of it do not
    reach what is deployed.

    Args:
        model: A network with adaptive blocks, or one block.
        example: What it will be called with, such as a batch of images: a mapping by name, a tuple by
            position, or the only argument. Batches of any size run afterwards.
        kwargs: Keyword arguments besides.
        mode: Replaces the model's own mode.
        engines: The names of the engines to choose from; by default all for the device but those that take
            minutes to build. The dense engine is the last resort, with a warning.
        details: Whether a thresholded network returns all of its ponders, or only ``steps`` and ``cost``,
            which takes less time; by default as each of its blocks does, see :class:`use_mode`.

    Returns:
        The deployed network, called like the model; a call may have ``thresholds`` of its own.

    Raises:
        TypeError: The model is no network with adaptive parts, or cannot be copied.
        ValueError: The example is empty or does not fit, or an engine is not known.

    Example:
        >>> model = tp.models.psact_resnet32(mode="thresholded", halting_bias=0.0).eval()
        >>> images = torch.randn(2, 3, 32, 32)
        >>> fast = tp.deploy(model, images)
        >>> logits, ponders = fast(images)
        >>> torch.allclose(logits, model(images)[0], rtol=1e-3, atol=1e-3)
        True
        >>> print(fast.explain())
        block     output    engine ...

    """
    check_module(model)
    net = uncompiled(model)
    given = call_args(example, kwargs)
    first = first_tensor(given)
    names = names_among(engines, first.device.type)
    own = snapshot(net, None if mode is None else as_mode(mode), details)
    specs = {name: block_spec(part, name) for name, part in adaptive_parts(own).items()}
    if not specs:
        raise TypeError(f"expected a network with adaptive blocks, got {type(net).__name__} without any")
    fast = Deployed(own, first, check_of(own, network_spec(own), specs))
    fast.tune = partial(_tune, fast, own, names, engines is not None)
    with left_as_it_was(net):
        fast.tune(given)
    _warn_of_dense(fast.report, specs, names)
    return fast


def _tune(fast: Deployed, own: nn.Module, names: Sequence[str], asked: bool, given: CallArgs) -> None:
    """Choose what runs each part of a deployed network, by what is measured on an example.

    Args:
        fast: The deployed network.
        own: The copy that it runs, with nothing in place of its parts.
        names: The engines to choose from.
        asked: Whether the user named them.
        given: The example.

    """
    first = first_tensor(given)
    fast.refuse_misfits(given)
    if not len(first):
        raise ValueError("expected an example of at least one input, got none")
    found = adaptive_parts(own)
    specs = {name: _spec_of(part, name, own) for name, part in found.items()}
    network, contention, notes = network_spec(own), CpuContention(), Notes()
    with measuring(first), left_as_it_was(own), uncollected():
        calls = _captured_calls(own, given, found, specs)
        costs, rest = _counted(own, given, specs, calls, notes)
        wholes = {} if network is None else built(network, given, names, notes)
        # an engine that runs the network needs not be tried on its blocks
        among = [name for name in names if name not in wholes]
        by_part: dict[str, Notes] = {name: Notes() for name in specs}
        choices = {n: _choice(spec, calls[n], among, by_part[n], asked) for n, spec in specs.items()}
        notes |= joined(by_part)
        rows = [_row(specs[n], c, calls[n], costs[n]) for n, c in choices.items() if c is not None]
        patches = {
            specs[name].module: _patched(specs[name], choice)
            for name, choice in choices.items()
            if not _is_changed(specs[name])
        }
        notes |= _packed_outside(own, patches)
        if network is None:
            ponders = {name: [call.ponder for call in calls[name]] for name in specs}
            best, seconds, fast.channels_last = as_copy(own, given, patches, ponders, names, notes)
            # the forward of a root with hooks is called by the module, which runs them
            instead = patches.get(own)
            fast.patches = patches
            fast.run_by(instead if isinstance(instead, PatchedPart) and not is_watched(own) else own)
        else:
            runners = {name: choice and choice.runner for name, choice in choices.items()}
            best, seconds, runner = as_sequence(network, first, runners, wholes, notes)
            fast.run_by(runner)
    if best == "dense" and any(row.engine != "dense" for row in rows):
        notes["as a whole, the network is fastest as it is: no engine runs"] = None
        rows = [replace(row, engine="dense") for row in rows]
    unknown = any(math.isnan(row.flops) for row in rows)
    rows.append(_total(best, seconds, costs, rest, unknown))
    busy = first.device.type == "cpu" and contention.is_high()
    what = "images" if network is not None else "examples"
    fast.report = Report(len(first), rows, [*notes], what, busy)


def _spec_of(part: nn.Module, name: str, own: nn.Module) -> BlockSpec:
    """Return what a part is: of a run of layers that convolutional engines know, the module that calls it."""
    spec = block_spec(part, name)
    whole = called_as_a_whole(spec, own)
    return spec if whole.run is None or conv_block_problem(whole) is not None else whole


def _captured_calls(
    own: nn.Module, given: CallArgs, found: Mapping[str, nn.Module], specs: Mapping[str, BlockSpec]
) -> dict[str, list[Call]]:
    """Return the calls of the parts of a network; of a run that a module calls, with what that was given."""
    callers = {name: spec.module for name, spec in specs.items() if spec.run is not None}
    with captured(found, keep=True) as calls, captured(callers, keep=True) as entered:
        given.call(own)
    for name, seen in entered.items():
        if len(seen) == len(calls[name]):  # else others call the layers, too
            pairs = zip(calls[name], seen, strict=True)
            calls[name] = [call._replace(given=each.given, output=each.output) for call, each in pairs]
    return calls


def _counted(
    own: nn.Module,
    given: CallArgs,
    specs: Mapping[str, BlockSpec],
    calls: Mapping[str, Sequence[Call]],
    notes: Notes,
) -> tuple[dict[str, BlockCost], float]:
    """Count FLOPs; where they cannot be counted, nothing is known of them, and all else goes on."""
    try:
        meter = Meter(own, given)
        return meter.costs_of(calls), meter.rest
    except Exception as error:  # whatever a user's network makes of a run in which nothing halts
        notes[f"FLOPs are not counted: {one_line(error)}"] = None
        unknown = BlockCost(torch.full((1,), torch.nan), torch.nan, torch.nan)
        return dict.fromkeys(specs, unknown), torch.nan


def _choice(
    spec: BlockSpec, calls: Sequence[Call], names: Sequence[str], notes: Notes, asked: bool
) -> Choice | None:
    """Return what runs a part fastest on what it was given first; None if it stays as it is."""
    reason = _why_as_it_is(spec, calls)
    if reason is not None:
        notes[reason] = None
        return None
    if spec.hooked:
        return _layerwise_choice(spec, names, notes, asked)
    call = calls[0].given.map(channels_last) if spec.conv_units is not None else calls[0].given
    choice = choose(spec, call, [each.ponder for each in calls], names, notes, asked)
    if spec.reason and not any(spec.reason in note for note in notes):
        notes[spec.reason] = None
    if choice.runner is None:
        return choice
    return choice._replace(runner=as_called_block(choice.runner, call, spec, notes))


def _patched(spec: BlockSpec, choice: Choice | None) -> PatchedPart | PatchedLayers:
    """Return what stands for a part."""
    runner: Any = choice and choice.runner
    return PatchedLayers(spec, runner) if spec.hooked else PatchedPart(spec, runner)


def _packed_outside(own: nn.Module, patches: Patches) -> Notes:
    """Have linear layers outside of runs that an engine runs computed as those inside; say which."""
    runs = [each for each in patches.values() if isinstance(each, PatchedLayers)]
    first = next((run for run in runs if run.runner is not None), None)
    if first is None:
        return Notes()
    first.outside = PackedModules(own, [layer for run in runs for layer in run.layers])
    names = ", ".join(first.outside.names)
    return Notes({f"linear layers outside of runs by oneDNN, too: {names}": None} if names else {})


def _layerwise_choice(spec: BlockSpec, names: Sequence[str], notes: Notes, asked: bool) -> Choice:
    """Return what runs layers that the network calls itself; how fast is measured in the network."""
    among = [name for name in names if name != "dense"]  # the network itself, for layers that it calls
    runners: dict[str, Any] = built(spec, CallArgs(), among, notes, asked)
    problem = None if spec.conv_units is None else conv_block_problem(spec)
    if problem is not None and not any(problem in note for note in notes):
        notes[problem] = None
    if spec.reason and not any(spec.reason in note for note in notes):
        notes[spec.reason] = None
    best = next(iter(runners), "dense")
    return Choice(best, {}, runners.get(best), bool(runners))


def _why_as_it_is(spec: BlockSpec, calls: Sequence[Call]) -> str | None:
    if _is_changed(spec):
        return f"{type(spec.module).__name__} has a forward of its own, which engines do not know"
    if not calls:
        return "the example does not come to it"
    if spec.run is not None and not calls[0].given.args:
        return "its layers are called by others than the module that has them, too"
    fixed = {
        name for call in calls for name in call.given.kwargs if name in ("mode", "thresholds", "max_steps")
    }
    if fixed:
        return (
            f"forward calls it with {', '.join(sorted(fixed))}, and engines need the block's own: leave that "
            "out, give mode to deploy and thresholds to the call, and set max_steps of the block"
        )
    return None


def _is_changed(spec: BlockSpec) -> bool:
    """Whether a part does something else than its class does, which only a call of it tells."""
    module = spec.module
    return "forward" in vars(module) or (isinstance(module, AdaptiveBlock) and is_changed(module))


def _row(spec: BlockSpec, choice: Choice, calls: Sequence[Call], cost: BlockCost) -> Measurement:
    output = calls[0].output
    first = (
        output if isinstance(output, torch.Tensor) else next(x for x in output if isinstance(x, torch.Tensor))
    )
    flops = float(cost.flops.double().mean())
    if not (choice.skips or spec.conv_units is not None):
        flops = math.nan  # a promise that no engine keeps
    return Measurement(
        spec.name or "1", sizes_of(first.shape), choice.engine, cost.active, choice.seconds, flops, cost.plain
    )


def _total(
    best: str, seconds: Mapping[str, float], costs: Mapping[str, BlockCost], rest: float, unknown: bool
) -> Measurement:
    flops = math.nan if unknown else sum(float(each.flops.double().mean()) for each in costs.values())
    active = sum(each.active for each in costs.values()) / len(costs)
    plain = sum(each.plain for each in costs.values())
    return Measurement("all", "", best, active, seconds, flops + rest, plain + rest)


def _warn_of_dense(report: Report, specs: Mapping[str, BlockSpec], names: Sequence[str]) -> None:
    """Warn of the dense engine if it was not asked for, or if a soft mode leaves no other."""
    *rows, whole = report.measurements
    if whole.engine != "dense" and not {each.engine for each in rows} <= {"dense"}:
        return
    tried = {name for each in report.measurements for name in each.seconds} - {"dense", "blocks", "plain"}
    soft = [spec.mode for spec in specs.values() if spec.heads and not spec.mode.hard]
    if soft and not tried:
        warnings.warn(
            f"expected a hard mode, in which halted work can be skipped, got {soft[0]}: the dense engine "
            'runs. deploy(model, example, mode="thresholded") skips',
            stacklevel=3,
        )
    elif "dense" not in names and not tried:
        warnings.warn(
            f"expected engines that can run it, got {', '.join(names) or 'none'}: the dense engine "
            f"runs. {'; '.join(report.notes)}",
            stacklevel=3,
        )
