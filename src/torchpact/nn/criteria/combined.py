"""Several criteria as one."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from torchpact.checks import check_number
from torchpact.core.criterion import Criterion, Exit, Memory, asked
from torchpact.core.layer_run import Per

LARGEST = 20.0
"""What a learned combination clamps logits to, so that infinite ones have a gradient and a weight."""


class Combined(Criterion):
    """Several criteria as one: any of them, all of them, or a learned sum.

    "any" is the largest of ``logits − bounds``, "all" is the smallest: with ``use_thresholds(net, 0.5)``, a
    logit of 0, a position halts where any (all) of the criteria exceed their bounds. "learned" is
    Σ w·logits + b with the logits clamped to ±20; w starts at 0 and b at ``bias``, so that it is trained as a
    linear head, on what the criteria see. Give it a :class:`Linear`, too, for one that sees the state: the w
    of learned criteria starts at 0.1, since one that starts at 0 as well would never learn.

    Args:
        criteria: At least one; all decide for the same, positions or examples.
        how: "any", "all" or "learned".
        bounds: What is taken off each criterion's logits; by default 0.
        bias: b at the start.

    Raises:
        TypeError: One is no criterion.
        ValueError: There is none, ``how`` is something else, or there are not as many bounds.

    Example:
        >>> read = lambda u: u
        >>> sure, still = tp.criteria.Confidence(read), tp.criteria.LatentChange()
        >>> both = Combined([sure, still], "all", bounds=[0.0, 2.0])
        >>> block = tp.AdaptiveBlock(lambda u: u / 2, both, max_steps=4, mode="thresholded")
        >>> block(torch.randn(3, 2), thresholds=0.5)[1].steps.flatten()  # each step halves the state
        tensor([4, 4, 4])

    """

    def __init__(
        self,
        criteria: Sequence[Criterion],
        how: Literal["any", "all", "learned"] = "any",
        *,
        bounds: Sequence[float] | None = None,
        bias: float = -5.0,
    ) -> None:
        super().__init__()
        wrong = [each for each in criteria if not isinstance(each, Criterion)]
        if wrong or not len(criteria):
            given = f"a {type(wrong[0]).__name__}" if wrong else "none"
            raise (TypeError if wrong else ValueError)(f"expected one or more criteria, got {given}")
        if how not in ("any", "all", "learned"):
            raise ValueError(f"expected how='any', 'all' or 'learned', got {how!r}")
        offsets = [0.0] * len(criteria) if bounds is None else [*bounds]
        if len(offsets) != len(criteria):
            raise ValueError(f"expected {len(criteria)} bounds for as many criteria, got {len(offsets)}")
        self.bounds = tuple(check_number("a bound", x, open_low=True, open_high=True) for x in offsets)
        self.criteria, self.how = nn.ModuleList(criteria), how
        self.start = check_number("bias", bias, open_low=True, open_high=True)
        self.learned = how == "learned" or any(each.learned for each in criteria)
        self.needs_context = any(each.needs_context for each in criteria)
        self.settings = {"how": how, "bounds": [*self.bounds], "bias": self.start}
        if how == "learned":
            # the gradient of a learned part is w times its own, and that of w its logit: not both may be 0
            self.weight = nn.Parameter(torch.tensor([0.1 * each.learned for each in criteria]))
            self.bias = nn.Parameter(torch.tensor(self.start))

    def place(self, net: nn.Module, per: Per | None, width: int) -> None:
        """See :meth:`Criterion.place`."""
        for each in self.criteria:
            assert isinstance(each, Criterion)
            each.place(net, per, width)

    def forward(self, exit: Exit) -> tuple[Tensor, Memory]:
        """Return the logits, and the memories of all criteria."""
        parts = exit.memory if isinstance(exit.memory, tuple) else (None,) * len(self.criteria)
        found: list[Tensor] = []
        memories: list[Memory] = []
        for each, bound, memory in zip(self.criteria, self.bounds, parts, strict=True):
            logits, kept = asked(each, exit._replace(memory=memory))
            if found and logits.shape != found[0].shape:
                raise ValueError(
                    f"expected criteria that decide for the same, got logits of {tuple(logits.shape)} beside "
                    f"{tuple(found[0].shape)}"
                )
            found.append(logits - bound)
            memories.append(kept)
        stacked = torch.stack(found)
        if self.how == "learned":
            seen = stacked.clamp(-LARGEST, LARGEST).to(self.weight.dtype).movedim(0, -1)
            return seen @ self.weight + self.bias, tuple(memories)
        return stacked.amax(0) if self.how == "any" else stacked.amin(0), tuple(memories)
