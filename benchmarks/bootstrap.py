"""The mean of paired differences, and an interval for it by a bootstrap."""

import torch
from torch import Tensor


def interval(differences: Tensor, level: float = 0.95, draws: int = 2000) -> tuple[float, float, float]:
    """Return the mean over examples, and the two ends of a percentile bootstrap.

    Args:
        differences: One number an example, (n,).
        level: Of the interval.
        draws: How often examples are drawn anew.

    """
    values, generator = differences.double(), torch.Generator().manual_seed(0)
    means = torch.stack(
        [values[torch.randint(len(values), (len(values),), generator=generator)].mean() for _ in range(draws)]
    )
    ends = torch.quantile(means, torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=torch.double))
    return float(values.mean()), float(ends[0]), float(ends[1])
