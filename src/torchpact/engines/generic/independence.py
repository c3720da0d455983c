"""Whether the steps of a block treat examples, or positions, independently, so that halted ones may leave."""

from typing import Any

import torch
from torch import Tensor

from torchpact.checks import one_line
from torchpact.core import state
from torchpact.core.block import AdaptiveBlock
from torchpact.core.call_args import CallArgs
from torchpact.core.modes import NeverHalt
from torchpact.core.state import State
from torchpact.engines.base import Unsupported
from torchpact.engines.generic.per_example import (
    example_shape,
    flat,
    is_per_example,
    map_per_example,
    rows,
)


@torch.no_grad()
def check_independence(block: AdaptiveBlock, u: State, context: CallArgs) -> bool:
    """Check that a block's steps and heads are independent across examples, or across positions.

    Re-runs a random subset and a single example through all steps, on the original inputs and on noised ones,
    and requires matching outputs; identical inputs alone cannot reveal cross-example dependence.

    Args:
        block: The block.
        u: The state that it is given.
        context: What else it is given.

    Returns:
        Whether positions halt, rather than examples.

    Raises:
        Unsupported: They are not independent, or too few to tell.

    Example:
        >>> block = tp.AdaptiveBlock(nn.Tanh(), nn.Linear(8, 1), max_steps=4, mode="thresholded")
        >>> check_independence(block, torch.randn(5, 7, 8), CallArgs())
        True
        >>> block = tp.AdaptiveBlock(lambda u: u - u.mean(0), nn.Linear(8, 1), max_steps=4)
        >>> check_independence(block, torch.zeros(5, 8), CallArgs())
        Traceback (most recent call last):
            ...
        torchpact.engines.base.Unsupported: compact: expected steps and heads that treat examples indep...

    """
    first = state.parts(u)[0]
    rest: tuple[Any, ...] = (context.args, dict(context.kwargs))
    _, probs = _all_steps(block, u, rest)
    decisions = probs.shape[1:]
    positions = decisions[1:].numel() > 1
    shape = example_shape(u, positions)
    if decisions[0] != len(first) or (positions and decisions != (*shape, 1)):
        what = f"a decision an example, or for each of {tuple(shape)}; got {tuple(decisions)}"
        if len(decisions) == 4 and decisions[1] == 1:
            what = "decisions for examples, or units of torchpact.models; got some for pixels of other steps"
        raise Unsupported(f"compact: expected {what}")
    if shape.numel() < 2:
        raise Unsupported("compact: expected two examples or more: one alone cannot show independence")
    draw = torch.Generator().manual_seed(0)
    for given, told in ((u, rest), (_noised(u, draw, shape), rest), _noised((u, rest), draw, shape)):
        if not _subset_agrees(block, given, told, shape, draw):
            what = "positions" if positions else "examples"
            raise Unsupported(
                f"compact: expected steps and heads that treat {what} independently, but for rounding"
            )
    return positions


def _all_steps(block: AdaptiveBlock, u: State, rest: tuple[Any, ...]) -> tuple[State, Tensor]:
    """Run all steps, and return the output and the halting probabilities."""
    loop, u = block.iterate(u, *rest, mode=NeverHalt())
    output, ponder = loop.result(u)
    return output, ponder.probs


def _noised(value: Any, draw: torch.Generator, shape: torch.Size) -> Any:
    """Return values with as much noise as examples have differences, or some; what they share stays."""

    def with_noise(part: Tensor) -> Tensor:
        if part.dtype == torch.bool:
            return (torch.rand(part.shape, generator=draw) < 0.5).to(part)
        if not part.is_floating_point():
            return part
        size = part.float().std() if part.numel() > 1 else part.new_zeros(())
        noise = torch.randn(part.shape, generator=draw).to(part)
        return part + noise * torch.where(size > 0, size, 1.0).to(part)

    return map_per_example(value, is_per_example(value, shape), with_noise)


def _subset_agrees(
    block: AdaptiveBlock, u: State, rest: tuple[Any, ...], shape: torch.Size, draw: torch.Generator
) -> bool:
    """Whether some of the positions of this shape, and one, come out as they do beside the others."""
    output, all_probs = _all_steps(block, u, rest)
    per_example = is_per_example((u, rest), shape)
    whole = flat((u, rest), per_example, len(shape))
    expected = [part.flatten(0, len(shape) - 1) for part in state.parts(output)]
    probs = all_probs.flatten(1).T
    # an odd number of them, here and there, so that pairs and halves of the batch are torn apart; and not the
    # first, by which something that all share could be told
    order = 1 + torch.randperm(shape.numel() - 1, generator=draw).to(probs.device)
    for keep in (order[: len(order) // 2 | 1].sort().values, order[:1]):
        own, others = rows(whole, per_example, keep)
        try:
            some, seen = _all_steps(block, own, others)
        except Exception as error:  # whatever a user's step makes of it
            why = f"{type(error).__name__}: {one_line(error)}"
            raise Unsupported(f"compact: expected steps that can run fewer examples, got {why}") from error
        found = [*state.parts(some), seen.flatten(1).T]
        if not all(_close(*pair, keep) for pair in zip(found, [*expected, probs], strict=True)):
            return False
    return True


def _close(some: Tensor, everyone: Tensor, keep: Tensor) -> bool:
    """Whether rows differ by rounding at most, for each feature; some may be infinite, or not a number."""
    other = everyone[keep]
    if some.shape != other.shape:
        return False
    if not other.is_floating_point():
        return torch.equal(some, other)
    bound = 1e-3 if torch.finfo(other.dtype).bits >= 32 else 2e-2
    sizes = everyone.double().nan_to_num(0, 0, 0).square()
    least = bound * (sizes.mean(0) + 1e-12 * sizes.mean()).sqrt()
    near = (some.double() - other.double()).abs() <= bound * other.double().abs() + least
    same = (some == other) | (some.isnan() & other.isnan())
    return bool((near | same).all())
