"""Transformer layers that take a mask of active tokens."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchpact.specs import AttentionLayer, Projection, register_step, run_gated


class TransformerUnit(nn.TransformerEncoderLayer):
    """A layer of attention and an MLP, each after a layer norm, for tokens whose gate is open.

    Tokens of shape (batch, length, size) become u + a·attention(norm(u)), and that plus a·MLP(norm(·)), with
    the mask a of active positions (eq. 28). Those that have halted stay as they are, and others still attend
    to them. Engines skip halted tokens, in evaluation and in training, where a relaxed mask is clipped to
    zero and has no gradient: :mod:`torchpact.engines.attention` computes only their keys and values, unless
    little would be saved. ``torchpact.specs.dense_execution()`` switches that off.

    It is ``nn.TransformerEncoderLayer(…, norm_first=True, batch_first=True)`` but for the gate, with its
    parameters, by their names; :meth:`of` makes one of such a layer. It is a step of an adaptive block, not a
    layer of ``nn.TransformerEncoder``, and computes attention by itself, so that hooks of ``self_attn`` are
    not called. ``padding``, of shape (batch, length), is true for tokens that are not attended to. With
    ``causal`` tokens attend to those before them, and to themselves.

    >>> units = [TransformerUnit(32, heads=4) for _ in range(3)]
    >>> block = tp.AdaptiveBlock(units, nn.Linear(32, 1), mode="thresholded")
    >>> output, ponder = block(torch.randn(2, 10, 32))
    >>> ponder.steps.shape
    torch.Size([2, 10, 1])
    """

    gated = True

    def __init__(
        self,
        size: int,
        heads: int,
        hidden: int | None = None,
        *,
        dropout: float = 0.0,
        activation: str | Callable[[Tensor], Tensor] = "gelu",
        causal: bool = False,
        **options: Any,
    ) -> None:
        hidden = 4 * size if hidden is None else hidden
        super().__init__(
            size, heads, hidden, dropout, activation, batch_first=True, norm_first=True, **options
        )
        self.size, self.causal = size, causal

    @classmethod
    def of(cls, layer: nn.TransformerEncoderLayer, *, causal: bool | None = None) -> "TransformerUnit":
        """Return a copy of a layer of torch's that heeds a gate.

        >>> layer = nn.TransformerEncoderLayer(32, 4, 64, norm_first=True, batch_first=True).eval()
        >>> unit, u = TransformerUnit.of(layer), torch.randn(2, 10, 32)
        >>> torch.allclose(unit(u), layer(u), atol=1e-6)
        True
        """
        if type(layer) not in (nn.TransformerEncoderLayer, TransformerUnit):
            raise TypeError(f"expected an nn.TransformerEncoderLayer, got {type(layer).__name__}")
        if not (layer.norm_first and layer.self_attn.batch_first):
            first = f"norm_first={layer.norm_first}, batch_first={layer.self_attn.batch_first}"
            raise ValueError(f"expected a layer with norm_first=True, batch_first=True, got {first}")
        unit = cls.__new__(cls)
        unit.__dict__.update(copy.deepcopy(layer.__dict__))
        unit.size = layer.self_attn.embed_dim
        unit.causal = getattr(layer, "causal", False) if causal is None else causal
        return unit

    def extra_repr(self) -> str:
        """Return the settings for ``print``."""
        return "causal=True" if self.causal else ""

    def forward(  # type: ignore[override]
        self, u: Tensor, padding: Tensor | None = None, gate: Tensor | None = None
    ) -> Tensor:
        """Return the tokens after the layer; those whose gate is closed are as they were.

        Args:
            u: Tokens, of shape (batch, length, size).
            padding: True for tokens that others do not attend to, of shape (batch, length).
            gate: The active positions mask, of shape (batch, length, 1) or (batch, 1, 1).

        Returns:
            Tokens of the same shape.

        Raises:
            ValueError: A shape does not fit.

        """
        self._check(u, padding, gate)
        gate = None if gate is None else gate.to(u.dtype)
        moved = run_gated(self, attention_layer, u, gate, padding)
        if moved is not None:
            return moved
        attended = u + _times(self._attention(u, padding), gate)
        return attended + _times(self._mlp(attended), gate)

    def _attention(self, u: Tensor, padding: Tensor | None) -> Tensor:
        """Return what attention adds to each token."""
        own, mask = self.self_attn, None if padding is None else ~padding[:, None, None, :]
        projected = F.linear(self.norm1(u), own.in_proj_weight, own.in_proj_bias)
        queries, keys, values = (
            x.unflatten(-1, (own.num_heads, -1)).transpose(1, 2) for x in projected.chunk(3, -1)
        )
        causal = self.causal and mask is None
        if self.causal and mask is not None:
            mask = mask & torch.ones(u.size(1), u.size(1), dtype=torch.bool, device=u.device).tril()
        dropout = own.dropout if self.training else 0.0
        attended = F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, dropout_p=dropout, is_causal=causal
        )
        return self.dropout1(own.out_proj(attended.transpose(1, 2).flatten(2)))  # type: ignore[no-any-return]

    def _mlp(self, u: Tensor) -> Tensor:
        """Return what the MLP adds to each token."""
        hidden = self.dropout(self.activation(self.linear1(self.norm2(u))))
        return self.dropout2(self.linear2(hidden))  # type: ignore[no-any-return]

    def _check(self, u: Tensor, padding: Tensor | None, gate: Tensor | None) -> None:
        size = self.size
        if u.dim() != 3 or u.size(-1) != size:
            raise ValueError(f"expected tokens of shape (batch, length, {size}), got {tuple(u.shape)}")
        if padding is not None and (padding.shape != u.shape[:2] or padding.dtype != torch.bool):
            got = f"{tuple(padding.shape)} of {padding.dtype}"
            raise ValueError(f"expected padding of {tuple(u.shape[:2])} booleans, got {got}")
        if gate is not None and gate.shape not in ((*u.shape[:2], 1), (len(u), 1, 1)):
            raise ValueError(
                f"expected a gate for every token, {(*u.shape[:2], 1)}, or example, got {tuple(gate.shape)}"
            )


@register_step(TransformerUnit)
def attention_layer(unit: TransformerUnit) -> AttentionLayer:
    """Return what a unit is, for engines and FLOPs.

    Args:
        unit: The unit; its weights are not copied.

    Example:
        >>> spec = attention_layer(TransformerUnit(32, heads=4))
        >>> spec.size, spec.heads, spec.hidden
        (32, 4, 128)

    """
    own = unit.self_attn
    return AttentionLayer(
        norm1=unit.norm1,
        norm2=unit.norm2,
        qkv=Projection(own.in_proj_weight, own.in_proj_bias),
        out=Projection.of(own.out_proj),
        heads=own.num_heads,
        up=Projection.of(unit.linear1),
        down=Projection.of(unit.linear2),
        activation=unit.activation,
        causal=unit.causal,
        dropouts=(unit.dropout1, unit.dropout, unit.dropout2),
        attention_dropout=own.dropout if unit.training else 0.0,
    )


def _times(x: Tensor, gate: Tensor | None) -> Tensor:
    return x if gate is None else x * gate
