"""Which images make up which batch: a function of the seed and the iteration, and of nothing else."""

import numpy as np
import torch
from torch import Tensor

from torchpact.checks import check_count


class BatchOrder:
    """The batches of a training run: every epoch visits ``size`` examples in a fresh random order.

    Nothing is carried from one iteration to the next, so a run resumes at any of them exactly. The
    last size mod ``batch`` examples of an epoch's order are left out. Indices live on ``device``, where
    each epoch's order is copied once; it is the same order on every device.

    >>> order = BatchOrder(size=10, batch=4, seed=0)
    >>> order.batches_per_epoch, order.epoch(5)
    (2, 2)
    >>> order.indices(5).equal(BatchOrder(size=10, batch=4, seed=0).indices(5))
    True
    """

    def __init__(
        self,
        size: int,
        batch: int,
        seed: int,
        device: torch.device | str = "cpu",
    ) -> None:
        self.size = check_count("size", size)
        self.batch = check_count("batch", batch)
        self.seed = check_count("seed", seed, minimum=0)
        self.device = torch.device(device)
        if batch > size:
            raise ValueError(f"expected a batch of at most {size} examples, got {batch}")
        self._cached: tuple[int, Tensor] | None = None

    @property
    def batches_per_epoch(self) -> int:
        """Return the number of iterations that make an epoch."""
        return self.size // self.batch

    def epoch(self, iteration: int) -> int:
        """Return the epoch, from 0, that ``iteration``, from 0, is in."""
        return check_count("iteration", iteration, minimum=0) // self.batches_per_epoch

    def indices(self, iteration: int) -> Tensor:
        """Return the indices, int64, of the examples of ``iteration``, from 0."""
        order = self._order(self.epoch(iteration))
        start = iteration % self.batches_per_epoch * self.batch
        # A copy, lest writing into it change batches to come
        return order[start : start + self.batch].clone()

    def whole_epoch(self, epoch: int) -> Tensor:
        """Return the indices of all batches of an epoch in turn."""
        return self._order(epoch)[: self.batches_per_epoch * self.batch].clone()

    def _order(self, epoch: int) -> Tensor:
        if self._cached is None or self._cached[0] != epoch:
            # torch's CPU generator keeps 32 bits of its seed; this one mixes all of seed and epoch
            sequence = np.random.SeedSequence(self.seed, spawn_key=(epoch,))
            order = np.random.default_rng(sequence).permutation(self.size)
            self._cached = epoch, torch.from_numpy(order).to(self.device)
        return self._cached[1]
