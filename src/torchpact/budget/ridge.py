"""Ridge regression in closed form: read-outs from states to states, and predictors of one number."""

from typing import NamedTuple

import torch
from torch import Tensor

from torchpact.nn.criteria.base import last

STRENGTHS = tuple(10.0**power for power in range(-6, 2))
"""Of the penalty, relative to the mean square of the features."""

PENALTIES = (0.01, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, float("inf"))
"""Of predictors, for standardised features, relative to the number of rows."""


class Gram(NamedTuple):
    """Sums over rows x, with a one appended, and rows y: all that least squares needs of them."""

    xx: Tensor
    xy: Tensor
    yy: float

    def __add__(self, other: "Gram") -> "Gram":  # type: ignore[override]
        return Gram(self.xx + other.xx, self.xy + other.xy, self.yy + other.yy)


def gram(x: Tensor, y: Tensor) -> Gram:
    """Return the sums of rows.

    Args:
        x: (n, d).
        y: (n, k).

    """
    x, y = x.double(), y.double()
    x = torch.cat([x, x.new_ones(len(x), 1)], 1)
    return Gram(x.T @ x, x.T @ y, float(y.square().sum()))


def solved(sums: Gram, strength: float) -> Tensor:
    """Return the W that minimises ‖[x, 1] W − y‖² + strength · Σx² / d · ‖W without its last row‖².

    Args:
        sums: Of the rows.
        strength: Of the penalty.

    Returns:
        (d + 1, k), the intercept last.

    """
    size = len(sums.xx) - 1
    penalty = torch.ones(size + 1, dtype=torch.double)
    penalty[-1] = 0
    scale = float(sums.xx.diagonal()[:-1].sum()) / size or 1.0
    found: Tensor = torch.linalg.solve(sums.xx + torch.diag(penalty * strength * scale), sums.xy)
    return found


def chosen(one: Gram, other: Gram) -> Tensor:
    """Return weights fitted on all rows, at the strength that is best on the second part after the first.

    Args:
        one: Sums of a part of the rows.
        other: Sums of the others.

    """

    def error(strength: float) -> float:
        w = solved(one, strength)
        return float((w * (other.xx @ w)).sum() - 2 * (w * other.xy).sum())

    best = min(STRENGTHS, key=error) if one.xx[-1, -1] and other.xx[-1, -1] else STRENGTHS[3]
    return solved(one + other, best)


def mapped(u: Tensor, weights: Tensor) -> Tensor:
    """Return the read-out of a state, of any layout: tokens, maps or vectors.

    Args:
        u: The state.
        weights: As :func:`solved` returns them.

    """
    w = weights.to(u)
    found = last(u) @ w[:-1] + w[-1]
    return found.movedim(-1, 1) if u.dim() == 4 else found


class Predictor:
    """Predicts numbers by a linear function of features, fitted in closed form for many targets.

    The strength of the penalty is that of the least leave-one-out error; infinite is among them.

    Args:
        features: (n, d).

    """

    def __init__(self, features: Tensor) -> None:
        x = features.double()
        self.mean, self.std = x.mean(0), x.std(0, correction=0).clamp(min=1e-12)
        self.left, self.values, self.right = torch.linalg.svd(self._scaled(x), full_matrices=False)
        squares = self.values.square().unsqueeze(1)
        # of each direction, for each strength; an infinite one leaves the mean
        self.shrunk = squares / (squares + len(x) * torch.tensor(PENALTIES, dtype=torch.double))
        self.leverage = 1 / len(x) + self.left.square() @ self.shrunk

    def _scaled(self, x: Tensor) -> Tensor:
        return (x.double() - self.mean) / self.std

    def fit(self, target: Tensor) -> tuple[Tensor, tuple[Tensor, float]]:
        """Return predictions of each row by all others, and the weights and intercept of the function."""
        target = target.double()
        centre = float(target.mean())
        along = (self.left.T @ (target - centre)).unsqueeze(1)
        fitted = centre + self.left @ (self.shrunk * along)
        missed = (target.unsqueeze(1) - fitted) / (1 - self.leverage).clamp(min=1e-6)
        best = int(missed.square().mean(0).argmin())
        slope = self.right.T @ (self.shrunk[:, best] * along[:, 0] / self.values.clamp(min=1e-12))
        return target - missed[:, best], (slope, centre)

    def predict(self, features: Tensor, fitted: tuple[Tensor, float]) -> Tensor:
        """Return what a fitted function gives for other rows."""
        slope, centre = fitted
        return self._scaled(features) @ slope + centre
