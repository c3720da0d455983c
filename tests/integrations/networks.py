"""Small networks, their batches and their gradients, for tests of training."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import torchpact as tp


class Encoder(nn.Module):
    """Layers called in a loop, each within activation checkpointing if ``reentrant`` is not None."""

    def __init__(self, layers: int = 3, reentrant: bool | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.reentrant = reentrant
        layer = [nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True) for _ in range(layers)]
        self.layers = nn.ModuleList(layer)

    def forward(self, u: Tensor) -> Tensor:
        for layer in self.layers:
            u = layer(u) if self.reentrant is None else checkpoint(layer, u, use_reentrant=self.reentrant)
        return u


def bert(layers: int = 3, **options: Any) -> Any:
    """Return a tiny BERT classifier with random weights, the same ones in every call."""
    transformers = pytest.importorskip("transformers", reason="networks of Hugging Face's are tested with it")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64}
    config = transformers.BertConfig(
        vocab_size=50,
        num_hidden_layers=layers,
        max_position_embeddings=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        **(sizes | options),
    )
    return transformers.BertForSequenceClassification(config)


def batch(examples: int = 8) -> dict[str, Tensor]:
    """Return tokens whose last ones are padding, and labels."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(1, 50, (examples, 10), generator=generator)
    mask = torch.ones_like(tokens)
    mask[:, 7:] = 0
    labels = torch.randint(0, 2, (examples,), generator=generator)
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


def gradients(net: nn.Module, forward: Callable[[], Tensor], tau: float = 0.1) -> dict[str, Tensor]:
    """Return the gradients of the objective, by the names of parameters; ``forward`` returns the loss."""
    net.zero_grad()
    torch.manual_seed(1)  # of the noise
    with tp.collect(net) as ponders:
        loss = forward()
    assert len(ponders) == 1
    tp.map_loss(loss, ponders, tau).backward()
    assert len(ponders) == 1
    return {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}


def apart(one: dict[str, Tensor], two: dict[str, Tensor]) -> float:
    """Return the norm of the difference of gradients, relative to that of the second."""
    assert one.keys() == two.keys()
    difference = torch.cat([(one[name].double() - two[name].double()).flatten() for name in two])
    return float(difference.norm() / torch.cat([two[name].double().flatten() for name in two]).norm())
