"""Losses to train looped networks by: of one exit, of all exits, and of halting."""

from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from torchpact.checks import check_choice
from torchpact.core import state
from torchpact.core.call_args import call_args
from torchpact.core.criterion import Exit
from torchpact.core.exit_objectives import advantage_loss, exact_loss
from torchpact.core.modes import Relaxed
from torchpact.core.objective import map_loss
from torchpact.core.ponder import mean_over_batch, mean_over_positions
from torchpact.core.thresholds import Thresholds
from torchpact.nn.looped import Looped

Objective = Literal["fixed", "random", "every", "relaxed", "exact", "advantage", "correct"]
_NEVER = Thresholds("never")


def loop_loss(
    net: Looped,
    inputs: Any,
    loss: Callable[[Any], Tensor],
    objective: Objective = "every",
    *,
    tau: float = 0.0,
    right: Callable[[Any], Tensor] | None = None,
    weights: Tensor | None = None,
    max_steps: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Return a loss of a looped network on a batch.

    ============  ==========================================================================================
    "fixed"       the loss after L steps; heads are not trained, as in the next two
    "random"      the loss after n + k steps, of which the last k have gradients; n + k from 1 to L, at random
                  (progressive training of deep-thinking networks)
    "every"       the mean loss of all exits
    "relaxed"     the paper's: the loss of the relaxed output, and τ·N (``map_loss``)
    "exact"       the expected loss of all exits, and τ·N (``exact_loss``)
    "advantage"   "every", and heads learn whether going on is worth its price (``advantage_loss``); their
                  gradient ends at the state
    "correct"     "every", and heads learn by cross-entropy whether the output is ``right`` (as in HRM, TRM)
    ============  ==========================================================================================

    Args:
        net: The network; with ``detach`` each exit trains its own step only.
        inputs: What it is called with: a mapping by name, a tuple by position, or the only argument.
        loss: Tells the losses of an output, (batch,) or those of positions, (batch, …).
        objective: See above.
        tau: The price of a step; for "relaxed", "exact" and "advantage".
        right: Tells whether an output is right, true or false for each decision; for "correct".
        weights: How much each position counts, see :class:`~torchpact.AdaptiveBlock`.
        max_steps: L of this run.
        generator: Draws the number of steps; for "random".

    Returns:
        A scalar.

    Raises:
        TypeError: ``right`` is missing.
        ValueError: The objective is not known, or losses have another shape.

    Example:
        >>> net = tp.nn.Looped(nn.Identity(), tp.nn.ConvUpdate(8), nn.Conv1d(8, 2, 1), max_steps=4)
        >>> inputs, targets = torch.randn(6, 8, 5), torch.randint(2, (6, 5))
        >>> losses = lambda output: nn.functional.cross_entropy(output, targets, reduction="none")
        >>> tp.nn.loop_loss(net, inputs, losses, "exact", tau=0.01).backward()

    """
    check_choice("objective", objective, get_args(Objective))
    if objective == "correct" and right is None:
        raise TypeError("expected right, which tells whether an output is, for objective='correct'; got None")
    call = call_args(inputs)
    count = net.block.steps_of_run(max_steps)
    if objective == "relaxed":
        mode = net.block.present_mode
        mode = mode if isinstance(mode, Relaxed) else Relaxed()
        output, ponder = net(*call.args, **call.kwargs, mode=mode, weights=weights, max_steps=count)
        return map_loss(mean_over_positions(loss(output), _of(loss(output), weights)), ponder, tau)
    if objective in ("fixed", "random"):
        output = _after(net, call, count, generator if objective == "random" else False, weights)
        losses = loss(output)
        return mean_over_batch(losses, _of(losses, weights))
    _, ponder = net(
        *call.args,
        **call.kwargs,
        mode="thresholded",
        thresholds=_NEVER,
        weights=weights,
        exits=True,
        max_steps=count,
    )
    exits = ponder.exits
    assert exits is not None
    outputs = [net.read(u) for u in exits.states]
    losses = torch.stack([loss(output) for output in outputs])
    if objective == "exact":
        return exact_loss(losses, exits.logits, tau, weights)
    own = _of(losses[0], weights)
    total = torch.stack([mean_over_batch(each, own) for each in losses]).mean()
    if objective == "advantage":
        alone = [state.map_state(torch.Tensor.detach, u) for u in exits.states]
        asked = [net.block.ask(Exit(u, u, n, weights))[0] for n, u in enumerate(alone[:-1])]
        logits = torch.stack([*asked, exits.logits[-1]])
        total = total + advantage_loss(losses, logits, tau, weights)
    if objective == "correct":
        assert right is not None
        for output, logits in zip(outputs[:-1], exits.logits, strict=False):
            target = right(output).to(logits.dtype).reshape(logits.shape)
            found = binary_cross_entropy_with_logits(logits, target, reduction="none")
            total = total + mean_over_batch(found, weights) / (count - 1)
    return total


def _after(
    net: Looped,
    call: Any,
    count: int,
    random: torch.Generator | Literal[False] | None,
    weights: Tensor | None,
) -> Any:
    """Return the output after all steps or, at random, after some, the first of them without gradients."""
    u, context = net.begin(*call.args, **call.kwargs)
    if random is not False:
        total = int(torch.randint(1, count + 1, (), generator=random))
        count = int(torch.randint(1, total + 1, (), generator=random))
        if total > count:
            with torch.no_grad():
                u = _run(net, u, context, total - count, weights)
    return net.read(_run(net, u, context, count, weights))


def _run(net: Looped, u: state.State, context: tuple[Tensor], count: int, weights: Tensor | None) -> Any:
    output, _ = net.block(
        u, *context, mode="thresholded", thresholds=_NEVER, max_steps=count, weights=weights
    )
    return output


def _of(losses: Tensor, weights: Tensor | None) -> Tensor | None:
    """Return the weights of positions that losses have, without the dimension of features."""
    if weights is None or losses.dim() == 1:
        return None
    return weights.reshape(losses.shape)
