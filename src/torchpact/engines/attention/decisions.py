"""Which tokens go on after a layer: the halting loop of a run of layers of attention."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from torchpact.checks import at_least_single
from torchpact.core.criterion import PoolingHead
from torchpact.core.loop import HaltingLoop, decide, go_on
from torchpact.core.modes import Thresholded, exceeds
from torchpact.core.ponder import Ponder
from torchpact.engines.attention.criteria import Asking, Scope
from torchpact.engines.base import Unsupported
from torchpact.specs.blocks import BlockSpec, Bounds
from torchpact.specs.heads import CriterionHead, HeadSpec, LinearHead, NeverHead, RowHead

FEW = 128
"""The most rows whose logits take less time in single precision than in bfloat16: 32×384 took 4 and 14 µs."""


class Decisions:
    """The decisions of one call of a run of layers.

    Args:
        spec: The run; its mode is a hard one.
        real: False for padding, (batch, length); None where there is none.
        bounds: What logits must exceed in thresholded mode, for each head; None is what the spec says.
        shape: Batch and length.
        device: Where the tokens are.
        scope: What criteria are asked about; see :func:`~torchpact.engines.attention.criteria.scope_of`.

    """

    def __init__(
        self,
        spec: BlockSpec,
        real: Tensor | None,
        bounds: Bounds,
        shape: tuple[int, int],
        device: torch.device,
        scope: Scope = "batch",
    ) -> None:
        self.spec, self.real, self.shape, self.device = spec, real, shape, device
        self.adaptive = bool(spec.heads)
        if bounds is None and isinstance(spec.mode, Thresholded):
            bounds = spec.bounds
        by_row = all(isinstance(head, LinearHead | RowHead) for head in spec.heads)  # have +∞ already
        self._loop = HaltingLoop.start(
            spec.mode,
            len(spec.steps) if self.adaptive else 1,
            bounds=bounds if self.adaptive else None,
            may_stop=not by_row,
            keeps_logits=spec.keeps_details,
        )
        self._bounds: Sequence[float] | None = None
        if by_row and isinstance(spec.mode, Thresholded):
            self._bounds = self._loop.rules.bounds or [spec.mode.bound] * len(spec.heads)
        self._unchanged = 0  # decisions at which no position halted, which the loop is yet to be told of
        if not self.adaptive:
            self._loop, _ = decide(self._loop, torch.zeros(*shape, 1, device=device))
        self._open: int | None = None  # positions that have not halted
        weights = None if real is None or not spec.has_criteria else real.unsqueeze(2).float()
        self._asking = Asking(scope, weights, shape)

    def after(
        self, index: int, u: Tensor, moved: Tensor, rows: Tensor | None, before: Tensor, own: Tensor
    ) -> Tensor | None:
        """Decide after a layer; return which tokens are active, (batch, length), or None if all still are.

        Args:
            index: The number of the layer.
            u: The state after it.
            moved: The tokens that it computed.
            rows: Which these are; None for all.
            before: The state before it, for criteria.
            own: The tokens before it.

        """
        head = self.spec.heads[index]
        found = None
        if isinstance(head, LinearHead | RowHead):
            found = _of_rows(head, moved)
            known = self._bounds is not None and self._loop.gate is not None
            if known and not bool(exceeds(found, self._bounds[index]).any()):  # type: ignore[index]
                if self.spec.keeps_details:
                    self._loop = go_on(self._loop, self._logits(head, u, found, rows))
                else:
                    self._unchanged += 1
                return None
        elif isinstance(head, CriterionHead):
            found = self._asking.logits(head.module, index, before, u, own, moved, rows)
        self._catch_up()
        self._loop, _ = decide(self._loop, self._logits(head, u, found, rows))
        gate = self._loop.gate
        assert gate is not None
        count = int(torch.count_nonzero(gate))
        if count == (gate.numel() if self._open is None else self._open):
            return None  # positions never come back
        self._open = count
        active = (gate > 0).squeeze(2).expand(self.shape)
        return active if self.real is None else active & self.real

    def end(self) -> None:
        """Draw the noise of the layers that no token runs."""
        self._catch_up()
        self._loop.draw_the_rest()

    def _catch_up(self) -> None:
        """Tell the loop of the decisions at which no position halted."""
        if self._unchanged:
            self._loop, self._unchanged = go_on(self._loop, steps=self._unchanged), 0

    def ponder(self) -> Ponder:
        """Return what every position did; padding weighs 0.

        Raises:
            ValueError: No layer has run.

        """
        if self._loop.remaining is None:
            raise ValueError("expected at least one layer before the ponder, got none")
        self._catch_up()
        ponder = self._loop.ponder()
        weights = None
        if self.real is not None and ponder.steps.shape[1:] == (self.shape[1], 1):
            weights = self.real.unsqueeze(2).to(ponder.cost.dtype)
        elif self.real is not None and self.spec.hooked:  # one decision an example
            weights = self.real.any(1).view(-1, 1, 1).to(ponder.cost.dtype)
        return ponder._replace(weights=weights, name=self.spec.label, price=self.spec.price)

    def _logits(self, head: HeadSpec, u: Tensor, found: Tensor | None, rows: Tensor | None) -> Tensor:
        """Return the logits of all positions; +∞ for tokens that are not computed."""
        batch, length = self.shape
        like = self._loop.remaining
        if isinstance(head, NeverHead):
            shape = (batch, length, 1) if like is None else like.shape
            return torch.full(shape, -torch.inf, device=self.device)
        if isinstance(head, LinearHead | RowHead):
            assert found is not None
            if rows is not None:
                everything = found.new_full((batch * length, 1), torch.inf)
                found = everything.index_copy_(0, rows, found)
            found = found.view(batch, length, 1)
        else:
            found = at_least_single(self._asked(head.module, u) if found is None else found)
            if found.shape not in ((batch, length, 1), (batch, 1, 1)):
                raise Unsupported(f"expected a logit a token or an example, got {tuple(found.shape)}")
            if self.real is not None and found.size(1) == length:
                found = torch.where(self.real.unsqueeze(2), found, torch.inf)
        if like is not None and found.shape != like.shape:
            if found.size(1) != 1:
                raise Unsupported("expected one decision an example of all heads, got one a token")
            found = found.expand(like.shape)
        return found

    def _asked(self, head: Callable[..., Tensor], u: Tensor) -> Tensor:
        if not isinstance(head, PoolingHead):
            return head(u)
        found: Tensor = head(u, None if self.real is None else self.real.unsqueeze(2).to(u.dtype))
        return found


def _of_rows(head: LinearHead | RowHead, rows: Tensor) -> Tensor:
    """Return the logits of rows, (rows, 1), in single precision at least."""
    x = rows.to(head.weight.dtype)
    if isinstance(head, RowHead) and head.normalized:
        x = F.layer_norm(x, (x.size(-1),))
    if len(x) <= FEW and x.dtype == torch.bfloat16:
        return F.linear(x.float(), head.weight.float(), None if head.bias is None else head.bias.float())
    return at_least_single(F.linear(x, head.weight, head.bias))
