"""One algorithm that measures the engines that can run a part of a network, and chooses the fastest."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchpact.checks import one_line
from torchpact.core.call_args import CallArgs, first_tensor
from torchpact.core.ponder import Ponder
from torchpact.engines.base import NetworkRunner, Runner, Unsupported
from torchpact.engines.generic.dense import DENSE
from torchpact.engines.graphs import generators_of, repeatable
from torchpact.engines.reference import BlockRunner, Reference
from torchpact.engines.registry import ENGINES
from torchpact.engines.timing import PATIENCE, interleaved
from torchpact.specs import BlockSpec, NetworkSpec
from torchpact.specs.blocks import Bounds

Notes = dict[str, None]
"""Lines for people, in order, each once."""


class Choice(NamedTuple):
    """What was found for a part."""

    engine: str
    seconds: Mapping[str, float]
    """By engine; "plain" is all steps without decisions."""
    runner: Runner | None
    """What runs it; None is the part itself."""
    skips: bool
    """Whether an engine was tried that computes active positions only."""


def choose(
    spec: BlockSpec,
    call: CallArgs,
    ponders: Sequence[Ponder | None],
    names: Sequence[str],
    notes: Notes,
    asked: bool = False,
) -> Choice:
    """Return the fastest of the engines that can run a part on what it was given.

    Args:
        spec: What the part is.
        call: A call of it.
        ponders: What it did in its calls.
        names: The engines to try.
        notes: Gets a line for each engine that cannot run it.
        asked: Whether the engines were named, so that each gets its line.

    Returns:
        What runs it. Where no engine of the names can, the dense one is the choice.

    """
    u, context = call.args[0], CallArgs(call.args[1:], call.kwargs)
    runners: dict[str, Runner] = built(spec, call, names, notes, asked)
    if not runners:
        runners["dense"] = DENSE.build(spec, call)
    generators = generators_of([spec.mode])
    timed = runners | {"plain": DENSE.build_plain(spec, ponders)}
    calls: dict[str, Callable[[], Any]] = {}
    for name, run in timed.items():
        if _works(run, u, context, spec.bounds, name, notes):
            calls[name] = _timed(run, u, context, spec.bounds, generators)
    among = [name for name in calls if name != "plain"]
    if not among:
        return Choice("dense", {}, None, False)
    seconds = interleaved(calls, limit=PATIENCE)
    best = min(among, key=seconds.__getitem__)
    skips = any(name not in ("dense", "compiled") for name in among)
    as_it_is = best == "dense" and isinstance(runners[best], Reference | BlockRunner)
    return Choice(best, seconds, None if as_it_is else runners[best], skips)


def built(
    spec: BlockSpec | NetworkSpec,
    call: CallArgs,
    names: Sequence[str],
    notes: Notes,
    asked: bool = False,
) -> dict[str, Any]:
    """Return the runners of the engines that can run a part or a network, tuned on a call.

    Args:
        spec: What is to be run.
        call: A call of it.
        names: The engines to ask.
        notes: Gets a line for each that cannot, of those for parts of this kind.
        asked: Whether others get a line, too.

    """
    made: dict[str, Any] = {}
    reasons: dict[str, list[str]] = {}  # and the engines that have them
    for name in names:
        engine = ENGINES[name]
        if not engine.concerns(spec) and (isinstance(spec, NetworkSpec) or engine.whole or not asked):
            continue
        try:
            reason = engine.supports(spec, call)
            if reason is not None:
                raise Unsupported(reason)
            runner = engine.build(spec, call)
            if isinstance(runner, NetworkRunner):
                runner.tune(first_tensor(call))
                runner(first_tensor(call))  # which it may refuse
            elif isinstance(runner, Runner):
                runner.tune(call.args[0], CallArgs(call.args[1:], call.kwargs))
        except Exception as problem:  # Unsupported, or whatever a user's steps make of a trial
            reasons.setdefault(one_line(problem).removeprefix(f"{name}: "), []).append(name)
        else:
            made[name] = runner
    notes.update({f"{', '.join(which)}: {reason}": None for reason, which in reasons.items()})
    return made


def _timed(
    run: Runner, u: Any, context: CallArgs, bounds: Bounds, generators: Sequence[torch.Generator]
) -> Callable[[], Any]:
    if isinstance(u, Tensor) and not context.values and bounds is None:
        return repeatable(run, u, generators, run.host_sync)
    return partial(run, u, context, bounds)


def _works(run: Runner, u: Any, context: CallArgs, bounds: Bounds, name: str, notes: Notes) -> bool:
    """Whether it runs outside of its network; if not, why is noted."""
    try:
        run(u, context, bounds)
    except Exception as error:  # of autocast around it, say, or of states that no other part has
        notes[f"{name}: {one_line(error)}"] = None
        return False
    return True


@contextmanager
def measuring(example: Tensor) -> Iterator[None]:
    """Measure as what is deployed will run: without gradients, on the example's device, in its precision."""
    current = torch.cuda.device(example.device) if example.device.type == "cuda" else nullcontext()
    with torch.no_grad(), torch.autocast(example.device.type, enabled=False), current:
        yield


def joined(by_part: Mapping[str, Notes]) -> Notes:
    """Return what was noted of all parts, and what of some, with their names.

    >>> [*joined({"1": {"a": None, "b": None}, "2": {"a": None}})]
    ['a', 'b (block 1)']
    """
    lines: Notes = {}
    for note in dict.fromkeys(note for notes in by_part.values() for note in notes):
        where = [name for name, notes in by_part.items() if note in notes]
        word = "block" if len(where) == 1 else "blocks"
        lines[note if len(where) == len(by_part) else f"{note} ({word} {', '.join(where)})"] = None
    return lines


def fastest(seconds: Mapping[str, float], among: Sequence[str]) -> str:
    """Return the name with the least seconds; what was not measured is last."""
    return min(among, key=lambda name: seconds.get(name, math.inf))
