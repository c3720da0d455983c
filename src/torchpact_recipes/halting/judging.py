"""Paired comparison on the same examples: bootstrap intervals."""

from typing import NamedTuple

import torch
from torch import Tensor


class Difference(NamedTuple):
    """The mean of one thing less that of another, and its 95 % interval."""

    mean: float
    low: float
    high: float


def paired(ours: Tensor, theirs: Tensor, resamples: int = 2000, seed: int = 0) -> Difference:
    """Return the difference of two means over examples, with a paired bootstrap over examples.

    Args:
        ours: One number an example, (n,); of several seeds (seeds, n), which stay together.
        theirs: Likewise, of the same examples.
        resamples: How often examples are drawn again.
        seed: Of the draws.

    Raises:
        ValueError: They are of different examples.

    Example:
        >>> paired(torch.ones(50), torch.zeros(50))
        Difference(mean=1.0, low=1.0, high=1.0)

    """
    if ours.size(-1) != theirs.size(-1):
        raise ValueError(f"expected numbers of the same examples, got {ours.size(-1)} and {theirs.size(-1)}")
    each = ours.double().reshape(-1, ours.size(-1)).mean(0) - theirs.double().reshape(
        -1, theirs.size(-1)
    ).mean(0)
    generator = torch.Generator().manual_seed(seed)
    means = torch.stack(
        [each[torch.randint(len(each), (len(each),), generator=generator)].mean() for _ in range(resamples)]
    )
    low, high = means.quantile(torch.tensor([0.025, 0.975], dtype=torch.double)).tolist()
    return Difference(float(each.mean()), low, high)
