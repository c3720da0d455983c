"""What every exit of every block gives: costs, losses raw and through read-outs, confidences, states."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from torchpact.budget.batches import listed
from torchpact.budget.exit_outputs import Exit, exit_run
from torchpact.budget.exit_states import ExitStates, replaced
from torchpact.budget.heldout import HeldOut
from torchpact.budget.unit_losses import Loss, UnitLosses, Units, joined
from torchpact.core.call_args import CallArgs
from torchpact.core.callables import uncompiled
from torchpact.core.halting_module import HaltingModule, halting_modules
from torchpact.core.layer_run import LayerRun
from torchpact.core.modes import Thresholded
from torchpact.core.overrides import use_mode, use_thresholds
from torchpact.core.thresholds import Thresholds
from torchpact.flops.count import evaluating
from torchpact.specs.call_capture import batch_size


@dataclass
class BlockExits:
    """What n units, examples or positions, give at each of the L exits of a block."""

    name: str
    steps: int
    costs: Tensor
    """(L, n)."""
    raw: Tensor
    """Losses through the network's own read-out, (L, n)."""
    readout: Tensor | None
    """Losses through a fitted read-out besides, (L, n)."""
    readout_cost: float
    """What such a read-out costs, as a share of the original's FLOPs."""
    tail: float
    """What all that comes after the block costs."""
    raw_sure: Tensor | None
    """Confidences, as logits, (L, n); None without class logits."""
    readout_sure: Tensor | None
    features: Tensor
    """States of units, or the means over their positions, (L − 1, n, d)."""
    h: Tensor
    """Halting probabilities of units, means over their positions, (L − 1, n)."""
    logits: Tensor
    """Halting logits of real positions, (L − 1, positions)."""
    bounds: tuple[float, ...]
    """What they must exceed at present."""
    examples: Tensor
    """The example of each unit, (n,)."""
    halves: Tensor
    """Which half of the batches each unit is of, 0 or 1, (n,)."""


class _Half:
    """Half of the batches, and what exits give there; to be run in evaluation, thresholded.

    Args:
        held: The batches.
        losses: Of their units.

    """

    def __init__(self, held: HeldOut, losses: UnitLosses) -> None:
        self.held, self.losses = held, losses
        self.states = {name: ExitStates(block.max_steps) for name, block in held.blocks.items()}
        self.found: dict[str, list[Units]] = {name: [] for name in held.blocks}
        """Of each batch at all exits, by block."""
        self.fitted: dict[str, list[Units]] = {name: [] for name in held.blocks}
        """Through read-outs."""
        self.flops: dict[str, list[Tensor]] = {name: [] for name in held.blocks}
        """Of the examples of each batch at all exits, (L, batch)."""

    def look(self) -> None:
        """Run each batch once, and what comes after each exit for it."""
        for index, given in enumerate(self.held.given):
            run = exit_run(self.held.net, given)
            last = self.losses(run.output, index)
            for ponder in run.ponders:
                name = ponder.name
                self.states[name].add(ponder, self.losses.real[index], run.calls[name][0].real)
                exits = self._early(name)
                units = [self.losses(run.output_at(exit), index) for exit in exits]
                self.found[name].append(joined([*units, last], torch.stack))
                costs = [self.held.costs_at(index, run, exit) for exit in [*exits, {}]]
                self.flops[name].append(torch.stack(costs) * self.held.plain)

    def read(self, maps: Mapping[str, list[Tensor] | None]) -> None:
        """Run each batch once more, and what comes after each exit for its read-out.

        Args:
            maps: The read-outs of all exits but the last, by block; None of one that has none.

        """
        fitted = {name: weights for name, weights in maps.items() if weights is not None}
        for index, given in enumerate(self.held.given if fitted else ()):
            run = exit_run(self.held.net, given)
            last = self.losses(run.output, index)
            for name, weights in fitted.items():
                units = []
                for exit, each in zip(self._early(name), weights, strict=True):
                    with replaced(self.held.blocks[name], each):
                        units.append(self.losses(run.output_at(exit), index))
                self.fitted[name].append(joined([*units, last], torch.stack))

    def _early(self, name: str) -> list[Exit]:
        """Return the exits of a block before its last."""
        return [{name: step} for step in range(1, self.held.blocks[name].max_steps)]

    @property
    def counts(self) -> Tensor:
        """How many units each example has."""
        return torch.cat([real.reshape(len(real), -1).sum(1) for real in self.losses.real])

    def costs(self, name: str, plain: float) -> Tensor:
        """Return the FLOPs of units at all exits of a block, as shares of a number of them, (L, n)."""
        flops, counts = torch.cat(self.flops[name], 1).double() / plain, self.counts
        if self.losses.real[0].dim() == 1:
            return flops
        return ((flops * counts).sum(1, keepdim=True) / counts.sum()).expand(-1, int(counts.sum()))


