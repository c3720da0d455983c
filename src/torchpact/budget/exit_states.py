"""States of exits: sums for read-outs, features of units, and read-outs put in their place."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from torchpact.budget.ridge import Gram, chosen, gram, mapped
from torchpact.core.halting_module import HaltingModule
from torchpact.core.layer_run import LayerRun
from torchpact.core.ponder import Ponder
from torchpact.core.state import parts
from torchpact.nn.criteria.base import last


class ExitStates:
    """States and logits of a block on half of the batches.

    Args:
        steps: L.

    """

    def __init__(self, steps: int) -> None:
        self.grams: list[list[Gram | None]] = [[None, None] for _ in range(steps - 1)]
        self.features: list[Tensor] = []
        self.h: list[Tensor] = []
        self.width = self.positions = 0
        self.mappable = True

    def add(self, ponder: Ponder, kept: Tensor, tokens: Tensor | None) -> None:
        """Add what a call of the block did.

        Args:
            ponder: With exits.
            kept: Which units count, (batch,) or (batch, positions).
            tokens: Which tokens are real, where examples decide; None where all are.

        """
        assert ponder.exits is not None
        states = [last(parts(each)[0]).detach() for each in ponder.exits.states]
        self.mappable &= all(each.shape == states[-1].shape for each in states)
        self.mappable &= all(isinstance(each, Tensor) for each in ponder.exits.states)
        shape = states[-1].shape[:-1]
        real = torch.ones(shape, dtype=torch.bool, device=states[-1].device)
        weights = ponder.weights
        if weights is not None:
            real &= last(weights).squeeze(-1) > 0
        if tokens is not None and tokens.shape == shape:  # where examples decide
            real &= tokens
        h = ponder.exits.logits[:-1].sigmoid()
        h = torch.stack([last(each).squeeze(-1) for each in h]) if len(h) else h
        features, shares = [], []
        for step, each in enumerate(states[:-1]):
            if kept.dim() > 1:
                wide = each if each.shape[:2] == shape[:2] else each.expand(*shape, -1)
                features.append(wide[:, : kept.size(1)][kept])
                shares.append(h[step].expand(shape)[:, : kept.size(1)][kept])
            else:
                rows = real.reshape(len(real), -1, 1).to(each)
                total = (each.reshape(len(each), -1, each.size(-1)) * rows).sum(1)
                features.append(total / rows.sum(1).clamp(min=1))
                share = h[step].expand(shape).reshape(len(real), -1)
                share = (share * rows.squeeze(2)).sum(1) / rows.sum((1, 2)).clamp(min=1)
                shares.append(share)
            if self.mappable:
                for fold in (0, 1):
                    mask = real.clone()
                    mask[fold::2] = False
                    sums = gram(each[mask].cpu(), states[-1][mask].cpu())
                    before = self.grams[step][fold]
                    self.grams[step][fold] = sums if before is None else before + sums
        self.features.append(torch.stack(features).float().cpu())
        self.h.append(torch.stack(shares).float().cpu())
        self.width = states[-1].size(-1)
        self.positions += int(real.sum())

    def maps(self) -> list[Tensor] | None:
        """Return a read-out of each exit but the last, fitted on this half; None where shapes differ."""
        if not self.mappable:
            return None
        return [chosen(one, other) for one, other in self.grams if one is not None and other is not None]


@contextmanager
def replaced(block: HaltingModule, weights: Tensor) -> Iterator[None]:
    """Put a read-out between a block, or the last layer of a run, and what comes after it.

    Args:
        block: The block.
        weights: Of the read-out, see :func:`torchpact.budget.ridge.solved`.

    """
    calls = [0]
    module: nn.Module = block
    each = 1
    if isinstance(block, LayerRun):
        module = block.layers[-1]
        each = sum(layer is module for layer in block.layers)

    def replace(_module: nn.Module, _args: Any, output: Any) -> Any:
        calls[0] += 1
        if calls[0] % each:
            return None
        if isinstance(output, Tensor):
            return mapped(output, weights)
        rest = (mapped(output[0], weights), *output[1:])
        return list(rest) if isinstance(output, list) else rest

    handle = module.register_forward_hook(replace)
    try:
        yield
    finally:
        handle.remove()
