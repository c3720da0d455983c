"""How good the outputs of a run are: agreement with those of the full network, or a score of one's own."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from torchpact.core.call_args import tensors_in
from torchpact.core.ponder import mean_over_positions

Score = Callable[[Any, Any], Any]
"""The output of the network and the batch → one number an example, higher is better."""


def similarity(output: Any, full: Any, weights: Tensor | None = None) -> Tensor:
    """Return how near outputs are to those of the full network, one number an example; 0 is equal.

    Of ``logits`` it is −KL(full ‖ output), of other outputs minus the squared distance, relative to that of
    the full output from 0.

    Args:
        output: What a network returns.
        full: What it returns where nothing halts.
        weights: How much each position counts; used where outputs have as many positions.

    Example:
        >>> similarity(torch.tensor([[1.5, 0.0], [2.0, 0.0]]), torch.tensor([[1.0, 0.0], [1.0, 0.0]]))
        tensor([-0.2500, -1.0000])

    """
    (ours, named), (theirs, _) = main_tensor(output), main_tensor(full)
    if named:
        log_p, log_q = theirs.float().log_softmax(-1), ours.float().log_softmax(-1)
        each = -(log_p.exp() * (log_p - log_q)).sum(-1)
        return _by_example(each, weights)
    distance, size = (ours.float() - theirs.float()).square(), theirs.float().square()
    if theirs.dim() > 2 and weights is not None and weights.shape[:2] == theirs.shape[:2]:
        distance, size = distance * weights, size * weights
    size = size.flatten(1).sum(1)
    return -distance.flatten(1).sum(1) / torch.where(size > 0, size, torch.ones_like(size))


def agreement(output: Any, full: Any, weights: Tensor | None = None) -> Tensor:
    """Return whether the largest entry is that of the full network, one number in [0, 1] an example.

    Args:
        output: What a network returns, classes last.
        full: What it returns where nothing halts.
        weights: How much each position counts.

    """
    same = main_tensor(output)[0].argmax(-1) == main_tensor(full)[0].argmax(-1)
    return _by_example(same.float(), weights)


def main_tensor(output: Any) -> tuple[Tensor, bool]:
    """Return the tensor of an output that counts, and whether it is known to be logits.

    Args:
        output: What a network returns: ``logits`` by that name, or else its first tensor of numbers that is
            no scalar.

    Raises:
        ValueError: There is none.

    Example:
        >>> main_tensor({"loss": torch.tensor(1.0), "logits": torch.zeros(2, 3)})[0].shape
        torch.Size([2, 3])

    """
    logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    if isinstance(logits, Tensor):
        return logits, True
    for tensor in tensors_in([output]):
        if tensor.is_floating_point() and tensor.dim():
            return tensor, False
    raise ValueError("expected the network to return a tensor of numbers, got none: pass score=")


def checked_score(score: Any, batch: int) -> Tensor:
    """Return scores, once they are seen to be one finite number an example.

    Args:
        score: What a score function returned.
        batch: How many examples there are.

    Raises:
        ValueError: It is something else.

    """
    found = torch.as_tensor(score).detach().double().cpu()
    if found.shape != (batch,):
        raise ValueError(f"expected a score of each of {batch} examples, got shape {tuple(found.shape)}")
    if not found.isfinite().all():
        raise ValueError(
            f"expected finite scores, got {int((~found.isfinite()).sum())} of {batch} that are not"
        )
    return found


def _by_example(values: Tensor, weights: Tensor | None) -> Tensor:
    """Return the mean over positions, as they weigh where they are the same."""
    if values.dim() > 1 and weights is not None and weights.shape[:2] == values.shape[:2]:
        return mean_over_positions(values, weights.reshape(*values.shape[:2], *[1] * (values.dim() - 2)))
    return mean_over_positions(values)
