"""Objectives of the losses after every exit: nothing is sampled, one forward pass serves all depths.

They are for one block of plain steps: a state does not depend on which positions have halted, so that the
loss of a position at an exit is known, and positions are independent.
"""

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from torchpact.checks import at_least_single, check_choice, check_logits
from torchpact.core.halting import iteration_index, log_stick_breaking_of
from torchpact.core.objective import prices
from torchpact.core.ponder import mean_over_batch, mean_over_positions


def exact_loss(losses: Tensor, logits: Tensor, tau: float | Tensor, weights: Tensor | None = None) -> Tensor:
    """Return E_q[loss_z + τ·z] = Σ_l q(z = l)·loss_l + τ·N, a mean over examples (eq. 25, summed out).

    It is the expectation that :func:`map_loss` and :func:`reinforce_loss` estimate by samples, for one block
    of plain steps: no bias, and no variance but that of the batch. Both the halting logits and the losses may
    carry gradient; the latter is weighted by q(z = l), so that exits learn as often as they are taken.

    The gradient of a logit is P(z ≥ l)·h_l·(1 − h_l)·(loss_l − cost of going on), which vanishes where h is
    near 0 or 1; :func:`advantage_loss` points in the same direction, and does not.

    Cost: one forward pass of all L steps, and the read-out and loss of every exit.

    Args:
        losses: Of every position after each step, (L, batch, …), of the shape of ``logits`` up to
            dimensions of size 1. Where there is one decision an example, losses may have more
            positions, such as tokens: their mean counts.
        logits: Those of the halting probabilities, (L, batch, …); the last is not read.
        tau: The price of a step.
        weights: How much each position counts, such as an attention mask; 0 for padding, which may be NaN.

    Returns:
        A scalar, in single precision or better.

    Raises:
        TypeError: Something is not a tensor.
        ValueError: Shapes do not fit, a logit is NaN, or the price is negative or not finite.

    Example:
        >>> losses, logits = torch.tensor([[1.0], [0.0]]), torch.zeros(2, 1)
        >>> exact_loss(losses, logits, tau=0.1)  # half of the time 1 and a step, or 0 and two steps
        tensor(0.6500)

    """
    losses, logits, weights = _aligned(losses, logits, weights)
    price = prices(tau, 1)[0]
    costs = losses + price * iteration_index(len(losses), losses[0]).to(losses.dtype)
    return mean_over_batch((log_stick_breaking_of(logits, 0).exp() * costs).sum(0), weights)


def advantage_loss(
    losses: Tensor,
    logits: Tensor,
    tau: float | Tensor,
    weights: Tensor | None = None,
    *,
    continuation: str = "hard",
    reach: bool = False,
) -> Tensor:
    """Return the cross-entropy of halting at l if that is better than going on, weighted by how much better.

    The value of going on after step l under the present heads is computed backwards,
    V_l = τ + d_{l+1}·loss_{l+1} + (1 − d_{l+1})·V_{l+1}, with the decision d = [h > ½] and d_L = 1. The
    advantage of halting is a_l = V_l − loss_l, and the objective Σ_l |a_l|·BCE(h_l, [a_l > 0]), a mean over
    examples. Its gradient, |a_l|·(h_l − [a_l > 0]) for a logit, does not vanish at h near 0 where halting
    would be better, as that of :func:`exact_loss` does. Losses, targets and weights carry no gradient: the
    objective is for heads only; train the network by the losses themselves, such as their mean over exits.
    Ties (a_l = 0) weigh nothing.

    This is policy iteration for optimal stopping. A head that sees one state s of several examples settles at
    h = E[a⁺ | s] / E[|a| | s], above ½ where halting is better on average. So a fixed point is a thresholded
    rule that no change of a decision improves: the optimal one, where every state has a logit of its own and
    tells what is to come as well as the whole past does. With ``continuation="soft"``, d = h: V is that
    of sampled heads, and the rule may stay worse than the best.

    Cost: one forward pass of all L steps, and the read-out and loss of every exit, without gradients where
    the network is frozen.

    Args:
        losses: Of every position after each step, as for :func:`exact_loss`.
        logits: Those of the halting probabilities, (L, batch, …); the last is not read. Infinite ones, such
            as those of pinned exits, count in V and are not trained.
        tau: The price of a step.
        weights: How much each position counts; 0 for padding, which may be NaN.
        continuation: Whether going on is judged by the decisions h > ½ ("hard") or by h itself ("soft").
        reach: Whether exits are also weighted by P(z ≥ l), the probability to get there under d. Exits
            behind others that halt then learn nothing.

    Returns:
        A scalar, in single precision or better.

    Raises:
        TypeError: Something is not a tensor.
        ValueError: Shapes do not fit, a logit is NaN, the price is negative or not finite, or the
            continuation is unknown.

    Example:
        >>> losses, logits = torch.tensor([[0.2], [0.0]]), torch.zeros(2, 1, requires_grad=True)
        >>> advantage_loss(losses, logits, tau=0.5).backward()  # halting saves 0.5 and loses 0.2
        >>> logits.grad
        tensor([[-0.1500],
                [ 0.0000]])

    """
    check_choice("continuation", continuation, ("soft", "hard"))
    losses, logits, weights = _aligned(
        losses.detach() if isinstance(losses, Tensor) else losses, logits, weights
    )
    price = prices(tau, 1)[0]
    given = logits.detach()[:-1]
    h = torch.sigmoid(given) if continuation == "soft" else (given > 0).to(given.dtype)
    advantage = continuation_values(losses, h, price) - losses[:-1]
    learned = given.isfinite()
    weight = torch.where(learned, advantage.abs(), torch.zeros_like(advantage))
    if reach:
        weight = weight * torch.cat([torch.ones_like(h[:1]), (1 - h[:-1]).cumprod(0)])
    logits = torch.where(learned, logits[:-1], torch.zeros_like(given))
    cross_entropy = -logsigmoid(torch.where(advantage > 0, logits, -logits))
    return mean_over_batch((weight * cross_entropy).sum(0), weights)


