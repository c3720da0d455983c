"""A transformer layer in three parts for rows: projections, attention of ragged rows, and what follows it."""

import torch
from torch import Tensor

from torchpact.engines.attention.linear import PackedLinear
from torchpact.engines.attention.native import attend_natively, native_problem
from torchpact.engines.attention.norms import RowNorm, fused_norm
from torchpact.engines.attention.panels import FEW, LayerFinish
from torchpact.engines.attention.ragged import Ragged, Ranges, Selection
from torchpact.engines.attention.rectangles import attend_in_rectangles
from torchpact.specs.attention import AttentionLayer, concatenated

Rotary = tuple[Tensor, Tensor]


class PackedLayer:
    """The weights of a layer as they are computed with: a copy. Dropouts are left out.

    Args:
        spec: The layer.
        fused: Whether queries, keys and values come from one product where all tokens are active.
        separate: Whether queries come from a product of their own where some are not.

    """

    def __init__(self, spec: AttentionLayer, fused: bool = True, separate: bool = True) -> None:
        self.spec = spec
        query, key, value = spec.separate()
        qkv = spec.qkv if spec.qkv is not None else concatenated(query, key, value)
        whole = qkv.inputs, spec.head_size * (spec.heads + 2 * spec.kv_heads)
        if (qkv.inputs, qkv.outputs) != whole:
            raise ValueError(f"expected a product of {whole[1]} queries, keys and values, got {qkv.outputs}")
        between = spec.heads * spec.head_size
        self.fused = PackedLinear(qkv) if fused else None
        self.query = PackedLinear(query) if separate else None
        self.key_value = PackedLinear(qkv.rows(between, qkv.outputs)) if separate else None
        self.out = PackedLinear(spec.out, factor=spec.scale1)
        self.gate = None if spec.gate is None else PackedLinear(spec.gate, spec.activation)
        self.up = PackedLinear(spec.up, None if spec.gate is not None else spec.activation)
        self.down = PackedLinear(spec.down, factor=spec.scale2)
        self.native = native_problem(spec.dtype, spec.device, spec.head_size) is None
        self.norm1, self.norm2 = (RowNorm(norm, self.native) for norm in (spec.norm1, spec.norm2))
        self.q_norm, self.k_norm = (
            norm and (fused_norm(norm) or norm) for norm in (spec.q_norm, spec.k_norm)
        )
        panels = [each is None or each.name is not None for each in self._products()]
        self.may_fuse = all(panels) and None not in (self.norm1.told(), self.norm2.told())
        self.few: LayerFinish | None = None  # made when it is first needed
        self.scale = spec.head_size**-0.5 if spec.scale is None else spec.scale

    def project(
        self,
        u: Tensor,
        active: Tensor,
        picks: Tensor | None,
        rotary: Rotary | None,
        rotary_of_picks: Rotary | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries of picked tokens, keys and values of all; (tokens, heads, head_size).

        Args:
            u: Tokens, (tokens, size).
            active: Those of them that are picked.
            picks: Where these are; None for all.
            rotary: Cosines and sines of the tokens.
            rotary_of_picks: Those of the picked ones.

        """
        spec = self.spec
        heads, shared, size = spec.heads, spec.kv_heads, spec.head_size
        x = self.norm1(u) if spec.order == "pre" else u
        if self.fused is not None and (picks is None or self.query is None):
            projected = self.fused(x).view(-1, heads + 2 * shared, size)
            if picks is None and rotary is not None and self.q_norm is None and self.k_norm is None:
                both = rotated(projected[:, : heads + shared], rotary)
                return both[:, :heads], both[:, heads:], projected[:, heads + shared :]
            queries, keys = projected[:, :heads], projected[:, heads : heads + shared]
            values = projected[:, heads + shared :]
            queries = queries if picks is None else queries.index_select(0, picks)
        else:
            assert self.query is not None
            own = active if spec.order == "post" else x if picks is None else x.index_select(0, picks)
            queries = self.query(own).view(-1, heads, size)
            keys, values = self._keys_and_values(x)
        queries = queries if self.q_norm is None else self.q_norm(queries)
        keys = keys if self.k_norm is None else self.k_norm(keys)
        if rotary is not None and rotary_of_picks is not None:
            queries, keys = rotated(queries, rotary_of_picks), rotated(keys, rotary)
        return queries, keys, values

    def keys_and_values(self, u: Tensor, rotary: Rotary | None) -> tuple[Tensor, Tensor]:
        """Return keys and values of tokens that have all halted."""
        if self.key_value is None:
            return self.project(u, u, None, rotary, rotary)[1:]
        keys, values = self._keys_and_values(self.norm1(u) if self.spec.order == "pre" else u)
        keys = keys if self.k_norm is None else self.k_norm(keys)
        return keys if rotary is None else rotated(keys, rotary), values

    def _keys_and_values(self, x: Tensor) -> tuple[Tensor, Tensor]:
        assert self.key_value is not None
        shared = self.spec.kv_heads
        projected = self.key_value(x).view(-1, 2 * shared, self.spec.head_size)
        return projected[:, :shared], projected[:, shared:]

    def attend(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        selection: Selection,
        ranges: Ranges,
        ragged: Ragged,
        length: int,
    ) -> Tensor:
        """Return what rows see, (rows, heads · head_size); see :func:`attend_in_rectangles`."""
        if self.native and ranges.mask is None and queries.dtype == keys.dtype == values.dtype:
            return attend_natively(queries, keys, values, self.scale, ragged)
        return attend_in_rectangles(queries, keys, values, self.scale, ragged, selection, ranges, length)

    def finish(self, u: Tensor, attended: Tensor) -> Tensor:
        """Return rows after the layer, from what they were and what they saw."""
        if len(u) <= FEW and self.may_fuse and u.dtype == attended.dtype == self.spec.dtype:
            return self._finish_of_few()(u.contiguous(), attended.contiguous())
        post = self.spec.order == "post"
        moved = self.out(attended)
        x = (self.norm1 if post else self.norm2).of_sum(moved, u, in_place=post)
        if post:
            moved = x
        hidden = self.up(x) if self.gate is None else self.gate(x).mul_(self.up(x))
        after = self.down(hidden)
        return self.norm2.of_sum(after, moved, in_place=True) if post else after.add_(moved)

    def __getstate__(self) -> dict[str, object]:
        return vars(self) | {"few": None}  # which points at weights

    def _finish_of_few(self) -> LayerFinish:
        made = self.few
        if made is None:
            products = [None if each is None else each.for_few() for each in self._products()]
            first, second = self.norm1.told(), self.norm2.told()
            assert first is not None
            assert second is not None
            made = self.few = LayerFinish(products, (first, second), self.spec.order == "post")
        return made

    def _products(self) -> tuple[PackedLinear | None, ...]:
        return self.out, self.gate, self.up, self.down


def rotated(x: Tensor, rotary: Rotary) -> Tensor:
    """Return queries or keys, (tokens, heads, features), rotated in pairs of features half a head apart.

    Args:
        x: What is rotated; features beyond those of the cosines stay as they are.
        rotary: Cosines and sines as :func:`prepared` returns them.

    Example:
        >>> x, right_angle = torch.tensor([[[1.0, 2.0]]]), (torch.zeros(1, 1, 2), torch.ones(1, 1, 2))
        >>> rotated(x, prepared(right_angle, 1, 1))
        tensor([[[-2.,  1.]]])

    """
    cosines, sines = rotary
    features = cosines.size(-1)
    if features < x.size(-1):
        return torch.cat((rotated(x[..., :features], rotary), x[..., features:]), -1)
    swapped = torch.cat((x[..., features // 2 :], x[..., : features // 2]), -1)
    return torch.addcmul(x * cosines, swapped, sines).to(x.dtype)


def prepared(rotary: Rotary, batch: int, length: int) -> Rotary:
    """Return cosines, and sines with the sign of their part, of every token: (tokens, 1, features).

    Args:
        rotary: Cosines and sines, (batch or 1, length, features).
        batch: The number of examples.
        length: That of the tokens of an example.

    """
    cosines, sines = (part.expand(batch, length, -1).reshape(batch * length, 1, -1) for part in rotary)
    first, second = sines.chunk(2, -1)
    return cosines, torch.cat((-first, second), -1)


def rotary_of(rotary: Rotary, tokens: Tensor | None) -> Rotary:
    """Return the cosines and sines of some tokens; None for all."""
    if tokens is None:
        return rotary
    return rotary[0].index_select(0, tokens), rotary[1].index_select(0, tokens)
