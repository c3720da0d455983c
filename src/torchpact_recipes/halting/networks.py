"""MiniLM with a read-out of two classes, whole or cut to its first layers, and batches of reviews."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchpact_recipes.data.polarity import Review


class ReviewNet(nn.Module):
    """An encoder with one linear read-out of the mean over real tokens, which all exits share.

    Args:
        encoder: A ``BertModel``; its embeddings are not trained.
        layers: How many of its layers are kept, the first ones.

    """

    def __init__(self, encoder: Any, layers: int) -> None:
        super().__init__()
        encoder.encoder.layer = encoder.encoder.layer[:layers]
        encoder.config.num_hidden_layers = layers
        encoder.pooler = None
        encoder.embeddings.requires_grad_(False)
        self.config = encoder.config
        self.encoder = encoder
        self.read = nn.Linear(encoder.config.hidden_size, 2)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return the class logits of each text."""
        states = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        return self.classes(states, attention_mask)

    def classes(self, states: Tensor, attention_mask: Tensor) -> Tensor:
        """Return the class logits of states of tokens."""
        logits: Tensor = self.read(pooled(states, attention_mask))
        return logits


def pooled(states: Tensor, attention_mask: Tensor) -> Tensor:
    """Return the mean state over real tokens."""
    real = attention_mask.unsqueeze(2).to(states.dtype)
    return (states * real).sum(1) / real.sum(1)


class ReviewBatch(NamedTuple):
    """Tokens of texts, and their labels."""

    inputs: dict[str, Tensor]
    labels: Tensor


def review_batches(
    reviews: Sequence[Review], tokenizer: Any, length: int, size: int, seed: int | None = None
) -> Iterator[ReviewBatch]:
    """Yield batches of reviews of like lengths.

    Args:
        reviews: The reviews.
        tokenizer: Of the network.
        length: How many tokens of each are kept, the first ones.
        size: How many texts a batch has.
        seed: Shuffles texts, sorts pools of 8 batches by length, and shuffles batches; None keeps the order
            of lengths.

    """
    generator = torch.Generator().manual_seed(seed or 0)
    count = len(reviews)
    order = torch.randperm(count, generator=generator).tolist() if seed is not None else [*range(count)]
    tokens = tokenizer([review.text for review in reviews], truncation=True, max_length=length)["input_ids"]
    pool = count if seed is None else 8 * size
    for start in range(0, count, pool):
        chosen = sorted(order[start : start + pool], key=lambda i: len(tokens[i]))
        groups = [chosen[i : i + size] for i in range(0, len(chosen), size)]
        if seed is not None:
            groups = [groups[i] for i in torch.randperm(len(groups), generator=generator).tolist()]
        for group in groups:
            longest = max(len(tokens[i]) for i in group)
            ids = torch.full((len(group), longest), tokenizer.pad_token_id)
            mask = torch.zeros(len(group), longest, dtype=torch.long)
            for row, i in enumerate(group):
                ids[row, : len(tokens[i])] = torch.tensor(tokens[i])
                mask[row, : len(tokens[i])] = 1
            labels = torch.tensor([reviews[i].label for i in group])
            yield ReviewBatch({"input_ids": ids, "attention_mask": mask}, labels)
