"""What every exit of every block gives: costs, losses raw and through read-outs, confidences, states."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torchpact.budget.exit_states import ExitStates, replaced
from torchpact.budget.heldout import HeldOut
from torchpact.budget.unit_losses import Item, Loss, UnitLosses
from torchpact.core.call_args import CallArgs
from torchpact.core.callables import uncompiled
from torchpact.core.collect import collect
from torchpact.core.halting_module import HaltingModule, halting_modules
from torchpact.core.layer_run import LayerRun
from torchpact.core.modes import Thresholded
from torchpact.core.overrides import use_mode, use_thresholds
from torchpact.core.ponder import Ponder
from torchpact.core.thresholds import Thresholds
from torchpact.flops.count import evaluating
from torchpact.specs.call_capture import Call, batch_size, captured


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
    """Half of the batches."""

    def __init__(
        self, net: nn.Module, batches: list[Any], loss: Loss | None, logits: bool | None, inputs: Any
    ) -> None:
        self.losses = UnitLosses(loss, logits)
        items = [Item(index, batch) for index, batch in enumerate(batches)]
        take = (lambda item: item.batch) if inputs is None else (lambda item: inputs(item.batch))
        self.held = self.losses.held = HeldOut(net, items, self.losses, take)
        self.losses.full = True
        self.full = self.run(Thresholds("never"))
        counts = [mask.reshape(len(mask), -1).sum(1) for mask in self.losses.real]
        self.counts = torch.cat(counts)
        self.by_position = self.losses.real[0].dim() > 1

    def run(self, thresholds: Thresholds) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return FLOPs of examples, and losses and confidences of units."""
        outcome = self.held.run(thresholds)
        return (outcome.costs * self.held.plain, *self.losses.taken())

    def through(
        self, block: HaltingModule, weights: Tensor, thresholds: Thresholds
    ) -> tuple[Tensor, Tensor | None]:
        """Return losses and confidences of units through a read-out after a block."""
        net, held = self.held.net, self.held
        thresholded = use_mode(net, "thresholded"), use_thresholds(net, thresholds)
        with evaluating(net), thresholded[0], thresholded[1], replaced(block, weights):
            for given, item in zip(held.given, held.batches, strict=True):
                self.losses(given.call(net), item)
        return self.losses.taken()

    def pinned(self, name: str, step: int) -> Thresholds:
        """Return thresholds by which one block halts after a step, and the others never."""
        bounds = {}
        for each, block in self.held.blocks.items():
            heads = block.max_steps - 1
            early = [*["never"] * (step - 1), *["always"] * (heads - step + 1)][:heads]
            bounds[each] = early if each == name else ["never"] * heads
        return Thresholds(bounds)

    def states(self) -> Iterator[tuple[int, list[Ponder], dict[str, list[Call]]]]:
        """Yield the exits of each batch, where nothing halts, and the calls, which know of padding."""
        net = self.held.net
        never = Thresholds("never")
        with evaluating(net), use_mode(net, "thresholded"), use_thresholds(net, never):
            for index, given in enumerate(self.held.given):
                with captured(self.held.blocks) as calls, collect(net, exits=True) as ponders:
                    given.call(net)
                yield index, ponders, calls


def exits_by_block(
    net: nn.Module,
    batches: Iterable[Any],
    loss: Loss | None,
    inputs: Callable[[Any], Any] | None,
    logits: bool | None,
) -> list[BlockExits]:
    """Run a network on all batches at each exit of each block, raw and through fitted read-outs.

    Read-outs are fitted on every second batch for the others, and the other way round.

    Args:
        net: A network with adaptive blocks.
        batches: At least two.
        loss: Of the output and the batch; None is the difference to the full output.
        inputs: Takes what the network is called with out of a batch.
        logits: Whether the output is class logits; None asks for its name.

    Raises:
        ValueError: There are fewer than two batches, or losses are not as expected.

    """
    given = list(batches)
    if len(given) < 2:
        raise ValueError(
            f"expected at least two batches, to fit on one half and judge on the other, got {len(given)}"
        )
    halves = [_Half(net, given[i::2], loss, logits, inputs) for i in (0, 1)]
    seen = [
        {name: ExitStates(block.max_steps) for name, block in half.held.blocks.items()} for half in halves
    ]
    for half, own in zip(halves, seen, strict=True):
        for index, ponders, calls in half.states():
            if sorted(ponder.name for ponder in ponders) != sorted(own):
                raise ValueError("expected a network that calls each adaptive block once")
            for ponder in ponders:
                own[ponder.name].add(ponder, half.losses.real[index], calls[ponder.name][0].real)
    plain = sum(len(half.held) * half.held.plain for half in halves) / sum(len(half.held) for half in halves)
    plain = max(plain, 1.0)  # where nothing is computed
    tails = tail_flops(net, halves[0].held.given[0])
    return [_of_block(name, halves, [own[name] for own in seen], plain, tails[name]) for name in seen[0]]


def _of_block(
    name: str, halves: list[_Half], seen: list[ExitStates], plain: float, tail: float
) -> BlockExits:
    block = halves[0].held.blocks[name]
    costs, raw, sure, fitted, fitted_sure = [], [], [], [], []
    maps = [each.maps() for each in seen]
    for number, half in enumerate(halves):
        other = maps[1 - number]
        runs, own = [], []
        for step in range(1, block.max_steps):
            at = half.pinned(name, step)
            runs.append(half.run(at))
            if other is not None:
                own.append(half.through(half.held.blocks[name], other[step - 1], at))
        runs.append(half.full)
        own.append(half.full[1:])
        flops = torch.stack([run[0] for run in runs]).double() / plain
        if half.by_position:
            flops = (flops * half.counts).sum(1, keepdim=True) / half.counts.sum()
            costs.append(flops.expand(-1, int(half.counts.sum())))
        else:
            costs.append(flops)
        raw.append(torch.stack([run[1] for run in runs]))
        fitted.append(torch.stack([run[0] for run in own]))
        if half.full[2] is not None:
            sure.append(torch.stack([run[2] for run in runs if run[2] is not None]))
            fitted_sure.append(torch.stack([run[1] for run in own if run[1] is not None]))
    examples = torch.cat([half.counts for half in halves])
    sizes = [int(half.counts.sum()) for half in halves]
    width = seen[0].width
    positions = sum(each.positions for each in seen) / max(len(examples), 1)
    mappable = all(each is not None for each in maps)
    logits = [torch.cat(half.held.logits[name], 1)[:, torch.cat(half.held.real[name])] for half in halves]
    return BlockExits(
        name,
        block.max_steps,
        torch.cat(costs, 1),
        torch.cat(raw, 1),
        torch.cat(fitted, 1) if mappable else None,
        2 * width * width * positions / plain,
        tail / plain,
        torch.cat(sure, 1) if sure else None,
        torch.cat(fitted_sure, 1) if sure and mappable else None,
        torch.cat([torch.cat(each.features, 1) for each in seen], 1),
        torch.cat([torch.cat(each.h, 1) for each in seen], 1),
        torch.cat(logits, 1),
        _bounds(block),
        torch.arange(len(examples)).repeat_interleave(examples),
        torch.arange(2).repeat_interleave(torch.tensor(sizes)),
    )


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
