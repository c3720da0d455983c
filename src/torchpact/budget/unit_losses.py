"""Losses and confidences of units, which are examples or positions, kept beside the score of a run."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchpact.budget.heldout import HeldOut
from torchpact.budget.scores import main_tensor, similarity
from torchpact.core.ponder import mean_over_positions

Loss = Callable[[Any, Any], Tensor]
"""The output of the network and the batch → a loss for each example, or for each of its positions."""

_KEPT = 2**28
"""How many numbers of full outputs may be kept to compare others with."""


class Item(NamedTuple):
    """A batch and its number."""

    number: int
    batch: Any


class UnitLosses:
    """A score that keeps what it sees: losses of units and confidences, batch by batch.

    Args:
        loss: Of the output and the batch; None is the difference to the full output.
        logits: Whether the output is class logits; None asks for its name.

    """

    def __init__(self, loss: Loss | None, logits: bool | None) -> None:
        self.loss, self.logits, self.held = loss, logits, None
        self.fulls: list[Any] = []
        self.real: list[Tensor] = []
        self.losses: list[Tensor] = []
        self.sure: list[Tensor] = []
        self.full = False

    held: HeldOut | None

    def __call__(self, output: Any, item: Item) -> Tensor:
        """Return minus the mean loss of each example, and keep those of its units."""
        main, named = main_tensor(output)
        named = named if self.logits is None else self.logits
        found = self._loss({"logits": main} if named else main, output, item).detach()
        if found.dim() not in (1, 2) or len(found) != len(main):
            raise ValueError(
                f"expected a loss of each of {len(main)} examples, or of each of their positions, got shape "
                f"{tuple(found.shape)}"
            )
        found = found.float().cpu()
        if self.full:
            self.real.append(~found.isnan() if found.dim() > 1 else torch.ones(len(found), dtype=torch.bool))
        real = self.real[item.number]
        if not found[real].isfinite().all():
            raise ValueError("expected finite losses, got some that are not")
        self.losses.append(found[real])
        if named:
            p = main.float().log_softmax(-1).amax(-1).exp().cpu()
            if found.dim() == 1:
                assert self.held is not None
                weights = self.held.weights[item.number]
                same = p.dim() > 1 and weights is not None and weights.shape[:2] == p.shape[:2]
                rows = weights.reshape(weights.shape[:2]).cpu() if same and weights is not None else None
                p = mean_over_positions(p, rows)
            else:
                p = p[:, : found.size(1)]
            self.sure.append(p[real].logit(1e-6))
        if found.dim() == 1:
            return -found
        return -mean_over_positions(found.nan_to_num(0.0), real.float())

    def _loss(self, main: Any, output: Any, item: Item) -> Tensor:
        if self.loss is not None:
            return torch.as_tensor(self.loss(output, item.batch))
        tensor = main_tensor(main)[0]
        if self.full:
            self.fulls.append(main)
            if sum(main_tensor(each)[0].numel() for each in self.fulls) > _KEPT:
                raise ValueError(
                    f"expected a loss for outputs of shape {tuple(tensor.shape)}, too many to keep and "
                    "compare with: pass loss="
                )
        assert self.held is not None
        return -similarity(main, self.fulls[item.number], self.held.weights[item.number])

    def taken(self) -> tuple[Tensor, Tensor | None]:
        """Return losses and confidences of units since the last time."""
        losses, sure = torch.cat(self.losses), torch.cat(self.sure) if self.sure else None
        self.losses, self.sure, self.full = [], [], False
        return losses, sure