def exits_by_block(
    net: nn.Module,
    batches: Iterable[Any],
    loss: Loss | None,
    inputs: Callable[[Any], Any] | None,
    logits: bool | None,
) -> list[BlockExits]:
    """Return what each exit of each block gives on all batches, raw and through fitted read-outs.

    Steps before an exit run once for all exits. Read-outs are fitted on every second batch for the others,
    and the other way round.

    Args:
        net: A network with adaptive blocks.
        batches: At least two.
        loss: Of the output and the batch; None is the difference to the full output.
        inputs: Takes what the network is called with out of a batch.
        logits: Whether the output is class logits; None asks for its name.

    Raises:
        TypeError: The batches are a single one.
        ValueError: There are fewer than two batches, or losses are not as expected.

    """
    given = listed(batches)
    if len(given) < 2:
        raise ValueError(
            f"expected at least two batches, to fit on one half and judge on the other, got {len(given)}"
        )
    # scores are never asked for; of a score by name all full outputs would be kept
    helds = [HeldOut(net, given[i::2], lambda *_: 0.0, inputs) for i in (0, 1)]
    halves = [_Half(held, UnitLosses(held, loss, logits)) for held in helds]
    net = helds[0].net
    with evaluating(net), use_mode(net, "thresholded"):
        for half in halves:
            half.look()
        for one, other in (halves, halves[::-1]):
            one.read({name: states.maps() for name, states in other.states.items()})
    plain = sum(len(held) * held.plain for held in helds) / sum(len(held) for held in helds)
    plain = max(plain, 1.0)  # where nothing is computed
    tails = tail_flops(net, helds[0].given[0])
    return [_of_block(name, halves, plain, tails[name]) for name in helds[0].blocks]


def _of_block(name: str, halves: list[_Half], plain: float, tail: float) -> BlockExits:
    block, states = halves[0].held.blocks[name], [half.states[name] for half in halves]
    raw = _together([half.found[name] for half in halves])
    fitted = _together([half.fitted[name] for half in halves])
    assert raw is not None
    examples = torch.cat([half.counts for half in halves])
    sizes = torch.stack([half.counts.sum() for half in halves])
    positions = sum(each.positions for each in states) / max(len(examples), 1)
    logits = [torch.cat(half.held.logits[name], 1)[:, torch.cat(half.held.real[name])] for half in halves]
    return BlockExits(
        name,
        block.max_steps,
        torch.cat([half.costs(name, plain) for half in halves], 1),
        raw.losses,
        None if fitted is None else fitted.losses,
        2 * states[0].width ** 2 * positions / plain,
        tail / plain,
        raw.sure,
        None if fitted is None else fitted.sure,
        torch.cat([torch.cat(each.features, 1) for each in states], 1),
        torch.cat([torch.cat(each.h, 1) for each in states], 1),
        torch.cat(logits, 1),
        _bounds(block),
        torch.arange(len(examples)).repeat_interleave(examples),
        torch.arange(2).repeat_interleave(sizes),
    )


def _together(halves: list[list[Units]]) -> Units | None:
    """Return the units of all batches; None if some have none."""
    if not all(halves):
        return None
    return joined([each for half in halves for each in half], partial(torch.cat, dim=1))


def _bounds(block: HaltingModule) -> tuple[float, ...]:
    """Return what logits of a block must exceed at present."""
    mode = block.present_mode
    mode = mode if isinstance(mode, Thresholded) else Thresholded()
    bounds = block.bounds_of(mode, None)
    return (mode.bound,) * (block.max_steps - 1) if bounds is None else bounds


def tail_flops(net: nn.Module, given: CallArgs) -> dict[str, float]:
    """Return the FLOPs of an example after each block, by name.

    Args:
        net: A network with adaptive blocks.
        given: A batch.

    """
    from torch.utils.flop_counter import FlopCounterMode  # imports Triton, where there is one

    net, ends = uncompiled(net), {}
    counter = FlopCounterMode(display=False)
    handles = []
    for name, block in halting_modules(net).items():
        module = block.layers[-1] if isinstance(block, LayerRun) else block

        def note(_module: nn.Module, _args: Any, _output: Any, name: str = name) -> None:
            ends[name] = counter.get_total_flops()

        handles.append(module.register_forward_hook(note))
    try:
        with evaluating(net), use_mode(net, "thresholded"), use_thresholds(net, Thresholds("never")), counter:
            given.call(net)
    finally:
        for handle in handles:
            handle.remove()
    total = counter.get_total_flops()
    return {name: (total - end) / batch_size(net, given) for name, end in ends.items()}
