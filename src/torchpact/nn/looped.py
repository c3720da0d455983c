"""Looped: networks that embed an input, repeat one step until they halt, and read the answer out."""

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from torchpact.checks import check_choice
from torchpact.core import state
from torchpact.core.block import AdaptiveBlock
from torchpact.core.callables import as_module
from torchpact.core.criterion import Criterion
from torchpact.core.modes import Mode, as_mode
from torchpact.core.ponder import Ponder
from torchpact.core.state import State
from torchpact.core.thresholds import Thresholds
from torchpact.nn.loop_updates import LoopCriterion, LoopHead, LoopStep


class Looped(nn.Module):
    """A looped network: embed, then one step up to L times, then a read-out that serves every exit.

    Every step is told the input as embedded, e, and the state is normalised after each update. It begins at
    zero. See :class:`~torchpact.nn.loop_updates.LoopStep` for what a step is.

    Args:
        embed: What the network is called with → e, a tensor of the state's shape.
        update: f(u, told) → u, such as :class:`~torchpact.nn.ConvUpdate` or
            :class:`~torchpact.nn.AttentionUpdate`: a module with ``width``, the number of features, and
            ``features``, the dimension that they are along.
        readout: The state, or the second of a pair, → the output.
        max_steps: L in training, and by default; a call may take more or fewer.
        halting: The head; by default one that is linear in features, see ``per``. Of a criterion ``per`` is
            its own; its read-out is given what ``readout`` is given, with the classes along the dimension of
            the features.
        per: Whether each "example" or each "position" decides when to halt.
        bias: The halting logit to begin with, of the default head.
        pair: Whether the state is a pair (z, y), as in tiny recursive models.
        inner: Updates of u, or of z, in a cycle.
        outer: Cycles in a step, of which the last has gradients.
        detach: Whether steps pass no gradient to those before, so that each exit trains its own step only
            (deep supervision).
        freeze: Whether positions that have halted keep their state while others go on.
        mode: What decides; by default relaxed in training and thresholded in evaluation.
        name: What its block is called in ponders and thresholds.

    Raises:
        TypeError: Something is not callable.
        ValueError: A number or choice is not one.

    Example:
        >>> net = tp.nn.Looped(
        ...     embed=nn.Sequential(nn.Embedding(3, 16), nn.Flatten(2)),
        ...     update=tp.nn.AttentionUpdate(16), readout=nn.Linear(16, 2), max_steps=8,
        ... ).eval()
        >>> output, ponder = net(torch.randint(3, (4, 10)))
        >>> output.shape, ponder.steps.shape
        (torch.Size([4, 10, 2]), torch.Size([4, 1, 1]))
        >>> output, ponder = net(torch.randint(3, (4, 10)), max_steps=20)  # more than in training
        >>> len(ponder.probs)
        20

    """

    def __init__(
        self,
        embed: Callable[..., Tensor],
        update: nn.Module,
        readout: Callable[[Tensor], Any],
        *,
        max_steps: int,
        halting: Callable[..., Tensor] | None = None,
        per: Literal["example", "position"] = "example",
        bias: float = -3.0,
        pair: bool = False,
        inner: int = 1,
        outer: int = 1,
        detach: bool = False,
        freeze: bool = False,
        mode: Mode | str | None = None,
        name: str = "block",
    ) -> None:
        super().__init__()
        check_choice("per", per, ("example", "position"))
        self.embed, self.readout, self.pair = as_module(embed), as_module(readout), pair
        if not isinstance(update, nn.Module):
            raise TypeError(f"expected an update as a module, got a {type(update).__name__}")
        along, width = getattr(update, "features", None), getattr(update, "width", None)
        if not isinstance(along, int) or not isinstance(width, int):
            raise TypeError("expected an update with whole numbers `width` and `features`, got one without")
        step = LoopStep(update, pair, inner, outer, detach, freeze)
        head = LoopHead(width, along, per, bias) if halting is None else halting
        if isinstance(head, Criterion) and not isinstance(head, LoopCriterion):
            head = LoopCriterion(head, along)
        self.block = AdaptiveBlock(step, head, max_steps=max_steps, name=name)
        self.block.mode = None if mode is None else as_mode(mode)  # type: ignore[assignment]

    def begin(self, *inputs: Any, **named: Any) -> tuple[State, tuple[Tensor]]:
        """Return the state to begin with, and what every step is told."""
        told: Tensor = self.embed(*inputs, **named)
        u = torch.zeros_like(told)
        return ((u, torch.zeros_like(told)) if self.pair else u), (told,)

    def read(self, u: State) -> Any:
        """Return the output that a state stands for."""
        return self.readout(state.parts(u)[-1])

    def forward(
        self,
        *inputs: Any,
        mode: Mode | str | None = None,
        thresholds: Thresholds | float | None = None,
        weights: Tensor | None = None,
        exits: bool = False,
        max_steps: int | None = None,
        **named: Any,
    ) -> tuple[Any, Ponder]:
        """Run the network.

        Args:
            inputs: What ``embed`` is called with.
            mode: See :class:`~torchpact.AdaptiveBlock`, as for those that follow.
            thresholds: What halts in this run.
            weights: How much each position counts.
            exits: Whether the ponder has the states after all steps; ``read`` turns them into outputs.
            max_steps: L of this run.
            named: Goes to ``embed`` by name.

        Returns:
            The output, and what every position did.

        """
        u, context = self.begin(*inputs, **named)
        output, ponder = self.block(
            u, *context, mode=mode, thresholds=thresholds, weights=weights, exits=exits, max_steps=max_steps
        )
        return self.read(output), ponder