def continuation_values(losses: Tensor, h: Tensor, tau: float | Tensor) -> Tensor:
    """Return E[loss_z + τ·(z − l) | z > l] of every l but the last: what going on costs, under these heads.

    Args:
        losses: Of every position after each step, (L, batch, …).
        h: Halting probabilities, (L − 1, batch, …).
        tau: The price of a step.

    Returns:
        The values, (L − 1, batch, …).

    Example:
        >>> continuation_values(torch.tensor([3.0, 2.0, 1.0]), torch.tensor([0.0, 0.5]), tau=0.1)
        tensor([1.6500, 1.1000])

    """
    values, value = [], losses[-1]
    for index in reversed(range(len(losses) - 1)):
        value = value + tau
        values.append(value)
        value = torch.lerp(value, losses[index], h[index])
    return torch.stack(values[::-1]) if values else losses[:0]


def _aligned(losses: Tensor, logits: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return losses and logits of one shape and the weights of their positions; padding is replaced by 0."""
    for name, x in (("losses", losses), ("logits", logits), ("weights", weights)):
        if not (isinstance(x, Tensor) or (name == "weights" and x is None)):
            raise TypeError(f"expected {name} to be a tensor, got {type(x).__name__}")
    if logits.dim() < 2 or losses.shape[:2] != logits.shape[:2]:
        raise ValueError(
            "expected losses and logits of shape (L, batch, …), "
            f"got {tuple(losses.shape)} and {tuple(logits.shape)}"
        )
    losses, logits = at_least_single(losses), at_least_single(logits)
    if _essential(losses.shape[1:]) == _essential(logits.shape[1:]):
        losses = losses.reshape(logits.shape)
    elif len(_essential(logits.shape[1:])) == 1:  # one decision for all positions of an example
        each = None if weights is None else _like_positions(weights, losses.shape[1:])
        rows = None if each is None else each.expand(losses.shape).flatten(0, 1)
        losses = mean_over_positions(losses.flatten(0, 1), rows).reshape(logits.shape)
        weights = None if each is None else (each != 0).flatten(1).any(1)
    else:
        raise ValueError(
            "expected a loss of every position that decides, or one decision an example; "
            f"got losses {tuple(losses.shape)} and logits {tuple(logits.shape)}"
        )
    if weights is not None:
        weights = _like_positions(weights, logits.shape[1:])
        zero = torch.zeros((), dtype=losses.dtype, device=losses.device)
        losses = torch.where(weights != 0, losses, zero)  # NaN there would reach the gradient, times 0
        logits = torch.where(weights != 0, logits, zero.to(logits.dtype))
    return losses, check_logits("logits", logits, 0), weights


def _essential(positions: torch.Size) -> tuple[int, ...]:
    """Return the sizes of positions without dimensions of size 1, but for the batch."""
    return (positions[0], *(size for size in positions[1:] if size != 1))


def _like_positions(weights: Tensor, positions: torch.Size) -> Tensor:
    """Return weights in the shape of positions."""
    if weights.dim() and _essential(weights.shape) == _essential(positions):
        return weights.reshape(positions)
    if weights.dim() != len(positions) or any(
        w not in (1, size) for w, size in zip(weights.shape, positions, strict=True)
    ):
        raise ValueError(
            f"expected weights that broadcast to positions {tuple(positions)}, got {tuple(weights.shape)}"
        )
    return weights.expand(positions)
