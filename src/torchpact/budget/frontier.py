"""Costs against losses: the convex frontier of fixed exits, and that of an oracle that sees every loss."""

from itertools import pairwise

import torch
from torch import Tensor


def hull(costs: Tensor, losses: Tensor) -> list[int]:
    """Return which points are on the lower convex hull, from the cheapest to that of the least loss.

    Mixtures of the points, chosen at random, reach all that lies on or above it.

    Args:
        costs: (m,).
        losses: (m,).

    Example:
        >>> hull(torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([4.0, 3.5, 0.0, 1.0]))
        [0, 2]

    """
    cost, loss = costs.tolist(), losses.tolist()
    kept: list[int] = []
    for i in sorted(range(len(cost)), key=lambda i: (cost[i], loss[i])):
        if kept and loss[i] >= loss[kept[-1]]:
            continue
        while len(kept) > 1:
            a, b = kept[-2], kept[-1]
            # b is above the line from a to i
            if (loss[b] - loss[a]) * (cost[i] - cost[a]) < (loss[i] - loss[a]) * (cost[b] - cost[a]):
                break
            kept.pop()
        kept.append(i)
    return kept


def oracle(costs: Tensor, losses: Tensor) -> Tensor:
    """Return the convex frontier of all choices of an exit for each example, made in hindsight.

    It is the sum of the hulls of the examples: the steps of all of them, the steepest first. No criterion
    reaches it, since it also picks what is better by chance.

    Args:
        costs: (L, n).
        losses: (L, n).

    Returns:
        Its vertices, mean cost and mean loss, (m, 2), from the cheapest to that of the least loss.

    Example:
        >>> costs = torch.tensor([[1.0], [2.0]]).expand(2, 2)
        >>> oracle(costs, torch.tensor([[4.0, 1.0], [0.0, 1.0]]))
        tensor([[1.0000, 2.5000],
                [1.5000, 0.5000]], dtype=torch.float64)

    """
    costs, losses = costs.double(), losses.double()
    start, steps = torch.zeros(2, dtype=torch.double), []
    for each in range(costs.size(1)):
        own = torch.stack([costs[:, each], losses[:, each]], 1)
        own = own[hull(costs[:, each], losses[:, each])]
        start += own[0]
        steps.append(own.diff(dim=0))
    moves = torch.cat([*steps, torch.zeros(0, 2, dtype=torch.double)])
    moves = moves[(moves[:, 1] / moves[:, 0]).argsort()]
    points = torch.cat([start.unsqueeze(0), start + moves.cumsum(0)]) / max(costs.size(1), 1)
    return points[hull(points[:, 0], points[:, 1])]


def cost_at(points: Tensor, loss: float) -> float:
    """Return what the frontier costs at a loss; below its least loss, and above its largest, that of its end.

    Args:
        points: Costs and losses along the frontier, (m, 2).
        loss: A loss.

    Example:
        >>> cost_at(torch.tensor([[1.0, 4.0], [3.0, 0.0]]), 1.0)
        2.5

    """
    return _between([pair[::-1] for pair in points.tolist()][::-1], loss)


def loss_at(points: Tensor, cost: float) -> float:
    """Return the loss of the frontier at a cost; beyond its ends, that of the end."""
    return _between(points.tolist(), cost)


def _between(pairs: list[list[float]], x: float) -> float:
    """Return y at x between points (x, y) whose x rises."""
    if x <= pairs[0][0]:
        return pairs[0][1]
    for (left, low), (right, high) in pairwise(pairs):
        if x <= right:
            return low + (high - low) * (x - left) / (right - left)
    return pairs[-1][1]
