"""Layers of attention on their active tokens, which are picked by rows; differentiable.

Of halted tokens keys and values are computed, no more, and of an example whose tokens have all halted
nothing. The host waits for the gate. Where little would be saved the layer computes everything by its
formula.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from torchpact.checks import readable
from torchpact.engines.attention.rectangles import groups_of_rows
from torchpact.flops.attention import key_value_flops, token_flops
from torchpact.specs import AttentionLayer, register_gated

MOST = 0.9
"""The share of tokens above which it does not pay to pick them: with 90 % of 8×197×384 both took as long."""
LEAST = 3e7
"""The FLOPs that must be saved for it to pay; half as many in training.

On 2 cores, of layers of 32 to 256 features, those that saved 13 to 26 million took 0.76 to 0.96 times as long
masked as picked, 35 to 40 million 0.93 to 1.16, 63 million or more 1.05 to 1.7; in training 7 to 14 million
0.89 to 1.09, 20 to 26 million 0.98 to 1.10.
"""


@register_gated(AttentionLayer)
def attend_by_rows(
    spec: AttentionLayer, u: Tensor, gate: Tensor, padding: Tensor | None = None
) -> Tensor | None:
    """Return the tokens after a layer that computes those with an open gate.

    Args:
        spec: The layer.
        u: Tokens, of shape (batch, length, size).
        gate: The active positions mask, of shape (batch, length, 1) or (batch, 1, 1), in the precision of u.
        padding: True for tokens that others do not attend to, of shape (batch, length).

    Returns:
        The tokens; None where computing all of them takes no longer, where the gate cannot be read, and for
        layers other than :class:`~torchpact.models.TransformerUnit`.

    """
    if not spec.is_unit or not readable(gate):
        return None
    gate = gate.expand(*u.shape[:2], 1)
    is_open = gate.squeeze(2) != 0
    counts: list[int] = is_open.sum(1).tolist()
    if not any(counts) and not torch.is_grad_enabled():
        return u  # else all of it has gradients, if only zeros, as optimizers and DDP expect
    if all(counts):
        return _on_rows(spec, is_open, counts, u, padding, gate) if pays(spec, counts, u.size(1)) else None
    alive = is_open.any(1).nonzero().squeeze(1)
    counts = [count for count in counts if count]
    is_open, left, gate = (x.index_select(0, alive) for x in (is_open, u, gate))
    padding = None if padding is None else padding.index_select(0, alive)
    if pays(spec, counts, u.size(1)):
        moved = _on_rows(spec, is_open, counts, left, padding, gate)
    else:
        moved = _on_all(spec, left, padding, gate)
    return _put(u, alive, moved)


def pays(spec: AttentionLayer, counts: list[int], length: int) -> bool:
    """Return whether it takes less time to compute so many tokens of each example than all of them.

    Args:
        spec: The layer.
        counts: The open tokens of each example.
        length: The tokens of an example.

    """
    tokens, everything = sum(counts), len(counts) * length
    if not 0 < tokens <= MOST * everything:
        return False
    least = LEAST / 2 if torch.is_grad_enabled() else LEAST
    return (everything - tokens) * token_flops(spec, length) >= least


def _on_all(spec: AttentionLayer, u: Tensor, padding: Tensor | None, gate: Tensor) -> Tensor:
    """Compute all tokens, and mask."""
    assert spec.qkv is not None  # see is_unit
    queries, keys, values = spec.qkv(spec.norm1(u)).chunk(3, -1)
    mask = _visible(padding)
    if spec.causal and mask is not None:
        mask = mask & torch.ones(u.size(1), u.size(1), dtype=torch.bool, device=u.device).tril()
    attended = _attend(spec, queries, keys, values, mask, causal=spec.causal and mask is None)
    attended = u + _out_proj(spec, attended) * gate
    return attended + _mlp(spec, attended) * gate


def _on_rows(
    spec: AttentionLayer,
    is_open: Tensor,
    counts: list[int],
    u: Tensor,
    padding: Tensor | None,
    gate: Tensor,
) -> Tensor:
    """Compute the open tokens, at least one of every example."""
    flat, rows = u.flatten(0, 1), is_open.flatten().nonzero().squeeze(1)
    weights = gate.flatten(0, 1).index_select(0, rows)
    attended = _attention_of_rows(spec, rows, counts, u, padding) * weights + flat.index_select(0, rows)
    return _put(flat, rows, attended + _mlp(spec, attended) * weights).view_as(u)


def _attention_of_rows(
    spec: AttentionLayer, rows: Tensor, counts: list[int], u: Tensor, padding: Tensor | None
) -> Tensor:
    """Return what attention adds to these tokens, one after the other; so many of each example."""
    assert spec.qkv is not None
    weight, bias, size = spec.qkv.weight, spec.qkv.bias, spec.size
    x, length = spec.norm1(u), u.size(1)
    picked = x.flatten(0, 1).index_select(0, rows)
    queries = F.linear(picked, weight[:size], None if bias is None else bias[:size])
    keys, values = F.linear(x, weight[size:], None if bias is None else bias[size:]).chunk(2, -1)
    visible, last = _visible(padding), rows % length
    results, places = [], []
    for examples, take, real in groups_of_rows(counts, u.device, _is_even(spec, counts, length)):
        mask, own_keys, own_values = visible, keys, values
        if len(examples) < len(u):
            own_keys, own_values = keys.index_select(0, examples), values.index_select(0, examples)
            mask = None if mask is None else mask.index_select(0, examples)
        if spec.causal:
            before = torch.arange(length, device=u.device) <= last[take][:, None, :, None]
            mask = before if mask is None else mask & before
        own_queries = queries.index_select(0, take.flatten()).view(*take.shape, size)
        attended = _attend(spec, own_queries, own_keys, own_values, mask)
        results.append(attended.flatten(0, 1).index_select(0, real))
        places.append(take.flatten().index_select(0, real))
    if len(results) > 1:
        results = [torch.empty_like(queries).index_copy(0, torch.cat(places), torch.cat(results))]
    return _out_proj(spec, results[0])


def _is_even(spec: AttentionLayer, counts: list[int], length: int) -> bool:
    """Whether little is lost if every example attends as often as the one with most open tokens.

    In groups, 8 × 768 tokens of 256 features with 0 to 50 % open took 7 % less time on 2 cores, for a
    fifth would be lost. Of 32 × 64, it would be a fiftieth, and groups took 8 % longer.
    """
    tokens, examples = sum(counts), len(counts)
    lost = 4 * spec.size * length * (examples * max(counts) - tokens)
    return lost <= (tokens * token_flops(spec, length) + examples * key_value_flops(spec, length)) / 20


def _attend(
    spec: AttentionLayer,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    causal: bool = False,
) -> Tensor:
    """Attend from queries to tokens."""
    queries, keys, values = (
        x.unflatten(-1, (spec.heads, -1)).transpose(1, 2) for x in (queries, keys, values)
    )
    attended = F.scaled_dot_product_attention(
        queries, keys, values, attn_mask=mask, dropout_p=spec.attention_dropout, is_causal=causal
    )
    return attended.transpose(1, 2).flatten(2)


def _out_proj(spec: AttentionLayer, attended: Tensor) -> Tensor:
    projected: Tensor = spec.dropouts[0](spec.out(attended))
    return projected


def _mlp(spec: AttentionLayer, u: Tensor) -> Tensor:
    """Return what the MLP adds to each token."""
    _, inside, after = spec.dropouts
    added: Tensor = after(spec.down(inside(spec.activation(spec.up(spec.norm2(u))))))
    return added


def _visible(padding: Tensor | None) -> Tensor | None:
    """Return which tokens others may attend to, as attention takes it."""
    return None if padding is None else ~padding[:, None, None, :]


def _put(u: Tensor, rows: Tensor, moved: Tensor) -> Tensor:
    """Return the tokens with these rows in the place of theirs, in the precision that holds both."""
    kind = torch.promote_types(u.dtype, moved.dtype)
    return u.to(kind).index_copy(0, rows, moved.to(kind))
