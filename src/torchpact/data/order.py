"""Which images make up which batch: a function of the seed and the iteration, and of nothing else."""

import numpy as np
import torch
from torch import Tensor

from torchpact._checks import check_count


class BatchOrder:
    """The batches of a training run: every epoch visits ``size`` examples in a fresh random order.

    Nothing is carried from one iteration to the next, so a run resumes at any of them exactly. The
    last size mod ``batch`` examples of an epoch's order are left out. Of ``world`` processes, each
    gets its share, number ``rank``, of the same ``batch`` examples. Indices live on ``device``, where
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
        rank: int = 0,
        world: int = 1,
        device: torch.device | str = "cpu",
    ) -> None:
        self.size = check_count("size", size)
        self.batch = check_count("batch", batch)
        self.seed = check_count("seed", seed, minimum=0)
        self.rank = check_count("rank", rank, minimum=0)
        self.world = check_count("world", world)
        self.device = torch.device(device)
        if batch > size:
            raise ValueError(f"expected a batch of at most {size} examples, got {batch}")
        if batch % world:
            raise ValueError(f"expected a batch that {world} processes share evenly, got {batch}")
        if rank >= world:
            raise ValueError(f"expected rank to be below world, {world}, got {rank}")
        self._cached: tuple[int, Tensor] | None = None

    @property
    def batches_per_epoch(self) -> int:
        """Return the number of iterations that make an epoch."""
        return self.size // self.batch

    def epoch(self, iteration: int) -> int:
        """Return the epoch, from 0, that ``iteration``, from 0, is in."""
        return check_count("iteration", iteration, minimum=0) // self.batches_per_epoch

    def indices(self, iteration: int) -> Tensor:
        """Return the indices, int64, of this process's examples in ``iteration``, from 0."""
        order = self._order(self.epoch(iteration))
        share = self.batch // self.world
        start = iteration % self.batches_per_epoch * self.batch + self.rank * share
        # A copy, lest writing into it change batches to come
        return order[start : start + share].clone()

    def whole_epoch(self, epoch: int) -> Tensor:
        """Return the indices of all batches of an epoch in turn; this process's share of each."""
        share = self.batch // self.world
        batches = self._order(epoch)[: self.batches_per_epoch * self.batch].view(-1, self.world, share)
        return batches[:, self.rank].flatten()

    def _order(self, epoch: int) -> Tensor:
        if self._cached is None or self._cached[0] != epoch:
            # torch's CPU generator keeps 32 bits of its seed; this one mixes all of seed and epoch
            sequence = np.random.SeedSequence(self.seed, spawn_key=(epoch,))
            order = np.random.default_rng(sequence).permutation(self.size)
            self._cached = epoch, torch.from_numpy(order).to(self.device)
        return self._cached[1]
