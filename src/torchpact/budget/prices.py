"""What steps cost as a share of the original network's FLOPs, and what ponders cost by that."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchpact.budget.block_names import named_by_place, places_of
from torchpact.core.call_args import call_args, first_tensor
from torchpact.core.callables import uncompiled
from torchpact.core.collect import collect
from torchpact.core.exits import exit_thresholds
from torchpact.core.halting import iteration_index
from torchpact.core.halting_module import adaptive_blocks
from torchpact.core.overrides import use_mode, use_thresholds
from torchpact.core.ponder import Ponder, is_unknown, mean_over_positions
from torchpact.flops.attention import key_value_flops, token_flops
from torchpact.flops.blocks import Meter
from torchpact.flops.count import evaluating
from torchpact.specs import AttentionLayer, block_spec

KINDS = ("relaxed", "sampled", "thresholded")
"""Whose cost: that expected under q, that of the decisions that were taken, that of h > ½."""


class BlockPrices(NamedTuple):
    """What a block costs, as shares of the FLOPs of the whole original network."""

    by_exit: tuple[float, ...]
    """If all positions halt after step 1, …, L: steps, and the heads that are asked."""
    shared: tuple[float, ...]
    """The part of each step that an example pays in full while any of its positions is active: keys and
    values."""
    plain: float
    """In the original network."""

    @property
    def per_step(self) -> float:
        """What a step costs after the first, in the mean."""
        steps = len(self.by_exit)
        return (self.by_exit[-1] - self.by_exit[0]) / (steps - 1) if steps > 1 else self.by_exit[0]


class NetworkPrices(NamedTuple):
    """What the blocks of a network cost, and all else."""

    blocks: Mapping[str, BlockPrices]
    fixed: float
    places: Mapping[str, str] = MappingProxyType({})
    """Names of their own that blocks have, and what they are called in ``blocks``."""

    def place(self, ponder: Ponder) -> str:
        """Return what the block of a ponder is called in ``blocks``."""
        return self.places.get(ponder.name, ponder.name)

    @property
    def least(self) -> float:
        """The cost of one step of every block."""
        return self.fixed + sum(block.by_exit[0] for block in self.blocks.values())

    @property
    def most(self) -> float:
        """The cost if nothing halts; it is above 1 by what heads cost."""
        return self.fixed + sum(block.by_exit[-1] for block in self.blocks.values())


def measured_prices(net: nn.Module, inputs: Any) -> NetworkPrices:
    """Return what the steps of a network cost on a batch, measured at pinned exits.

    Args:
        net: A network with adaptive blocks.
        inputs: What it is called with.

    Raises:
        ValueError: The network has no adaptive blocks, or the batch is empty.

    """
    net, given = uncompiled(net), call_args(inputs)
    blocks = adaptive_blocks(net)
    if not len(first_tensor(given)):
        raise ValueError("expected a batch of at least one example to measure costs on, got none")
    with evaluating(net), use_mode(net, "thresholded"), named_by_place(blocks):
        meter, runs = Meter(net, given), []
        for step in range(1, max(block.max_steps for block in blocks.values()) + 1):
            with use_thresholds(net, exit_thresholds(net, step)), collect(net) as ponders:
                runs.append(meter.run())
    whole = runs[0].rest + sum(cost.plain for cost in runs[0].costs.values())
    if not whole:
        raise ValueError("expected a network that multiplies something, got one of 0 FLOPs")
    found, fixed = {}, runs[0].rest / whole
    for name, part in meter.found.items():
        if all(each.name != name for each in ponders):  # a plain block, such as one around adapted layers
            fixed += runs[0].costs[name].plain / whole
            continue
        block = blocks.get(name)
        count = len(runs) if block is None else block.max_steps
        by_exit = [float(run.costs[name].flops.double().mean()) / whole for run in runs[:count]]
        length = _mean_length([each for each in ponders if each.name == name])
        shared = _key_value_shares(part, name, by_exit, length)
        found[name] = BlockPrices(tuple(by_exit), shared, runs[0].costs[name].plain / whole)
    return NetworkPrices(found, fixed, places_of(blocks))


def assumed_prices(ponders: Sequence[Ponder]) -> NetworkPrices:
    """Return what steps cost where nothing was measured: as much as their ponders say, and all else nothing.

    Args:
        ponders: What the blocks did in a call.

    """
    steps = {ponder.name: (ponder.price, len(ponder.probs)) for ponder in ponders}
    whole = sum(price * count for price, count in steps.values())
    found = {}
    for name, (price, count) in steps.items():
        by_exit = tuple(price * (step + 1) / whole for step in range(count))
        found[name] = BlockPrices(by_exit, (0.0,) * count, by_exit[-1])
    return NetworkPrices(found, 0.0)


def _mean_length(ponders: Sequence[Ponder]) -> float:
    """Return how many positions of an example count, in the mean."""
    counts = [
        each.steps[0].numel() if each.weights is None else float((each.weights > 0).sum()) / len(each.steps)
        for each in ponders
    ]
    return sum(counts) / max(len(counts), 1)


def _key_value_shares(
    part: nn.Module, name: str, by_exit: Sequence[float], length: float
) -> tuple[float, ...]:
    """Return what of each step is for keys and values, which is not less where fewer tokens are active."""
    shares, before = [], 0.0
    spec = block_spec(part, name, hooks=True)
    for index, each in enumerate(by_exit):
        step = spec.steps[min(index, len(spec.steps) - 1)]
        share = 0.0
        if isinstance(step, AttentionLayer):
            own = key_value_flops(step, 1)
            share = own / (own + token_flops(step, round(length)))
        shares.append((each - before) * share)
        before = each
    return tuple(shares)


def block_shares(prices: BlockPrices, ponder: Ponder) -> Tensor:
    """Return what a block costs each example, of shape (3, batch): relaxed, sampled, thresholded.

    Args:
        prices: Of the block.
        ponder: What it did.

    Raises:
        ValueError: The ponder has no probabilities, or another number of steps.

    Example:
        >>> block = tp.AdaptiveBlock(nn.Tanh(), lambda u: u[:, :1], max_steps=2)
        >>> _, ponder = block(torch.zeros(4, 8))  # h is a half
        >>> block_shares(assumed_prices([ponder]).blocks[""], ponder)[:, 0]
        tensor([0.7500, 1.0000, 1.0000])

    """
    probs, steps = ponder.probs.detach(), ponder.steps
    if is_unknown(probs):
        raise ValueError("expected ponders with probabilities, got decisions only: set details=True")
    if len(probs) != len(prices.by_exit):
        raise ValueError(f"expected ponders of {len(prices.by_exit)} steps, got {len(probs)}")
    before = (1 - probs[:-1]).cumprod(0)
    expected = torch.cat([torch.ones_like(probs[:1]), before])
    stays = (probs[:-1] <= 0.5).to(probs.dtype).cumprod(0)
    thresholded = torch.cat([torch.ones_like(probs[:1]), stays])
    sampled = (iteration_index(len(probs), steps) <= steps).to(probs.dtype).expand(probs.shape)
    return torch.stack([_cost(prices, reach, ponder.weights) for reach in (expected, sampled, thresholded)])


def _cost(prices: BlockPrices, reach: Tensor, weights: Tensor | None) -> Tensor:
    """Return the cost of each example, given the probability of each position to run each step."""
    total = reach.new_zeros(reach.size(1))
    before = 0.0
    for each, shared, run in zip(prices.by_exit, prices.shared, reach, strict=True):
        own = mean_over_positions(run, weights)
        total = total + (each - before - shared) * own
        if shared:
            gone = 1 - run if weights is None else torch.where(weights > 0, 1 - run, torch.ones_like(run))
            total = total + shared * (1 - gone.unsqueeze(-1).flatten(1).prod(1))
        before = each
    return total
