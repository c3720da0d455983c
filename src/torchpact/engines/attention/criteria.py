"""Criteria in runs of layers: asked about active tokens, or active examples, where that is all the same."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from torchpact.core.criterion import Criterion, Exit, Memory, asked, map_memory
from torchpact.specs import BlockSpec, CriterionHead

Scope = Literal["tokens", "examples", "batch"]
"""What criteria look at one by one: they may be asked about some of them only."""


@torch.no_grad()
def scope_of(spec: BlockSpec, size: int, like: Tensor) -> Scope:
    """Return what the criteria of a run treat one by one, memories included, as found out on random states.

    Two exits in a row are asked about together and then in part, as tokens and examples leave.

    Args:
        spec: The run.
        size: The features of a token.
        like: A tensor of the states' precision and device.

    """
    criteria = [head.module for head in spec.heads if isinstance(head, CriterionHead)]
    draw = torch.Generator().manual_seed(0)
    states = [torch.randn(4, 3, size, generator=draw).to(like) for _ in range(3)]
    real = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0], [1, 1, 1]]).unsqueeze(2).to(like)
    pairs = [*zip(spec.heads, states[:-1], states[1:], strict=False)][: len(spec.heads)]
    try:
        for scope in ("tokens", "examples"):
            if criteria and _agrees(pairs, real, scope):
                return scope
    except Exception:  # whatever a user's criterion makes of such states
        pass
    return "batch"


def _agrees(pairs: Sequence[tuple[object, Tensor, Tensor]], real: Tensor, scope: Scope) -> bool:
    batch, length = real.shape[:2]
    weights = None if scope == "tokens" else real
    whole = Asking("batch", weights, (batch, length))
    some = Asking(scope, weights, (batch, length))
    keep = torch.tensor([0, 2, 4, 5, 7, 9, 10, 11] if scope == "tokens" else [*range(3), *range(6, 12)])
    for index, (head, before, after) in enumerate(pairs):
        assert isinstance(head, CriterionHead)
        rows = keep.to(after.device)
        own, moved = (x.reshape(-1, x.size(-1)).index_select(0, rows) for x in (before, after))
        expected = whole.logits(head.module, index, before, after, own, moved, rows)
        found = some.logits(head.module, index, before, after, own, moved, rows)
        if expected.size(1) != (length if scope == "tokens" else 1):
            return False
        spread = expected.expand(batch, length, 1).reshape(-1, 1)[rows]
        part = found.expand(batch, length, 1).reshape(-1, 1)[rows]
        if not torch.allclose(part, spread, rtol=1e-3, atol=1e-3, equal_nan=True):
            return False
        keep = keep[keep >= 6]
    return True


class Asking:
    """Asks the criteria of one call, and carries what they keep.

    Args:
        scope: What criteria treat one by one.
        weights: How much each token counts, (batch, length, 1); None where all do.
        shape: Batch and length.

    """

    def __init__(self, scope: Scope, weights: Tensor | None, shape: tuple[int, int]) -> None:
        self.scope, self.weights, self.shape = scope, weights, shape
        self._memory: Memory = None
        self._kept: Tensor | None = None  # the rows that the memory is of; None for all

    def logits(
        self,
        criterion: Criterion,
        index: int,
        before: Tensor,
        after: Tensor,
        own: Tensor,
        moved: Tensor,
        rows: Tensor | None,
    ) -> Tensor:
        """Return the logits of all tokens, or examples; +∞ for those that it is not asked about.

        Args:
            criterion: What is asked.
            index: The number of the layer.
            before: The state before it, (batch, length, size); with the scope "tokens" it may have changed.
            after: The state after it.
            own: The active tokens before it, (rows, size).
            moved: The active tokens after it.
            rows: Which these are; None for all.

        """
        batch, length = self.shape
        if self.scope == "batch":
            found, self._memory = asked(criterion, Exit(after, before, index, self.weights, self._memory))
            return found
        if self.scope == "tokens":
            self._leave(rows)
            exit = Exit(moved.unsqueeze(1), own.unsqueeze(1), index, None, self._memory)
            found, self._memory = asked(criterion, exit)
            return _spread(found.reshape(-1, 1), rows, batch * length).view(batch, length, 1)
        active = None if rows is None else torch.unique_consecutive(rows // length)
        if active is not None and len(active) == batch:
            active = None
        self._leave(active)
        parts = [x if active is None or x is None else x[active] for x in (after, before, self.weights)]
        state, old, weights = parts
        assert state is not None
        assert old is not None
        found, self._memory = asked(criterion, Exit(state, old, index, weights, self._memory))
        if found.shape != (len(state), 1, 1):
            return found  # which is refused
        return _spread(found.view(-1, 1), active, batch).view(batch, 1, 1)

    def _leave(self, rows: Tensor | None) -> None:
        """Keep the memory of these rows only."""
        if rows is not None and self._memory is not None:
            places = rows if self._kept is None else torch.searchsorted(self._kept, rows)
            self._memory = map_memory(lambda part: part.index_select(0, places), self._memory)
        self._kept = rows


def _spread(found: Tensor, rows: Tensor | None, count: int) -> Tensor:
    if rows is None:
        return found
    return found.new_full((count, 1), torch.inf).index_copy_(0, rows, found)
