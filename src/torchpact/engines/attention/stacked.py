"""Keys and values of many layers at once, for tokens that have halted before all of them.

A decoder writes keys and values of every layer to its cache, also of those that no token runs any more. The
state before these layers is one and the same, so that one product for each layer, and all that is done before
and after it, become one of all layers.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from torchpact.engines.attention.norms import FusedNorm, fused_norm
from torchpact.engines.attention.packed_layer import Rotary, rotated
from torchpact.specs.attention import AttentionLayer, concatenated

MOST_STACKED = 8
"""The rows above which a packed product for each layer is faster: on 2 cores, 20 layers of 576 features took
0.13 ms together and 0.34 ms one by one with 1 row, 0.49 and 0.46 ms with 8, 1.4 and 0.9 ms with 32."""


class StackedKeys:
    """The weights of keys and values of a run of layers, norms first: a copy.

    Args:
        norms: Of each layer, all of one kind.
        weight: (layers, size, outputs).
        bias: (layers, 1, outputs), if any.
        k_norms: Of the keys, if any.
        heads: Those of keys and values.

    Example:
        >>> from torchpact.specs import Projection
        >>> linear = lambda: Projection.of(nn.Linear(8, 8))
        >>> layers = [
        ...     AttentionLayer(nn.RMSNorm(8), nn.RMSNorm(8), *(linear() for _ in range(3)), heads=2,
        ...         activation=torch.tanh, query=linear(), key=linear(), value=linear(), causal=True)
        ...     for _ in range(3)
        ... ]
        >>> u = torch.randn(5, 8)
        >>> keys, values = StackedKeys.of(layers).keys_and_values(u, 1, None)
        >>> torch.allclose(values[1], layers[2].value(layers[2].norm1(u)).view(5, 2, 4), atol=1e-6)
        True

    """

    def __init__(
        self,
        norms: Sequence[FusedNorm],
        weight: Tensor,
        bias: Tensor | None,
        k_norms: Sequence[FusedNorm] | None,
        heads: int,
    ) -> None:
        self.norm, self.weight, self.bias, self.heads = norms[0], weight, bias, heads
        self.scales, self.shifts = (
            _stacked([norm.weight for norm in norms]),
            _stacked([n.bias for n in norms]),
        )
        self.k_norms = k_norms

    @classmethod
    def of(cls, layers: Sequence[AttentionLayer]) -> "StackedKeys | None":
        """Return those of a decoder's layers; None where they differ in kind."""
        if any(layer.order == "post" or not layer.causal for layer in layers):
            return None
        norms = [fused_norm(layer.norm1) for layer in layers]
        k_norms = [layer.k_norm and fused_norm(layer.k_norm) for layer in layers]
        first = norms[0]
        if first is None or (any(k_norms) and None in k_norms):
            return None
        alike = [n for n in norms if n is not None and _kind(n) == _kind(first)]
        both = [concatenated(*layer.separate()[1:]) for layer in layers]
        shapes = {(b.weight.shape, b.bias is None, own.kv_heads) for b, own in zip(both, layers, strict=True)}
        if len(alike) < len(layers) or len(shapes) > 1:
            return None
        if any(layer.k_norm is not None for layer in layers) and not any(k_norms):
            return None
        weight = torch.stack([each.weight.detach().t() for each in both])
        bias = _stacked([each.bias for each in both])
        found = [norm for norm in k_norms if norm]
        return cls(alike, weight, bias, found or None, layers[0].kv_heads)

    def keys_and_values(self, u: Tensor, begin: int, rotary: Rotary | None) -> tuple[Tensor, Tensor]:
        """Return keys and values of layers from one on, (layers, tokens, heads, head_size).

        Args:
            u: Tokens, (tokens, size).
            begin: The first layer, from 0.
            rotary: Cosines and sines of the tokens.

        """
        x = self.norm.scaled(u, None, None)
        if self.scales is not None:
            x = x * self.scales[begin:]
        if self.shifts is not None:
            x = x + self.shifts[begin:]
        x = x.expand(len(self.weight) - begin, *u.shape)
        both = torch.bmm(x, self.weight[begin:])
        both = both if self.bias is None else both.add_(self.bias[begin:])
        keys, values = both.unflatten(2, (2, self.heads, -1)).unbind(2)
        if self.k_norms is not None:
            keys = torch.stack([norm(own) for norm, own in zip(self.k_norms[begin:], keys, strict=True)])
        return keys if rotary is None else rotated(keys, rotary), values


def _kind(norm: FusedNorm) -> tuple[str, float, bool, bool]:
    return norm.kind, norm.eps, norm.weight is None, norm.bias is None


def _stacked(parts: Sequence[Tensor | None]) -> Tensor | None:
    """Return vectors of layers, (layers, 1, size); None where there are none."""
    known = [part.detach() for part in parts if part is not None]
    return torch.stack(known).unsqueeze(1) if known else None
