"""Outputs of a network at several exits, through its own read-out: what comes before an exit runs once."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from torchpact.budget.block_names import named_by_place
from torchpact.core.call_args import CallArgs
from torchpact.core.collect import Ponders, collect
from torchpact.core.halting_module import HaltingModule, halting_modules
from torchpact.core.layer_run import LayerRun
from torchpact.core.overrides import use_heads, use_mode, use_thresholds
from torchpact.core.state import State
from torchpact.core.thresholds import Thresholds
from torchpact.nn.criteria import RandomExit
from torchpact.specs.call_capture import Call, adaptive_parts, captured

Exit = Mapping[str, int]
"""After which step each block halts, by name; blocks that are not named run all their steps."""


@dataclass(frozen=True)
class ExitRun:
    """A run of a network that keeps the states of all exits, and what the network returns at each of them."""

    net: nn.Module
    given: CallArgs
    blocks: Mapping[str, HaltingModule]
    output: Any
    """Of this run."""
    ponders: Ponders
    """Of this run, with exits, in the order in which the blocks ran."""
    calls: Mapping[str, Sequence[Call]]
    """What blocks were called with in this run, by name."""
    returned: Mapping[str, Any]
    """What a block, or the last layer of a run of layers, returned, by name."""

    @property
    def real(self) -> Tensor | None:
        """False for padding, (batch, length), as far as the network told it to its layers."""
        return self.calls[next(iter(self.blocks))][0].real

    def output_at(self, exit: Exit) -> Any:
        """Return what the network returns if all positions leave at an exit. Gradients flow if enabled.

        The first block that leaves early returns at once the state that it had there, and blocks before it
        return what they did; what comes after it runs.

        Args:
            exit: After which step each block halts.

        """
        most = {name: block.max_steps for name, block in self.blocks.items()}
        early = {name: step for name, step in exit.items() if step < most[name]}
        with ExitStack() as stack:
            for ponder in self.ponders:
                block, answer = self.blocks[ponder.name], self.returned[ponder.name]
                if ponder.name in early:
                    assert ponder.exits is not None
                    answer = _with_state(block, ponder.exits.states[early[ponder.name] - 1], answer)
                    stack.enter_context(_returning(block, answer))
                    break
                stack.enter_context(_returning(block, answer))
            else:
                return self.output
            stack.enter_context(use_mode(self.net, "thresholded"))
            stack.enter_context(use_thresholds(self.net, pinned(self.blocks, exit)))
            return self.given.call(self.net)


def exit_run(net: nn.Module, given: CallArgs, shares: Sequence[float] | None = None) -> ExitRun:
    """Run a network once, so that what it returns at its exits can be asked for.

    Args:
        net: A network with adaptive blocks.
        given: What it is called with.
        shares: Of one block: positions halt at random after each step, with these probabilities, so that the
            others see states of positions that have halted, as they will; outputs of an exit count where
            a position got there, which its ``steps`` tell. By default nothing halts.

    Raises:
        ValueError: The network has no adaptive blocks, or calls one several times.

    """
    blocks = halting_modules(net)
    settings: Sequence[Any]
    if shares is None:
        settings = use_mode(net, "thresholded"), use_thresholds(net, Thresholds("never"))
    else:
        settings = use_mode(net, "discrete"), use_heads(net, RandomExit(shares))
    watched = captured(adaptive_parts(net)), collect(net, exits=True), _returned(blocks)
    named = named_by_place(blocks)
    with settings[0], settings[1], named, watched[0] as calls, watched[1] as ponders, watched[2] as returned:
        output = given.call(net)
    if sorted(ponder.name for ponder in ponders) != sorted(blocks):
        raise ValueError("expected a network that calls each adaptive block once")
    return ExitRun(net, given, blocks, output, ponders, calls, returned)


def pinned(blocks: Mapping[str, HaltingModule], exit: Exit) -> Thresholds:
    """Return thresholds by which each block halts after a step of its own.

    Args:
        blocks: By name.
        exit: The steps, by name.

    """
    bounds = {}
    for name, block in blocks.items():
        early = min(exit.get(name, block.max_steps), block.max_steps) - 1
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


def _with_state(block: HaltingModule, state: State, returned: Any) -> Any:
    """Return what a block, or the last layer of a run, returns with another state."""
    if not isinstance(block, LayerRun):
        return state, *returned[1:]
    assert isinstance(state, Tensor)
    turned = state.transpose(0, 1) if block.batch_dim else state
    return turned if isinstance(returned, Tensor) else type(returned)((turned, *returned[1:]))


@contextmanager
def _returning(block: HaltingModule, answer: Any) -> Iterator[None]:
    """Let a block, or all layers of a run, return an answer at once instead of computing."""
    run = block if isinstance(block, LayerRun) else None
    modules = [block] if run is None else [*{id(layer): layer for layer in run.layers}.values()]
    before = [module.__dict__.get("forward") for module in modules]
    enabled = run is not None and run.enabled
    for module in modules:
        module.__dict__["forward"] = lambda *_args, **_kwargs: answer
    if run is not None:
        run.enabled = False
    try:
        yield
    finally:
        for module, own in zip(modules, before, strict=True):
            del module.__dict__["forward"]
            if own is not None:
                module.__dict__["forward"] = own
        if run is not None:
            run.enabled = enabled
