"""Transformer layers that heed a mask of tokens: who has halted is looked at, and costs little more."""

import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchpact.checks import readable

MOST = 0.9
"""The share of tokens above which it does not pay to pick them: with 90 % of 8×197×384 both took as long."""
LEAST = 3e7
"""The FLOPs that must be saved for it to pay; half as many in training.

On 2 cores, of layers of 32 to 256 features, those that saved 13 to 26 million took 0.76 to 0.96 times as long
masked as picked, 35 to 40 million 0.93 to 1.16, 63 million or more 1.05 to 1.7; in training 7 to 14 million
0.89 to 1.09, 20 to 26 million 0.98 to 1.10.
"""


class TransformerUnit(nn.TransformerEncoderLayer):
    """A layer of attention and an MLP, each after a layer norm, for tokens whose gate is open.

    Tokens of shape (batch, length, size) become u + a·attention(norm(u)), and that plus a·MLP(norm(·)), with
    the mask a of active positions (eq. 28). Those that have halted stay as they are, and others still attend
    to them: of a halted token its key and its value are computed, no more, and of an example whose tokens
    have all halted nothing. So it is in training, too, where a relaxed mask is clipped to zero: gates that
    are closed have no gradient. Where little would be saved, as by small layers or with nine tenths of the
    tokens open, all is computed and masked, as it is in torch.compile; elsewhere the host waits for the mask.

    It is ``nn.TransformerEncoderLayer(…, norm_first=True, batch_first=True)`` but for the gate, with its
    parameters, by their names; :meth:`of` makes one of such a layer. It is a step of an adaptive block, not a
    layer of ``nn.TransformerEncoder``, and computes attention by itself, so that hooks of ``self_attn`` are
    not called. ``padding`` is true for tokens that nobody attends to, (batch, length). With ``causal`` tokens
    attend to those before them, and to themselves.

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
        """Return the tokens after the layer; those whose gate is closed are as they were."""
        self._check(u, padding, gate)
        if gate is not None:
            gate = gate.to(u.dtype).expand(*u.shape[:2], 1)
            picked = self._where_open(u, padding, gate) if readable(gate) else None
            if picked is not None:
                return picked
        seen = u + _times(self._attention(u, padding), gate)
        return seen + _times(self._thought(seen), gate)

    def flops_where(self, active: Tensor, shape: Sequence[int]) -> Tensor:
        """Return the FLOPs of each example, from which positions of a state of this shape run.

        >>> unit = TransformerUnit(32, heads=4)
        >>> active = torch.tensor([[False] * 10, [True] * 5 + [False] * 5, [True] * 10]).unsqueeze(2)
        >>> unit.flops_where(active, (3, 10, 32))
        tensor([     0, 149760, 258560])
        """
        tokens = active.expand(*shape[:2], 1).sum((1, 2))
        flops: Tensor = self._flops(tokens, tokens > 0, shape[1])
        return flops

    def _pays(self, counts: list[int], length: int) -> bool:
        """Whether it takes less time to compute so many tokens of each example than all."""
        tokens, everyone = sum(counts), len(counts) * length
        if not 0 < tokens <= MOST * everyone:
            return False
        least = LEAST / 2 if torch.is_grad_enabled() else LEAST
        return (everyone - tokens) * self._of_a_token(length) >= least

    def _of_a_token(self, length: int) -> int:
        """Return the FLOPs of a token besides its key and its value."""
        return 4 * self.size * (self.size + length + self.linear1.out_features)

    def _flops(self, tokens: Any, examples: Any, length: int) -> Any:
        """Return those of so many tokens, and of the keys and values of their examples."""
        return tokens * self._of_a_token(length) + examples * (4 * length * self.size**2)

    def _where_open(self, u: Tensor, padding: Tensor | None, gate: Tensor) -> Tensor | None:
        """Compute what has an open gate; None if it takes no longer to compute everything."""
        is_open = gate.squeeze(2) != 0
        counts: list[int] = is_open.sum(1).tolist()
        if not any(counts) and not torch.is_grad_enabled():
            return u  # else all of it has gradients, if only zeros, as optimizers and DDP expect
        if not all(counts):
            return self._for(is_open.any(1).nonzero().squeeze(1), u, padding, gate)
        return self._at(is_open, counts, u, padding, gate) if self._pays(counts, u.size(1)) else None

    def _for(self, alive: Tensor, u: Tensor, padding: Tensor | None, gate: Tensor) -> Tensor:
        """Compute some examples only, for in the others all tokens have halted."""
        left = None if padding is None else padding.index_select(0, alive)
        moved = self.forward(u.index_select(0, alive), left, gate=gate.index_select(0, alive))
        return _put(u, alive, moved)

    def _at(
        self, is_open: Tensor, counts: list[int], u: Tensor, padding: Tensor | None, gate: Tensor
    ) -> Tensor:
        """Compute some tokens only, of which every example has one at least."""
        flat, rows = u.flatten(0, 1), is_open.flatten().nonzero().squeeze(1)
        weights = gate.flatten(0, 1).index_select(0, rows)
        seen = self._attention_at(rows, counts, u, padding) * weights + flat.index_select(0, rows)
        return _put(flat, rows, seen + self._thought(seen) * weights).view_as(u)

    def _attention(self, u: Tensor, padding: Tensor | None) -> Tensor:
        """Return what attention adds to each token."""
        projection, mask = self._projection(), _seen(padding)
        queries, keys, values = F.linear(self.norm1(u), *projection).chunk(3, -1)
        causal = self.causal and mask is None
        if self.causal and mask is not None:
            mask = mask & torch.ones(u.size(1), u.size(1), dtype=torch.bool, device=u.device).tril()
        return self._shown(self._look(queries, keys, values, mask, causal))

    def _attention_at(self, rows: Tensor, counts: list[int], u: Tensor, padding: Tensor | None) -> Tensor:
        """Return what attention adds to these tokens, one after the other; so many of each example."""
        weight, bias = self._projection()
        x, size = self.norm1(u), self.size
        asked = F.linear(
            x.flatten(0, 1).index_select(0, rows), weight[:size], None if bias is None else bias[:size]
        )
        keys, values = F.linear(x, weight[size:], None if bias is None else bias[size:]).chunk(2, -1)
        seen, last = _seen(padding), rows % u.size(1)
        looked, found = [], []
        for examples, take, real in _groups(counts, u.device, self._is_even(counts, u.size(1))):
            mask, own = seen, (keys, values)
            if len(examples) < len(u):
                own = keys.index_select(0, examples), values.index_select(0, examples)
                mask = None if mask is None else mask.index_select(0, examples)
            if self.causal:
                before = torch.arange(u.size(1), device=u.device) <= last[take][:, None, :, None]
                mask = before if mask is None else mask & before
            queries = asked.index_select(0, take.flatten()).view(*take.shape, size)
            looked.append(self._look(queries, *own, mask).flatten(0, 1).index_select(0, real))
            found.append(take.flatten().index_select(0, real))
        if len(looked) > 1:
            looked = [torch.empty_like(asked).index_copy(0, torch.cat(found), torch.cat(looked))]
        return self._shown(looked[0])

    def _is_even(self, counts: list[int], length: int) -> bool:
        """Whether little is lost if every example attends as often as the one with most open tokens.

        In groups, 8 × 768 tokens of 256 features with 0 to 50 % open took 7 % less time on 2 cores, for a
        fifth would be lost. Of 32 × 64, it would be a fiftieth, and groups took 8 % longer.
        """
        tokens, examples = sum(counts), len(counts)
        lost = 4 * self.size * length * (examples * max(counts) - tokens)
        return bool(lost <= self._flops(tokens, examples, length) / 20)

    def _projection(self) -> tuple[Tensor, Tensor | None]:
        """Return weight and bias of queries, keys and values."""
        return self.self_attn.in_proj_weight, self.self_attn.in_proj_bias

    def _look(
        self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, causal: bool = False
    ) -> Tensor:
        """Attend from queries to tokens."""
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


def _groups(
    counts: list[int], device: torch.device, together: bool = False
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield examples that have about as many rows, or all ``together``, and which these rows are.

    All rows lie one after the other, those of an example together; an example that has fewer than another of
    its group takes its last row several times, and ``real`` says which are none of these.

    >>> for examples, take, real in _groups([3, 1, 2], torch.device("cpu")):
    ...     print(examples.tolist(), take.tolist(), real.tolist())
    [0, 2] [[0, 1, 2], [4, 5, 5]] [0, 1, 2, 3, 4]
    [1] [[3]] [0]
    """
    starts = [0, *itertools.accumulate(counts)]
    groups: list[list[int]] = [[*range(len(counts))]]
    if not together and 2 * min(counts) < max(counts):
        groups = []
        for example in sorted(range(len(counts)), key=counts.__getitem__, reverse=True):
            if not groups or 2 * counts[example] < counts[groups[-1][0]]:
                groups.append([])
            groups[-1].append(example)
    for examples in groups:
        own = torch.tensor([counts[example] for example in examples], device=device)[:, None]
        first = torch.tensor([starts[example] for example in examples], device=device)[:, None]
        places = torch.arange(max(counts[example] for example in examples), device=device)
        real = (places < own).flatten().nonzero().squeeze(1)
        yield torch.tensor(examples, device=device), first + torch.minimum(places, own - 1), real


def _put(u: Tensor, rows: Tensor, moved: Tensor) -> Tensor:
    """Return the tokens with these rows in the place of theirs, in the precision that holds both."""
    kind = torch.promote_types(u.dtype, moved.dtype)
    return u.to(kind).index_copy(0, rows, moved.to(kind))
