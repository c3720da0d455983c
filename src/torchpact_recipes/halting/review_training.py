"""Training of what is compared on reviews: the whole network, students of fewer layers, and one with exits.

All see the same batches in the same order, and as many. The whole network learns from labels; it is the
teacher of the students. Exits learn from labels and, likewise, from the whole network, or else from the last
exit's prediction of the moment.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import torchpact as tp
from torchpact_recipes.halting.networks import ReviewBatch, ReviewNet, review_batches


@dataclass(frozen=True)
class ReviewSettings:
    """How long and how fast to train."""

    updates: int = 600
    size: int = 16
    """Examples of an update."""
    length: int = 64
    """Tokens of a text."""
    lr: float = 1e-4
    warm_up: float = 0.1
    """The share of updates in which the learning rate rises; it falls to 0 in the others."""


def all_exits(net: ReviewNet, inputs: dict[str, Tensor]) -> tuple[Tensor, ...]:
    """Return the states after all layers of an adapted network in which nothing halts."""
    never = tp.Thresholds("never")
    with tp.use_mode(net, "thresholded"), tp.use_thresholds(net, never), tp.collect(net, exits=True) as found:
        net(**inputs)
    exits = found[0].exits
    assert exits is not None
    return tuple(state for state in exits.states if isinstance(state, Tensor))


def plain_loss(net: ReviewNet, batch: ReviewBatch, teacher: nn.Module | None = None) -> Tensor:
    """Return the cross-entropy of labels; with a teacher its mean with that of the teacher's predictions."""
    logits = net(**batch.inputs).float()
    loss = cross_entropy(logits, batch.labels)
    if teacher is None:
        return loss
    with torch.no_grad():
        target = teacher(**batch.inputs).float().softmax(-1)
    return (loss + cross_entropy(logits, target)) / 2


def exits_loss(net: ReviewNet, batch: ReviewBatch, teacher: nn.Module | None = None) -> Tensor:
    """Return the mean over exits of the losses from labels and from a teacher.

    Args:
        net: The adapted network.
        batch: The batch.
        teacher: Of all exits; by default the last exit is that of the others, and has labels only.

    """
    states, mask = all_exits(net, batch.inputs), batch.inputs["attention_mask"]
    logits = [net.classes(state, mask).float() for state in states]
    if teacher is not None:
        with torch.no_grad():
            given = teacher(**batch.inputs).float().softmax(-1)
        both = [cross_entropy(each, batch.labels) + cross_entropy(each, given) for each in logits]
        return torch.stack(both).mean() / 2
    target = logits[-1].detach().softmax(-1)
    losses = [cross_entropy(each, batch.labels) for each in logits]
    taught = [cross_entropy(each, target) for each in logits[:-1]]
    pairs = zip(losses[:-1], taught, strict=True)
    return torch.stack([*((own + last) / 2 for own, last in pairs), losses[-1]]).mean()


def train(
    net: ReviewNet,
    reviews: Any,
    tokenizer: Any,
    settings: ReviewSettings,
    seed: int,
    teacher: nn.Module | None = None,
    exits: bool = False,
) -> float:
    """Train a network on reviews, each once, and return the mean loss of the last tenth of the updates.

    Args:
        net: The network; with ``exits`` an adapted one.
        reviews: At least as many as updates see.
        tokenizer: Of the network.
        settings: How long and how fast.
        seed: Of the order.
        teacher: A network to learn from besides labels.
        exits: Whether all exits are trained.

    """
    generator = torch.Generator().manual_seed(seed)
    count = settings.updates * settings.size
    chosen = [reviews[i] for i in torch.randperm(len(reviews), generator=generator)[:count].tolist()]
    weights = [p for p in net.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=settings.lr, weight_decay=0.01)
    rising = max(1, round(settings.warm_up * settings.updates))
    net.train()
    losses = []
    batches = review_batches(chosen, tokenizer, settings.length, settings.size, seed)
    for update, batch in enumerate(batches):
        falling = (settings.updates - update) / max(1, settings.updates - rising)
        for group in optimizer.param_groups:
            group["lr"] = settings.lr * min((update + 1) / rising, falling)
        with torch.autocast("cpu", torch.bfloat16):
            loss = exits_loss(net, batch, teacher) if exits else plain_loss(net, batch, teacher)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
    net.eval()
    tail = losses[-max(1, len(losses) // 10) :]
    return sum(tail) / len(tail)
