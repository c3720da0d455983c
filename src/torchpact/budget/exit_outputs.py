"""Outputs of a network at several exits, through its own read-out: with one block, its steps run once."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn

from torchpact.core.call_args import CallArgs
from torchpact.core.collect import Ponders, collect
from torchpact.core.halting_module import HaltingModule, halting_modules
from torchpact.core.layer_run import LayerRun
from torchpact.core.overrides import use_heads, use_mode, use_thresholds
from torchpact.core.state import State
from torchpact.core.thresholds import Thresholds
from torchpact.nn.criteria import RandomExit
from torchpact.specs.call_capture import Call, captured

Exit = Mapping[str, int]
"""After which step each block halts, by name."""


class ExitOutputs(NamedTuple):
    """What a network returns at some exits."""

    outputs: list[Any]
    """One for each exit."""
    ponders: Ponders
    """Of the run, with exits."""
    calls: Mapping[str, Sequence[Call]]
    """What blocks were called with in that run, by name."""

    @property
    def real(self) -> Tensor | None:
        """False for padding, (batch, length), as far as the network told it to its layers."""
        return next(iter(self.calls.values()))[0].real


def exit_outputs(
    net: nn.Module, given: CallArgs, exits: Sequence[Exit], shares: Sequence[float] | None = None
) -> ExitOutputs:
    """Return what a network returns if all positions leave at an exit, for several exits.

    Of a network with one block, the steps run once; what comes after the block runs for each exit on the
    state that it had. Otherwise the whole network runs for each exit. Gradients flow if they are enabled.

    Args:
        net: A network with adaptive blocks.
        given: What it is called with.
        exits: After which step each block halts.
        shares: Of one block: positions halt at random after each step, with these probabilities, so that the
            others see states of positions that have halted, as they will; outputs of an exit count where
            a position got there, which its ``steps`` tell. By default nothing halts.

    Raises:
        ValueError: The network has no adaptive blocks, or calls one several times.

    """
    blocks = halting_modules(net)
    one = len(blocks) == 1
    outputs: list[Any] = []
    never: Sequence[Any]
    if shares is None:
        never = use_mode(net, "thresholded"), use_thresholds(net, Thresholds("never"))
    else:
        never = use_mode(net, "discrete"), use_heads(net, RandomExit(shares))
    watched = captured(blocks), collect(net, exits=True), _returned(blocks)
    with never[0], never[1], watched[0] as calls, watched[1] as ponders, watched[2] as returned:
        full = given.call(net)
    if sorted(ponder.name for ponder in ponders) != sorted(blocks):
        raise ValueError("expected a network that calls each adaptive block once")
    name, block = next(iter(blocks.items()))
    for each in exits:
        if all(each[name] == block.max_steps for name, block in blocks.items()):
            outputs.append(full)
        elif one:
            kept = ponders[0].exits
            assert kept is not None
            with _returning(block, kept.states[each[name] - 1], returned[name]):
                outputs.append(given.call(net))
        else:
            with use_mode(net, "thresholded"), use_thresholds(net, pinned(blocks, each)):
                outputs.append(given.call(net))
    return ExitOutputs(outputs, ponders, calls)


def pinned(blocks: Mapping[str, HaltingModule], exit: Exit) -> Thresholds:
    """Return thresholds by which each block halts after a step of its own.

    Args:
        blocks: By name.
        exit: The steps, by name.

    """
    bounds = {}
    for name, block in blocks.items():
        early = min(exit[name], block.max_steps) - 1
        bounds[name] = ["never"] * early + ["always"] * (block.max_steps - 1 - early)
    return Thresholds(bounds)


@contextmanager
def _returned(blocks: Mapping[str, HaltingModule]) -> Iterator[dict[str, Any]]:
    """Note what a block, or the last layer of a run, returns."""
    found: dict[str, Any] = {}
    handles = []
    for name, block in blocks.items():
        module: nn.Module = block.layers[-1] if isinstance(block, LayerRun) else block

        def note(_module: nn.Module, _args: Any, output: Any, name: str = name) -> None:
            found[name] = output  # of the last call, where layers are shared

        handles.append(module.register_forward_hook(note))
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _returning(block: HaltingModule, state: State, returned: Any) -> Iterator[None]:
    """Let a block, or all layers of a run, return a state at once instead of computing."""
    modules: Sequence[nn.Module] = [block]
    answer: Any
    if isinstance(block, LayerRun):
        modules = [*{id(layer): layer for layer in block.layers}.values()]
        assert isinstance(state, Tensor)
        turned = state.transpose(0, 1) if block.batch_dim else state
        rest = () if isinstance(returned, Tensor) else returned[1:]
        answer = turned if isinstance(returned, Tensor) else type(returned)((turned, *rest))
    else:
        answer = (state, *returned[1:])
    before = [module.__dict__.get("forward") for module in modules]
    enabled = getattr(block, "enabled", None)
    for module in modules:
        module.__dict__["forward"] = lambda *_args, **_kwargs: answer
    if isinstance(block, LayerRun):
        block.enabled = False
    try:
        yield
    finally:
        for module, own in zip(modules, before, strict=True):
            del module.__dict__["forward"]
            if own is not None:
                module.__dict__["forward"] = own
        if isinstance(block, LayerRun) and enabled is not None:
            block.enabled = enabled
