"""What a transformer layer is, and what one call of it is given: frozen records."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchpact.core.call_args import CallArgs


@dataclass(frozen=True, eq=False)
class Projection:
    """A linear layer: ``weight`` of shape (outputs, inputs), as ``F.linear`` takes it, and a bias.

    >>> linear = nn.Linear(8, 3)
    >>> Projection.of(linear)(torch.zeros(2, 8)).shape
    torch.Size([2, 3])
    """

    weight: Tensor
    bias: Tensor | None = None
    module: nn.Module | None = None
    """The layer itself, where there is one: calls go to it."""

    @classmethod
    def of(cls, linear: nn.Linear) -> "Projection":
        """Return the projection of a linear layer; its weights are not copied."""
        return cls(linear.weight, linear.bias, linear)

    def __call__(self, x: Tensor) -> Tensor:
        """Return the product for the last dimension of ``x``."""
        if self.module is None:
            return F.linear(x, self.weight, self.bias)
        projected: Tensor = self.module(x)
        return projected

    def rows(self, begin: int, end: int) -> "Projection":
        """Return some of its outputs, as views of the weights."""
        return Projection(self.weight[begin:end], None if self.bias is None else self.bias[begin:end])

    @property
    def inputs(self) -> int:
        """The features that it takes."""
        return self.weight.size(1)

    @property
    def outputs(self) -> int:
        """The features that it makes."""
        return self.weight.size(0)


@dataclass(frozen=True, eq=False)
class AttentionLayer:
    """A transformer layer: attention and an MLP, each added to its input, over tokens (batch, length, size).

    ``order`` "pre" is v = u + attention(norm1(u)), then v + mlp(norm2(v)); "post" is
    v = norm1(u + attention(u)), then norm2(v + mlp(v)). The MLP is down(activation(up(·))), and with a gate
    down(activation(gate(·)) · up(·)). Queries, keys and values come from ``qkv``, or from three projections.
    Modules and weights are those of the layer, not copies: gradients reach them.

    Raises:
        ValueError: It has neither ``qkv`` nor all of ``query``, ``key`` and ``value``.

    """

    norm1: nn.Module
    norm2: nn.Module
    out: Projection
    up: Projection
    down: Projection
    heads: int
    activation: Callable[[Tensor], Tensor]
    qkv: Projection | None = None
    """Queries, keys and values in one product, one below the other."""
    query: Projection | None = None
    key: Projection | None = None
    value: Projection | None = None
    gate: Projection | None = None
    """Of a gated MLP."""
    kv_heads: int = 0
    """Heads of keys and values, each shared by heads / kv_heads of the queries; 0 is as many as ``heads``."""
    head_size: int = 0
    """The features of a head; 0 is what the output projection takes, divided by ``heads``."""
    scale: float | None = None
    """What scores are multiplied by; None is 1 / √head_size."""
    q_norm: nn.Module | None = None
    """Of the queries of each head, before the rotation."""
    k_norm: nn.Module | None = None
    rotary: bool = False
    """Whether queries and keys are rotated by their positions."""
    causal: bool = False
    """Whether tokens attend to those before them, and to themselves, only."""
    window: int | None = None
    """How many tokens a token attends to, itself and those before it; None is all."""
    scale1: Tensor | None = None
    """What the attention is multiplied by, feature by feature, before it is added (layer scale)."""
    scale2: Tensor | None = None
    """The same for the MLP."""
    dropouts: tuple[nn.Module, ...] = ()
    """After the output projection, inside the MLP, and after it; () where the layer is in evaluation."""
    attention_dropout: float = 0.0
    """As it is now: 0 in evaluation."""
    order: Literal["pre", "post"] = "pre"
    read_call: Callable[[CallArgs], "LayerContext | None"] | None = None
    """Returns what a call of the layer by its network is given; None of a call that engines cannot run."""
    index: int = 0
    """The number of the layer in its network, by which it finds its keys and values in a cache."""

    def __post_init__(self) -> None:
        if self.qkv is None and None in (self.query, self.key, self.value):
            raise ValueError("expected a projection qkv, or all of query, key and value")
        object.__setattr__(self, "kv_heads", self.kv_heads or self.heads)
        object.__setattr__(self, "head_size", self.head_size or self.out.inputs // self.heads)

    @property
    def size(self) -> int:
        """The features of a token."""
        return self.out.outputs

    @property
    def hidden(self) -> int:
        """The features inside the MLP."""
        return self.down.inputs

    @property
    def dtype(self) -> torch.dtype:
        """The precision of its weights."""
        return self.out.weight.dtype

    @property
    def device(self) -> torch.device:
        """Where its weights are."""
        return self.out.weight.device

    @property
    def is_unit(self) -> bool:
        """Whether it has what :class:`~torchpact.models.TransformerUnit` has, and no more."""
        parts = (self.gate, self.q_norm, self.k_norm, self.window, self.scale, self.scale1, self.scale2)
        plain = self.qkv is not None and self.kv_heads == self.heads and len(self.dropouts) == 3
        return plain and self.order == "pre" and not self.rotary and all(part is None for part in parts)

    def separate(self) -> tuple[Projection, Projection, Projection]:
        """Return the projections of queries, keys and values."""
        if self.query is not None and self.key is not None and self.value is not None:
            return self.query, self.key, self.value
        assert self.qkv is not None
        first, size = self.heads * self.head_size, self.kv_heads * self.head_size
        ends = first, first + size, first + 2 * size
        return self.qkv.rows(0, ends[0]), self.qkv.rows(ends[0], ends[1]), self.qkv.rows(ends[1], ends[2])


Update = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Writes keys and values, (batch, kv_heads, length, head_size), to a cache; returns all of the layer's."""


@dataclass(frozen=True, eq=False)
class LayerContext:
    """What one call of one layer is given besides the state, as Hugging Face's networks hand it to a layer.

    >>> LayerContext(causal=True).mask is None
    True
    """

    mask: Tensor | None = None
    """What queries may attend to, (batch or 1, heads or 1, queries, keys): booleans, or what is added."""
    causal: bool = False
    """Where there is no mask: whether tokens attend only to themselves and those before them."""
    rotary: tuple[Tensor, Tensor] | None = None
    """Cosines and sines, (batch or 1, length, features), of pairs of features half a head apart."""
    update: Update | None = None
    """None where there is no cache."""


def concatenated(*projections: Projection) -> Projection:
    """Return projections of one input as one: a copy.

    >>> concatenated(Projection.of(nn.Linear(8, 3)), Projection(torch.ones(2, 8))).outputs
    5
    """
    weight = torch.cat([each.weight for each in projections])
    if all(each.bias is None for each in projections):
        return Projection(weight)
    biases = [weight.new_zeros(each.outputs) if each.bias is None else each.bias for each in projections]
    return Projection(weight, torch.cat(biases))
