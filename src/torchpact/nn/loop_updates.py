"""What a looped network repeats: updates of a state that is told something, and the steps made of them."""

from contextlib import nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu

from torchpact.checks import check_choice, check_count
from torchpact.core import state
from torchpact.core.criterion import Criterion, Exit, Memory, asked
from torchpact.core.state import State
from torchpact.nn.criteria.base import ReadoutCriterion
from torchpact.nn.transformer import TransformerUnit


class ConvUpdate(nn.Module):
    """A residual update by two convolutions: u + out(gelu(into(u) + recall(told))).

    Args:
        width: The channels of the state.
        dims: 1 for sequences (batch, width, length), 2 for maps (batch, width, height, w).
        kernel: The size of the convolutions, odd.

    Raises:
        ValueError: A number is not as said.

    Example:
        >>> ConvUpdate(8)(torch.zeros(2, 8, 5), torch.randn(2, 8, 5)).shape
        torch.Size([2, 8, 5])

    """

    features = 1

    def __init__(self, width: int, *, dims: Literal[1, 2] = 1, kernel: int = 3) -> None:
        super().__init__()
        check_count("dims", dims, maximum=2)
        if check_count("kernel", kernel) % 2 == 0:
            raise ValueError(f"expected an odd kernel, got {kernel}")
        conv: Any = nn.Conv1d if dims == 1 else nn.Conv2d
        self.width = check_count("width", width)
        self.recall = conv(width, width, kernel, padding=kernel // 2, bias=False)
        self.into = conv(width, width, kernel, padding=kernel // 2)
        self.out = conv(width, width, kernel, padding=kernel // 2)

    def forward(self, u: Tensor, told: Tensor) -> Tensor:
        """Return the state after the update, given what it is told."""
        moved: Tensor = u + self.out(gelu(self.into(u) + self.recall(told)))
        return moved


class AttentionUpdate(nn.Module):
    """A layer of attention and an MLP on u + told, tokens of shape (batch, length, width).

    Args:
        width: The features of a token.
        heads: Attention heads.
        hidden: Of the MLP; by default four times the width.

    Example:
        >>> AttentionUpdate(8, heads=2)(torch.zeros(2, 5, 8), torch.randn(2, 5, 8)).shape
        torch.Size([2, 5, 8])

    """

    features = -1

    def __init__(self, width: int, heads: int = 4, hidden: int | None = None) -> None:
        super().__init__()
        self.width = check_count("width", width)
        self.unit = TransformerUnit(width, heads, hidden)

    def forward(self, u: Tensor, told: Tensor) -> Tensor:
        """Return the state after the update, given what it is told."""
        moved: Tensor = self.unit(u + told)
        return moved


class LoopStep(nn.Module):
    """A step of a looped network: cycles of updates of a state, each told the input and then normalised.

    Of one state u, a cycle is ``inner`` updates u ← norm(f(u, e)). Of a pair (z, y) it is ``inner`` updates
    z ← norm(f(z, y + e)) and then y ← norm(f(y, z)), with the same f, as in tiny recursive models. The norm
    divides by the root mean square of features.

    Args:
        update: f, called with a state and what it is told.
        pair: Whether the state is a pair.
        inner: Updates in a cycle.
        outer: Cycles in a step; only the last of them has gradients.
        detach: Whether a step passes no gradient to those before it.
        freeze: Whether positions that have halted keep their state while others go on.

    """

    def __init__(
        self, update: nn.Module, pair: bool, inner: int, outer: int, detach: bool, freeze: bool
    ) -> None:
        super().__init__()
        self.update, self.pair, self.detach, self.gated = update, pair, detach, freeze
        self.inner, self.outer = check_count("inner", inner), check_count("outer", outer)

    def extra_repr(self) -> str:
        """Return the settings for ``print``."""
        return f"pair={self.pair}, inner={self.inner}, outer={self.outer}, detach={self.detach}"

    def forward(self, u: State, told: Tensor, gate: Tensor | None = None) -> State:
        """Return the state after the step.

        Args:
            u: The state, or a pair of them.
            told: The input, as embedded.
            gate: Which positions are active, if others are to be frozen.

        """
        before = u
        if self.detach:
            u = state.map_state(torch.Tensor.detach, u)
        for cycle in range(self.outer):
            with nullcontext() if cycle + 1 == self.outer else torch.no_grad():
                u = self._cycle(u, told)
        if gate is None:
            return u
        # exact at both ends
        return state.map_state(lambda old, new: torch.lerp(old, new, gate.expand_as(new)), before, u)

    def _cycle(self, u: State, told: Tensor) -> State:
        if isinstance(u, Tensor):
            for _ in range(self.inner):
                u = self._updated(u, told)
            return u
        z, y = u
        for _ in range(self.inner):
            z = self._updated(z, y + told)
        return z, self._updated(y, z)

    def _updated(self, u: Tensor, told: Tensor) -> Tensor:
        moved: Tensor = self.update(u, told)
        along: int = self.update.features  # type: ignore[assignment]
        return moved * (moved.square().mean(along, keepdim=True) + 1e-6).rsqrt()


class LoopHead(nn.Module):
    """Halting logits that are linear in features, per position or per example.

    Per example it looks at the mean, the largest and the smallest of each feature over positions. Weights
    start at zero. Of a pair of states it sees the second.

    Args:
        width: The features.
        along: Their dimension.
        per: "example" or "position".
        bias: The logit to begin with.

    """

    def __init__(self, width: int, along: int, per: str, bias: float) -> None:
        super().__init__()
        check_choice("per", per, ("example", "position"))
        self.along, self.per = along, per
        self.linear = nn.Linear(width if per == "position" else 3 * width, 1)
        nn.init.zeros_(self.linear.weight)
        nn.init.constant_(self.linear.bias, bias)

    def forward(self, u: State) -> Tensor:
        """Return the logits, with as many dimensions as the state."""
        last = state.parts(u)[-1].movedim(self.along, -1)
        if self.per == "position":
            logits: Tensor = self.linear(last).movedim(-1, self.along)
            return logits
        flat = last.flatten(1, -2) if last.dim() > 2 else last.unsqueeze(1)
        seen = torch.cat([flat.mean(1), flat.amax(1), flat.amin(1)], 1)
        found: Tensor = self.linear(seen)
        return found.view(state.per_example(last))


class LoopCriterion(Criterion):
    """A criterion in a looped network: it sees the state that is read out, in a layout that criteria know.

    Of a pair of states that is the second. A sequence with its features along dimension 1, (batch, width,
    length), is shown as a map of one row, (batch, width, 1, length), and given to read-outs as it is.

    Args:
        criterion: The criterion.
        along: The dimension of the features.

    """

    def __init__(self, criterion: Criterion, along: int) -> None:
        super().__init__()
        self.criterion, self.along = criterion, along
        self.learned, self.needs_context = criterion.learned, criterion.needs_context
        self.readouts = [each for each in criterion.modules() if isinstance(each, ReadoutCriterion)]

    def forward(self, exit: Exit) -> tuple[Tensor, Memory]:
        """Return the logits, with as many dimensions as the state, and the memory."""
        u, before = (state.parts(each)[-1] for each in (exit.state, exit.before))
        one_row = self.along == 1 and u.dim() == 3
        for each in self.readouts:
            each.one_row = one_row
        if not one_row:
            return asked(self.criterion, exit._replace(state=u, before=before))
        weights = None if exit.weights is None else exit.weights.unsqueeze(2)
        shown = exit._replace(state=u.unsqueeze(2), before=before.unsqueeze(2), weights=weights)
        logits, memory = asked(self.criterion, shown)
        return logits.squeeze(2), memory
