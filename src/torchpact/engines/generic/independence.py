"""Whether the steps of somebody's block treat examples, or positions, one by one, so that some may leave."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchpact.checks import one_line
from torchpact.core import state as _state
from torchpact.core.block import AdaptiveBlock
from torchpact.core.state import State
from torchpact.engines.block_spec import Unsupported
from torchpact.engines.generic.compact import CompactBlock, belongs, flat, mapped, rows_for, who_may_leave
from torchpact.flops.call_capture import Never


class Compacted(CompactBlock):
    """A block that examples leave, or positions, of which it was seen that this makes no difference.

    That holds for calls like the one it was tried on, which ``knows`` tells: what of the context belongs to
    examples is fixed, and all else keeps its shape.
    """

    def __init__(self, block: AdaptiveBlock, u: State, context: tuple[Any, ...], positions: bool) -> None:
        shape = who_may_leave(u, positions)
        super().__init__(block, positions, belongs(context, shape))
        self.dimensions, self.kinds = _state.parts(u)[0].dim(), _kinds((u, context), shape)

    def knows(self, u: State, *context: Any) -> bool:
        """Whether a call is such as was tried."""
        alike = _state.parts(u)[0].dim() == self.dimensions
        return alike and _matches(self.kinds, (u, context), who_may_leave(u, self.positions))


@torch.no_grad()
def compacted(block: AdaptiveBlock, u: State, *context: Any) -> Compacted:
    """Return a block that halted examples leave, or positions, if that is seen to make no difference.

    Some of them, and one, are run without the others, through all steps: as they are, and with noise, for
    what is alike does not tell.

    >>> block = tp.AdaptiveBlock(nn.Tanh(), nn.Linear(8, 1), max_steps=4, mode="thresholded")
    >>> compacted(block, torch.randn(5, 7, 8)).positions
    True
    >>> compacted(tp.AdaptiveBlock(lambda u: u - u.mean(0), nn.Linear(8, 1), max_steps=4), torch.zeros(5, 8))
    Traceback (most recent call last):
        ...
    torchpact.engines.block_spec.Unsupported: compact: expected steps and heads that treat examples one ...
    """
    first = _state.parts(u)[0]
    _, ponder = block(u, *context, mode=Never())
    decisions = ponder.steps.shape
    positions = decisions[1:].numel() > 1
    shape = who_may_leave(u, positions)
    if decisions[0] != len(first) or (positions and decisions != (*shape, 1)):
        what = f"a decision an example, or for each of {tuple(shape)}; got {tuple(decisions)}"
        if len(decisions) == 4 and decisions[1] == 1:
            what = "decisions for examples, or units of torchpact.models; got some for pixels of other steps"
        raise Unsupported(f"compact: expected {what}")
    if shape.numel() < 2:
        raise Unsupported("compact: expected two examples or more: of one, nothing can be seen to leave")
    draw = torch.Generator().manual_seed(0)
    for given, told in ((u, context), (_noisy(u, draw, shape), context), _noisy((u, context), draw, shape)):
        if not _runs_apart(block, given, told, shape, draw):
            what = "positions" if positions else "examples"
            raise Unsupported(
                f"compact: expected steps and heads that treat {what} one by one, but for rounding"
            )
    return Compacted(block, u, context, positions)


def _noisy(value: Any, draw: torch.Generator, shape: torch.Size) -> Any:
    """Return values with as much noise as examples have differences, or some; what they share stays."""

    def with_noise(part: Tensor) -> Tensor:
        if part.dtype == torch.bool:
            return (torch.rand(part.shape, generator=draw) < 0.5).to(part)
        if not part.is_floating_point():
            return part
        size = part.float().std() if part.numel() > 1 else part.new_zeros(())
        noise = torch.randn(part.shape, generator=draw).to(part)
        return part + noise * torch.where(size > 0, size, 1.0).to(part)

    return mapped(value, belongs(value, shape), with_noise)


def _runs_apart(
    block: AdaptiveBlock, u: State, context: tuple[Any, ...], shape: torch.Size, draw: torch.Generator
) -> bool:
    """Whether some of the positions of this shape, and one, come out as they do beside the others."""
    output, ponder = block(u, *context, mode=Never())
    theirs = belongs((u, context), shape)
    whole = flat((u, context), theirs, len(shape))
    expected = [part.flatten(0, len(shape) - 1) for part in _state.parts(output)]
    probs = ponder.probs.flatten(1).T
    # an odd number of them, here and there, so that pairs and halves of the batch are torn apart; and not the
    # first, by which something that all share could be told
    order = 1 + torch.randperm(shape.numel() - 1, generator=draw).to(probs.device)
    for keep in (order[: len(order) // 2 | 1].sort().values, order[:1]):
        own, others = rows_for(whole, theirs, keep)
        try:
            some, seen = block(own, *others, mode=Never())
        except Exception as error:  # whatever somebody's step makes of it
            why = f"{type(error).__name__}: {one_line(error)}"
            raise Unsupported(f"compact: expected steps that can run fewer examples, got {why}") from error
        found = [*_state.parts(some), seen.probs.flatten(1).T]
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


@dataclass(frozen=True)
class _Shared:
    """A tensor of this shape, which all examples share."""

    shape: torch.Size


def _kinds(value: Any, shape: torch.Size) -> Any:
    """Return what a value is: an example's (True), shared, or of some type; of containers, every part."""
    if isinstance(value, dict):
        return {key: _kinds(part, shape) for key, part in value.items()}
    if isinstance(value, tuple | list):
        return [_kinds(part, shape) for part in value]
    if not isinstance(value, Tensor):
        return type(value)
    return True if belongs(value, shape) else _Shared(value.shape)


def _matches(kinds: Any, value: Any, shape: torch.Size) -> bool:
    if isinstance(kinds, dict):
        fits = isinstance(value, dict) and value.keys() == kinds.keys()
        return fits and all(_matches(kind, value[key], shape) for key, kind in kinds.items())
    if isinstance(kinds, list):
        fits = isinstance(value, tuple | list) and len(value) == len(kinds)
        return fits and all(_matches(kind, part, shape) for kind, part in zip(kinds, value, strict=True))
    if kinds is True:
        return isinstance(value, Tensor) and value.shape[: len(shape)] == shape
    if isinstance(kinds, _Shared):
        return isinstance(value, Tensor) and value.shape == kinds.shape
    return type(value) is kinds
