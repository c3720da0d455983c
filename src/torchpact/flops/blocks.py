"""What the adaptive parts of a network cost in a run: asked of their specs, or else metered."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchpact.core.block import AdaptiveBlock
from torchpact.core.call_args import CallArgs, first_tensor, with_one_example
from torchpact.flops.conv import conv_block_flops, plain_conv_flops
from torchpact.flops.metering import Prices, metered_prices
from torchpact.flops.steps import step_flops
from torchpact.specs import BlockSpec, block_spec
from torchpact.specs.call_capture import Call, adaptive_parts, batch_size, captured, title


class BlockCost(NamedTuple):
    """What the calls of a block, or of a recurrent layer, cost in a run."""

    flops: Tensor
    """Of each example."""
    plain: float
    """Of one example, in the mean, if all steps run everywhere and nothing is decided."""
    active: float
    """The share of steps that positions ran, in the mean."""


class MeteredRun(NamedTuple):
    """A run of a network, and what it cost."""

    output: Any
    costs: dict[str, BlockCost]
    """Of each adaptive part, by name."""
    rest: int
    """The FLOPs of all else, for an example."""


class Meter:
    """Tells what runs of a network on a batch cost, whatever halts in them.

    Steps and heads are metered once, in a run in which nothing halts.

    Args:
        net: The network, in evaluation, without gradients.
        given: What it is called with; the first dimension of the first tensor is the batch.
        like: The meter of a batch of the same shapes, whose prices are taken.

    Raises:
        TypeError: One adaptive part is within another.

    """

    def __init__(self, net: nn.Module, given: CallArgs, like: "Meter | None" = None) -> None:
        self.net, self.given = net, given
        self.found, self.batch = adaptive_parts(net), batch_size(net, given)
        self.prices: dict[str, list[Prices]]
        self.rest: int
        if like is not None:
            self.prices, self.rest = like.prices, like.rest
            return
        enough = given if self.batch else given.map(with_one_example)
        self.prices, rest = metered_prices(net, self.found, enough)
        self.rest = round(rest / max(self.batch, 1))

    def run(self) -> MeteredRun:
        """Run the network in its present mode, with its present thresholds.

        Raises:
            TypeError: A part does not say what it did.
            ValueError: A part does not decide for the examples of the batch, or is not always called as
                often.

        """
        with captured(self.found) as calls:
            output = self.given.call(self.net)
        return MeteredRun(output, self.costs_of(calls), self.rest)

    def costs_of(self, calls: Mapping[str, Sequence[Call]]) -> dict[str, BlockCost]:
        """Return what the parts cost in a run.

        Args:
            calls: What they were called with, and what they did, by name.

        Raises:
            TypeError: A part does not say what it did.
            ValueError: A part does not decide for the examples of the batch, or is not always called as
                often.

        """
        costs = {}
        nothing = torch.zeros(self.batch, dtype=torch.long, device=first_tensor(self.given).device)
        for name, part in self.found.items():
            ran, known = calls[name], self.prices[name]
            if len(ran) != len(known):
                raise ValueError(
                    f"expected {title(name)} to be called as often whatever halts, got {len(ran)} calls, and "
                    f"{len(known)} where nothing does"
                )
            spec = block_spec(part, name, hooks=True)
            each = [call_cost(spec, *pair, self.batch) for pair in zip(ran, known, strict=True)]
            costs[name] = BlockCost(
                sum((cost.flops for cost in each), nothing),
                sum(cost.plain for cost in each),
                sum(cost.active for cost in each) / len(each) if each else 0.0,
            )
        return costs


def block_costs(net: nn.Module, given: CallArgs) -> tuple[dict[str, BlockCost], int]:
    """Return what each adaptive part of a network costs in a run, and what all else costs an example.

    Args:
        net: The network, in evaluation, without gradients.
        given: What it is called with; the first dimension of the first tensor is the batch.

    Returns:
        The costs by name, and the FLOPs of the rest.

    Raises:
        TypeError: One adaptive part is within another.
        ValueError: A part does not decide for the examples of the batch, or is not always called as often.

    """
    meter = Meter(net, given)
    if not meter.found:
        return {}, meter.rest
    _, costs, rest = meter.run()
    return costs, rest


def call_cost(spec: BlockSpec, call: Call, prices: Prices, batch: int) -> BlockCost:
    """Return what a call of a part cost."""
    if spec.conv_units is not None and (call.ponder is None or call.ponder.steps.dim() >= 4):
        return _conv_cost(spec, call, prices, batch)
    if call.ponder is None:
        raise TypeError(f"expected {title(spec.name)} to return what it did, got no Ponder")
    steps = call.ponder.steps
    if len(steps) != batch if spec.recurrent or not batch else len(steps) % batch:
        raise ValueError(
            f"expected {title(spec.name)} to decide for {batch} examples, the first dimension of what the "
            f"network is given; got {len(steps)}"
        )
    spec = _of_run(spec, len(call.ponder.probs))
    if len(prices.steps) % spec.max_steps:
        raise TypeError(
            f"expected {title(spec.name)} to run {spec.max_steps} steps, got {len(prices.steps)} calls"
        )
    weights, real = call.ponder.weights, call.real
    if weights is not None:  # padding costs nothing
        steps = torch.where(weights > 0, steps, 0)
        by_token = real is None and weights.dim() == 3 and weights.size(1) > 1
        real = weights.squeeze(2) > 0 if by_token else real
    rows = steps.reshape(batch, -1) if batch else steps.new_zeros(0, 1)
    # prices are of all examples; a time step of a recurrent layer costs as much as any other, else a price is
    # that of all positions
    shares = max(batch, 1) * (1 if spec.recurrent else rows.size(1))
    flops = torch.zeros(batch, dtype=torch.double)
    for index, price in enumerate(prices.steps[: spec.max_steps]):
        asked = sum(prices.heads[index : index + 1]) if index + 1 < spec.max_steps else 0
        known = step_flops(spec.steps[index], steps > index, _by_batch(spec, call), real) if batch else None
        if known is not None:
            price = 0
            flops += known.reshape(batch, -1).sum(1).cpu()
        flops += (rows > index).sum(1).cpu() * ((price + asked) / shares)
    count = int((rows > 0).sum())
    share = float(rows.double().sum()) / max(count, 1) / spec.max_steps
    plain = _plain_cost(spec, call, prices, batch, count / shares, real)
    return BlockCost(flops.round().long().to(steps.device), plain, share)


def _of_run(spec: BlockSpec, count: int) -> BlockSpec:
    """Return the spec of a block that ran with ``max_steps=count``."""
    if count == spec.max_steps or not isinstance(spec.module, AdaptiveBlock):
        return spec
    repeats = -(-count // spec.max_steps)  # more of them only where all are the same one
    return replace(spec, steps=(spec.steps * repeats)[:count], heads=(spec.heads * repeats)[: count - 1])


def _plain_cost(
    spec: BlockSpec, call: Call, prices: Prices, batch: int, share: float, real: Tensor | None
) -> float:
    """Return what an example costs, in the mean, if every real position runs all steps and no head is asked.

    Args:
        spec: The part.
        call: A call of it.
        prices: What its steps cost where nothing halts.
        batch: How many examples there are.
        share: The share of positions that are real.
        real: False for padding, (batch, length); None where there is none.

    """
    total, everywhere = 0.0, torch.ones(1, dtype=torch.bool)
    for index, price in enumerate(prices.steps[: spec.max_steps]):
        assert call.ponder is not None
        active = everywhere.expand(call.ponder.steps.shape) if real is None else real.unsqueeze(2)
        known = step_flops(spec.steps[index], active, _by_batch(spec, call), real) if batch else None
        total += price * share / max(batch, 1) if known is None else float(known.sum()) / batch
    return total


def _by_batch(spec: BlockSpec, call: Call) -> tuple[int, ...]:
    """Return the shape of the state with the batch as its first dimension."""
    shape = tuple(call.output.shape)
    return (shape[1], shape[0], *shape[2:]) if spec.hooked and spec.batch_dim else shape


def _conv_cost(spec: BlockSpec, call: Call, prices: Prices, batch: int) -> BlockCost:
    """Return the cost of convolutional units; heads that are no convolutions are metered."""
    shape = call.output.shape
    height, width = shape[2:] if len(shape) == 4 else (shape[2] * shape[3], shape[4] * shape[5])
    if call.ponder is None:
        steps = torch.full((shape[0], 1, 1, 1), spec.max_steps)
    else:
        steps = call.ponder.steps
        steps = steps.squeeze(-1).squeeze(-2) if steps.dim() == 6 else steps
    rows = len(steps)
    if rows % batch if batch else rows:
        raise ValueError(
            f"expected {title(spec.name)} to decide for {batch} examples, the first dimension of what the "
            f"network is given; got {rows}"
        )
    weights = None if call.ponder is None else call.ponder.weights
    if weights is not None:  # pixels of weight 0 cost what the first unit does, which runs on all of a map
        steps = torch.where(weights > 0, steps, 1)
    known = spec if spec.conv_heads is not None else replace(spec, heads=())
    flops = conv_block_flops(known, steps, height, width)
    if spec.conv_heads is None:
        for index, price in enumerate(prices.heads):
            asked = (steps > index).flatten(1).double().mean(1)
            flops = flops + (asked * price / rows).round().long()
    if weights is not None:
        flops = flops * (weights > 0).expand(steps.shape).flatten(1).any(1)
    flops = flops.reshape(batch, -1).sum(1) if batch else flops
    plain = rows / max(batch, 1) * plain_conv_flops(spec, height, width)
    share = float(steps.double().mean()) / spec.max_steps if rows else 0.0
    return BlockCost(flops, plain, share)
