"""How noisy the gradients of a run are (fig. 4 of the paper)."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from torchpact.checks import check_count
from torchpact_recipes.training.compiling import many_kinds
from torchpact_recipes.training.state import copies, derived_seed, put_back

if TYPE_CHECKING:
    from torchpact_recipes.training.images import Learner


def gradient_variance(learner: "Learner", samples: int = 32) -> dict[str, float]:
    """The variance of the gradient that the next iteration will follow: its mean over all parameters.

    ``latents`` is that of noise inside the network alone, the images being the same; ``total`` has other
    images in every sample, too. ``halting`` is as ``latents``, but over the halting heads.
    """
    check_count("samples", samples, 2)
    if learner.shared:
        raise ValueError("expected a single process to find the variance of gradients, got several")
    seed, iteration = learner.config.seed, learner.iteration
    halting = [".halting." in name for name in parameters_that_learn(learner)]
    found = {}
    with undisturbed(learner):
        batches = learner.order.batches_per_epoch
        torch.manual_seed(derived_seed(seed, "variance", iteration))
        same = learner.batch()
        spread = _variance(learner, [same] * samples)
        found["latents"] = _mean(spread)
        if any(halting):
            found["halting"] = _mean([v for v, own in zip(spread, halting, strict=True) if own])
        found["total"] = _mean(_variance(learner, [learner.batch(i % batches) for i in range(samples)]))
    return found


@contextmanager
def undisturbed(learner: "Learner") -> Iterator[None]:
    """Within it the learner can be used in any way; after it, training goes on as if it had not been."""
    learner.wait()
    with learner.on_stream():
        before = copies(learner.state())
        learner.next_batch()
        try:
            yield
        finally:
            put_back(learner.state(), before)
            learner.positioned = -1


@torch.enable_grad()
def gradients_of(learner: "Learner", images: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
    """The gradients of the loss of a batch, one for each parameter that learns, with fresh noise."""
    loss, _ = learner.objective(images, labels)
    return torch.autograd.grad(loss, list(parameters_that_learn(learner).values()))


def parameters_that_learn(learner: "Learner") -> dict[str, nn.Parameter]:
    """The parameters that learn, by name."""
    return {name: p for name, p in learner.model.named_parameters() if p.requires_grad}


def _variance(learner: "Learner", batches: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """The variance of every parameter's gradient over batches."""
    gradients = (
        _CapturedGradients(learner, *batches[0]) if learner.capture else partial(gradients_of, learner)
    )
    first = [g.clone() for g in gradients(*batches[0])]
    sums = [torch.zeros_like(g) for g in first]
    squares = [torch.zeros_like(g) for g in first]
    for batch in batches[1:]:
        # counted from the first, a small variance loses no digits to the mean
        moved = torch._foreach_sub(gradients(*batch), first)
        torch._foreach_add_(sums, moved)
        torch._foreach_addcmul_(squares, moved, moved)
    n = len(batches)
    return [(square - total.square() / n) / (n - 1) for total, square in zip(sums, squares, strict=True)]


class _CapturedGradients:
    """``gradients_of`` as a CUDA graph, which takes a tenth of the time; overwrites what it returned."""

    def __init__(self, learner: "Learner", images: Tensor, labels: Tensor) -> None:
        assert learner.captured is not None
        self.images, self.labels = images.clone(), labels.clone()
        with many_kinds():
            gradients_of(learner, self.images, self.labels)  # compiles, if need be
        torch.cuda.synchronize(learner.device)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=learner.captured.stream):
            self.gradients = gradients_of(learner, self.images, self.labels)

    def __call__(self, images: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        self.images.copy_(images)
        self.labels.copy_(labels)
        self.graph.replay()
        return self.gradients


def _mean(tensors: list[Tensor]) -> float:
    return torch.cat([t.flatten() for t in tensors]).double().mean().item()
