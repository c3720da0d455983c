"""The adaptive parts of a network, and what they were called with in a run."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from torchpact.core.call_args import CallArgs, first_tensor
from torchpact.core.collect import Collector, collecting
from torchpact.core.halting_module import HaltingModule, names_of
from torchpact.core.layer_calls import first_output
from torchpact.core.layer_run import LayerRun
from torchpact.core.layer_scopes import entry_of, scope_of
from torchpact.core.ponder import Ponder
from torchpact.core.state import parts
from torchpact.specs.providers import block_spec, is_block


class Call(NamedTuple):
    """A call of an adaptive part."""

    given: CallArgs
    output: Any
    """The output; an empty tensor of its shape unless outputs are kept."""
    ponder: Ponder | None
    """What it did; None of a part that is not adaptive."""
    real: torch.Tensor | None = None
    """False for padding, (batch, length), as far as a network told it to its layers; None where all count."""


def adaptive_parts(net: nn.Module) -> dict[str, nn.Module]:
    """Return the blocks and recurrent layers of a network by name, without the blocks inside of layers.

    >>> [*adaptive_parts(nn.Sequential(nn.Tanh(), tp.AdaptiveRNN(nn.GRUCell(9, 16), max_steps=3)))]
    ['1']
    """
    blocks = {path: module for path, module in net.named_modules() if is_block(module)}
    places = [
        part.place_within(path) if isinstance(part, HaltingModule) else (None, path)
        for path, part in blocks.items()
    ]
    found = dict(zip(names_of(places), blocks.values(), strict=True))
    # a plain block whose steps became a run of layers is that run
    driven = {id(layer) for part in found.values() if isinstance(part, LayerRun) for layer in part.layers}
    found = {
        name: part
        for name, part in found.items()
        if isinstance(part, HaltingModule) or not any(id(below) in driven for below in part.modules())
    }
    layers = [part for part in found.values() if not isinstance(part, HaltingModule)]
    inner = {id(below) for layer in layers for below in layer.modules() if below is not layer}
    return {name: part for name, part in found.items() if id(part) not in inner}


def title(name: str) -> str:
    """Return what a block of this name is called in a sentence."""
    return f"the block {name!r}" if name else "the block"


def batch_size(net: nn.Module, given: CallArgs) -> int:
    """Return how many examples there are in a call of a network."""
    return first_tensor(given).size(block_spec(net).batch_dim if is_block(net) else 0)


def step_call(given: CallArgs) -> CallArgs:
    """Return a call of a part as engines know it: the state first, by position, and what steps are given.

    >>> step_call(CallArgs((), {"u": 1, "weights": None, "mask": 2}))
    CallArgs(args=(1,), kwargs={'mask': 2})
    """
    told = {
        name: x
        for name, x in given.kwargs.items()
        if name not in ("weights", "exits")
        and (x is not None or name not in ("mode", "thresholds", "max_steps"))
    }
    if given.args or not told:
        return CallArgs(given.args, told)
    state = next((name for name in ("u", "input") if name in told), next(iter(told)))
    return CallArgs((told.pop(state),), told)


@contextmanager
def captured(found: Mapping[str, nn.Module], keep: bool = False) -> Iterator[dict[str, list[Call]]]:
    """Record the calls of parts within.

    Args:
        found: The parts by name.
        keep: Whether inputs and outputs are kept; otherwise only the shapes of outputs are.

    """
    calls: dict[str, list[Call]] = {name: [] for name in found}
    runs = {part: name for name, part in found.items() if isinstance(part, LayerRun)}
    collector = _RunCalls(runs, calls)
    entered = {run: partial(collector.entered, run) for run in runs}
    handles: list[Any] = [run.layers[0].register_forward_hook(note) for run, note in entered.items()]
    for name, part in found.items():
        if isinstance(part, LayerRun):
            continue

        def note(
            _part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], returned: Any, name: str = name
        ) -> None:
            adaptive = isinstance(returned, tuple) and len(returned) and isinstance(returned[-1], Ponder)
            output, ponder = (returned[0], returned[-1]) if adaptive else (returned, None)
            made = output if keep else torch.empty_like(parts(output)[0], device="meta")
            given = step_call(CallArgs(args, kwargs))
            calls[name].append(Call(given if keep else CallArgs((), given.kwargs), made, ponder))

        handles.append(part.register_forward_hook(note, with_kwargs=True))
    try:
        with collecting(collector):
            yield calls
    finally:
        for handle in handles:
            handle.remove()


class _RunCalls(Collector):
    """Records what runs of layers did, which are not called as modules."""

    def __init__(self, runs: Mapping[LayerRun, str], calls: Mapping[str, list[Call]]) -> None:
        super().__init__({run: name for run, name in runs.items()})  # noqa: C416 (a mapping of another type)
        self.calls = calls
        self.states: dict[LayerRun, tuple[torch.Tensor, torch.Tensor | None]] = {}

    def entered(self, run: LayerRun, _layer: nn.Module, _args: Any, returned: Any) -> None:
        """Note the shape of the state after a first layer."""
        state, scope = first_output(run.name, returned), scope_of(run)
        weights = None if scope is None else entry_of(run, state, scope).weights
        if weights is not None:
            weights = weights.transpose(0, 1) if run.batch_dim else weights
        real = None if weights is None else weights.squeeze(2) > 0
        self.states[run] = torch.empty_like(state, device="meta"), real

    def add(self, block: HaltingModule, ponder: Ponder) -> None:
        """Note a call that ends."""
        if isinstance(block, LayerRun) and block in self.names:
            state, real = self.states[block]
            self.calls[self.names[block]].append(Call(CallArgs(), state, ponder, real))
