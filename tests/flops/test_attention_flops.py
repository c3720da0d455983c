"""FLOPs of layers of attention: against numbers by hand, and against what torch counts."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import torchpact as tp
from torchpact.flops.attention import attention_flops
from torchpact.models import TransformerUnit
from torchpact.nn.transformer import attention_layer
from torchpact.specs import (
    AttentionLayer,
    Opaque,
    Projection,
    dense_execution,
    price_of,
    register_price,
    step_spec,
)


def test_by_hand():
    spec = attention_layer(TransformerUnit(4, heads=2, hidden=6))
    active = torch.tensor([[0, 0, 0], [1, 0, 0], [1, 0, 1], [1, 1, 1]], dtype=torch.bool).unsqueeze(2)
    # a token: query and output projection 2·2·4·4, scores and weighted sum 2·2·3·4, MLP 2·2·4·6
    token = 64 + 48 + 96
    # keys and values of three tokens
    others = 2 * 2 * 3 * 4 * 4
    assert attention_flops(spec, active, 3).tolist() == [
        0,
        token + others,
        2 * token + others,
        3 * token + others,
    ]


def test_grouped_heads_gated_mlps_windows_and_padding_by_hand():
    def part(inputs, outputs):
        return Projection(torch.zeros(outputs, inputs))

    spec = AttentionLayer(
        norm1=torch.nn.Identity(),
        norm2=torch.nn.Identity(),
        query=part(4, 12),
        key=part(4, 6),
        value=part(4, 6),
        out=part(12, 4),
        up=part(4, 5),
        gate=part(4, 5),
        down=part(5, 4),
        heads=4,
        kv_heads=2,
        activation=torch.relu,
        window=3,
    )
    assert (spec.size, spec.head_size, spec.hidden) == (4, 3, 5)
    real = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 0, 0, 0], [1, 1, 1, 1, 1]], dtype=torch.bool)
    active = torch.tensor([[1, 0, 1, 0, 1], [1, 1, 1, 1, 1], [0, 0, 0, 0, 0]], dtype=torch.bool).unsqueeze(2)
    # query and output projection 2·2·4·12, MLP 3·2·4·5; of a key 2·2·12, at most three of them
    token, key, own = 192 + 120, 48, 2 * 2 * 4 * 6
    expected = [2 * (token + 3 * key) + 4 * own, 2 * (token + 2 * key) + 2 * own, 0]
    assert attention_flops(spec, active, 5, real).tolist() == expected
    everything = torch.ones(3, 5, dtype=torch.bool)
    unpadded = attention_flops(spec, active, 5).tolist()
    assert unpadded == attention_flops(spec, active, 5, everything).tolist()
    assert unpadded == [3 * (token + 3 * key) + 5 * own, 5 * (token + 3 * key) + 5 * own, 0]
    # one token that attends to two of a cache, too
    assert attention_flops(spec, active[:1, :1], 1, past=2).tolist() == [token + 3 * key + own]
    assert attention_flops(spec, active[:1, :1], 1, everything[:1, :1], past=1).tolist() == [
        token + 2 * key + own
    ]


def test_a_decision_for_an_example_is_one_for_all_of_its_tokens():
    spec = attention_layer(TransformerUnit(4, heads=2, hidden=6))
    active = torch.tensor([True, False, True]).view(3, 1, 1)
    each = attention_flops(spec, active.expand(3, 5, 1), 5)
    assert attention_flops(spec, active, 5).tolist() == each.tolist()
    assert attention_flops(spec, active[:0], 5).tolist() == []


@pytest.mark.parametrize(("batch", "length", "size", "heads", "hidden"), [(2, 7, 12, 3, 20), (1, 1, 8, 1, 8)])
@torch.no_grad()
def test_with_all_tokens_active_it_is_what_torch_counts(batch, length, size, heads, hidden):
    unit = TransformerUnit(size, heads, hidden)
    with dense_execution(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        unit(torch.randn(batch, length, size))
    said = attention_flops(attention_layer(unit), torch.ones(batch, length, 1, dtype=torch.bool), length)
    assert said.sum() == counter.get_total_flops()


def test_the_price_is_known_of_a_layer_with_hooks():
    unit = TransformerUnit(4, heads=2)
    handle = unit.linear1.register_forward_hook(lambda *_: None)
    spec = step_spec(unit)
    assert isinstance(spec, Opaque)
    assert spec.reason.startswith("expected units and heads without forward hooks")
    assert isinstance(step_spec(unit, hooks=True), AttentionLayer)
    handle.remove()
    assert isinstance(step_spec(unit), AttentionLayer)


def plain(u):
    return u


@register_price(plain)
def price_of_plain(step, active, shape):
    assert step is plain
    return active.flatten(1).sum(1) * shape[-1]


def test_functions_may_have_a_price():
    block = tp.AdaptiveBlock([plain, lambda u: u], lambda u: u[:, :1])
    price = price_of(block.steps[0])
    assert price is not None
    assert price(torch.ones(2, 1) > 0, (2, 8)).tolist() == [8, 8]
    assert price_of(block.steps[1]) is None


def test_what_is_changed_has_no_price():
    class Mean(torch.nn.Module):
        def forward(self, u):
            return u.mean(1, keepdim=True).expand(u.shape)

    @register_price(Mean)
    def price_of_mean(step, active, shape):
        return active.flatten(1).sum(1)

    step = Mean()
    price = price_of(step)
    assert price is not None
    assert price(torch.ones(2, 3) > 0, (2, 3)).tolist() == [3, 3]
    step.forward = lambda u: u  # type: ignore[method-assign]
    assert price_of(step) is None
