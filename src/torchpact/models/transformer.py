"""Transformer layers that heed a mask of tokens: who has halted is looked at, and costs little more."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchpact._checks import readable


class TransformerUnit(nn.TransformerEncoderLayer):
    """A layer of attention and an MLP, each after a layer norm, for tokens whose gate is open.

    Tokens of shape (batch, length, size) become u + a·attention(norm(u)), and that plus a·MLP(norm(·)), with
    the mask a of active positions (eq. 28). Those that have halted stay as they are, and others still attend
    to them: of a halted token its key and its value are computed, no more, and of an example whose tokens
    have all halted nothing; in training, too, where a relaxed mask is clipped to zero. The host waits for the
    mask; where it must not, as in torch.compile, everything is computed and masked.

    It is ``nn.TransformerEncoderLayer(…, norm_first=True, batch_first=True)`` but for the gate, with its
    parameters, by their names; :meth:`of` makes one of such a layer. ``padding`` is true for tokens that
    nobody attends to, (batch, length). With ``causal`` tokens attend to those before them, and to themselves.

    >>> units = [TransformerUnit(32, heads=4) for _ in range(3)]
    >>> block = tp.AdaptiveBlock(units, nn.Linear(32, 1), mode="thresholded")
    >>> output, ponder = block(torch.randn(2, 10, 32))
    >>> ponder.steps.shape
    torch.Size([2, 10, 1])
    """

    gated = True
    skips = True

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
    def of(cls, layer: nn.TransformerEncoderLayer, *, causal: bool = False) -> "TransformerUnit":
        """Return a unit with the settings and the weights of a layer of torch's.

        >>> layer = nn.TransformerEncoderLayer(32, 4, 64, norm_first=True, batch_first=True).eval()
        >>> unit, u = TransformerUnit.of(layer), torch.randn(2, 10, 32)
        >>> torch.allclose(unit(u), layer(u), atol=1e-6)
        True
        """
        if not layer.norm_first:
            raise ValueError("expected a layer with norm_first=True, got one whose norms come last")
        weight = layer.linear1.weight
        unit = cls(
            layer.linear1.in_features,
            layer.self_attn.num_heads,
            layer.linear1.out_features,
            dropout=layer.dropout.p,
            activation=layer.activation,
            causal=causal,
            layer_norm_eps=layer.norm1.eps,
            bias=layer.linear1.bias is not None,
            device=weight.device,
            dtype=weight.dtype,
        )
        unit.load_state_dict(layer.state_dict())
        return unit.train(layer.training)

    def forward(  # type: ignore[override]
        self, u: Tensor, padding: Tensor | None = None, gate: Tensor | None = None
    ) -> Tensor:
        """Return the tokens after the layer; those whose gate is closed are as they were."""
        self._check(u, padding, gate)
        if gate is not None and readable(gate):
            gate = gate.expand(*u.shape[:2], 1)
            is_open = gate.squeeze(2) != 0
            alive = is_open.any(1).nonzero().squeeze(1)
            if not len(alive) and not torch.is_grad_enabled():
                return u  # else all of it has gradients, if only zeros, as optimizers and DDP expect
            if len(alive) < len(u):
                return self._for(alive, u, padding, gate)
            rows = is_open.flatten().nonzero().squeeze(1)
            if len(rows) < is_open.numel():
                return self._at(rows, is_open, u, padding, gate)
        seen = u + _times(self._attention(u, padding), gate)
        return seen + _times(self._thought(seen), gate)

    def flops_where(self, active: Tensor) -> Tensor:
        """Return the FLOPs of each example, from which of its tokens run: (batch, length, 1), say.

        >>> unit = TransformerUnit(32, heads=4)
        >>> unit.flops_where(torch.tensor([[False] * 10, [True] * 5 + [False] * 5, [True] * 10]))
        tensor([     0, 149760, 258560])
        """
        size, length = self.size, active.flatten(1).size(1)
        open_tokens = active.flatten(1).sum(1)
        asked = 4 * size**2 + 4 * length * size + 4 * size * self.linear1.out_features
        return open_tokens * asked + (open_tokens > 0) * (4 * length * size**2)

    def _for(self, alive: Tensor, u: Tensor, padding: Tensor | None, gate: Tensor) -> Tensor:
        """Compute some examples only, for in the others all tokens have halted."""
        left = None if padding is None else padding.index_select(0, alive)
        moved = self.forward(u.index_select(0, alive), left, gate=gate.index_select(0, alive))
        return _put(u, alive, moved)

    def _at(self, rows: Tensor, is_open: Tensor, u: Tensor, padding: Tensor | None, gate: Tensor) -> Tensor:
        """Compute some tokens only, of which every example has one at least."""
        flat = u.flatten(0, 1)
        weights = gate.flatten(0, 1).index_select(0, rows)
        seen = self._attention_at(rows, is_open, u, padding) * weights + flat.index_select(0, rows)
        return _put(flat, rows, seen + self._thought(seen) * weights).view_as(u)

    def _attention(self, u: Tensor, padding: Tensor | None) -> Tensor:
        """Return what attention adds to each token."""
        x, mask = self.norm1(u), _seen(padding)
        asking, _ = self._projections()
        causal = self.causal and mask is None
        if self.causal and mask is not None:
            mask = mask & torch.ones(u.size(1), u.size(1), dtype=torch.bool, device=u.device).tril()
        return self._shown(self._look(F.linear(x, *asking), x, mask, causal))

    def _attention_at(self, rows: Tensor, is_open: Tensor, u: Tensor, padding: Tensor | None) -> Tensor:
        """Return what attention adds to these tokens, one after the other."""
        batch, length, size = u.shape
        # some examples have more of them than others: each gets room for as many as any has
        room = int(is_open.sum(1).max())
        order = (is_open.cumsum(1) - 1).flatten().index_select(0, rows)
        places = rows // length * room + order
        x, mask = self.norm1(u), _seen(padding)
        asking, _ = self._projections()
        asked = F.linear(x.flatten(0, 1).index_select(0, rows), *asking)
        queries = asked.new_zeros(batch * room, size).index_copy(0, places, asked).view(batch, room, size)
        if self.causal:
            # in the room that is left, nothing is hidden: there must be something to attend to
            last = torch.full((batch * room,), length, device=u.device)
            last = last.index_copy(0, places, rows % length).view(batch, 1, room, 1)
            before = torch.arange(length, device=u.device) <= last
            mask = before if mask is None else mask & before
        looked = self._look(queries, x, mask).flatten(0, 1)
        return self._shown(looked.index_select(0, places))

    def _projections(self) -> tuple[tuple[Tensor, Tensor | None], tuple[Tensor, Tensor | None]]:
        """Return weights and biases of queries; and of keys and values."""
        weight, bias, size = self.self_attn.in_proj_weight, self.self_attn.in_proj_bias, self.size
        if bias is None:
            return (weight[:size], None), (weight[size:], None)
        return (weight[:size], bias[:size]), (weight[size:], bias[size:])

    def _look(self, queries: Tensor, x: Tensor, mask: Tensor | None, causal: bool = False) -> Tensor:
        """Attend from queries to all tokens."""
        _, told = self._projections()
        keys, values = F.linear(x, *told).chunk(2, -1)
        looked = F.scaled_dot_product_attention(
            self._by_head(queries),
            self._by_head(keys),
            self._by_head(values),
            attn_mask=mask,
            dropout_p=self.self_attn.dropout if self.training else 0.0,
            is_causal=causal,
        )
        return looked.transpose(1, 2).flatten(2)

    def _by_head(self, x: Tensor) -> Tensor:
        apart: Tensor = x.unflatten(-1, (self.self_attn.num_heads, -1))
        return apart.transpose(1, 2)

    def _shown(self, looked: Tensor) -> Tensor:
        return self.dropout1(self.self_attn.out_proj(looked))  # type: ignore[no-any-return]

    def _thought(self, u: Tensor) -> Tensor:
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


def _times(x: Tensor, gate: Tensor | None) -> Tensor:
    return x if gate is None else x * gate


def _seen(padding: Tensor | None) -> Tensor | None:
    """Return whom everybody may attend to, as attention takes it."""
    return None if padding is None else ~padding[:, None, None, :]


def _put(u: Tensor, rows: Tensor, moved: Tensor) -> Tensor:
    """Return the tokens with these rows in the place of theirs, in the precision that holds both."""
    kind = torch.promote_types(u.dtype, moved.dtype)
    return u.to(kind).index_copy(0, rows, moved.to(kind))
