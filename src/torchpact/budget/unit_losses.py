"""Losses and confidences of units, which are examples or positions."""

from collections.abc import Callable, Sequence
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


class Units(NamedTuple):
    """What an output is worth for n units; of L outputs both are (L, n)."""

    losses: Tensor
    """(n,)."""
    sure: Tensor | None
    """Confidences, as logits, (n,); None without class logits."""


def joined(units: Sequence[Units], join: Callable[[list[Tensor]], Tensor]) -> Units:
    """Return units joined, as by ``torch.stack``.

    Args:
        units: At least one.
        join: What makes one tensor of several.

    """
    sure = [each.sure for each in units if each.sure is not None]
    return Units(join([each.losses for each in units]), join(sure) if sure else None)


class UnitLosses:
    """Gives losses and confidences of units, batch by batch; of each batch first those where nothing halts.

    Args:
        held: The batches.
        loss: Of the output and the batch; None is the difference to the full output.
        logits: Whether the output is class logits; None asks for its name.

    """

    def __init__(self, held: HeldOut, loss: Loss | None, logits: bool | None) -> None:
        self.held, self.loss, self.logits = held, loss, logits
        self.fulls: list[Any] = []
        self.real: list[Tensor] = []
        """Which units have a loss, for each batch, (batch,) or (batch, length)."""

    def __call__(self, output: Any, number: int) -> Units:
        """Return what an output is worth.

        Args:
            output: What the network returned.
            number: Of the batch.

        Raises:
            ValueError: Losses are not finite numbers of examples or positions.

        """
        main, named = main_tensor(output)
        named = named if self.logits is None else self.logits
        found = self._loss({"logits": main} if named else main, output, number).detach()
        if found.dim() not in (1, 2) or len(found) != len(main):
            raise ValueError(
                f"expected a loss of each of {len(main)} examples, or of each of their positions, got shape "
                f"{tuple(found.shape)}"
            )
        found = found.float().cpu()
        if number == len(self.real):
            self.real.append(~found.isnan() if found.dim() > 1 else torch.ones(len(found), dtype=torch.bool))
        real = self.real[number]
        if not found[real].isfinite().all():
            raise ValueError("expected finite losses, got some that are not")
        sure = None
        if named:
            p = main.float().log_softmax(-1).amax(-1).exp().cpu()
            if found.dim() == 1:
                weights = self.held.weights[number]
                same = p.dim() > 1 and weights is not None and weights.shape[:2] == p.shape[:2]
                rows = weights.reshape(weights.shape[:2]).cpu() if same and weights is not None else None
                p = mean_over_positions(p, rows)
            else:
                p = p[:, : found.size(1)]
            sure = p[real].logit(1e-6)
        return Units(found[real], sure)

    def _loss(self, main: Any, output: Any, number: int) -> Tensor:
        if self.loss is not None:
            return torch.as_tensor(self.loss(output, self.held.batches[number]))
        tensor = main_tensor(main)[0]
        if number == len(self.fulls):
            self.fulls.append(main)
            if sum(main_tensor(each)[0].numel() for each in self.fulls) > _KEPT:
                raise ValueError(
                    f"expected a loss for outputs of shape {tuple(tensor.shape)}, too many to keep and "
                    "compare with: pass loss="
                )
        return -similarity(main, self.fulls[number], self.held.weights[number])
