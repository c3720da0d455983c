"""Transformer layers whose tokens halt: the same as masked ones, and as PyTorch's where nobody does."""

import copy
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from threading import Barrier

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import torchpact as tp
from torchpact.engines.attention import rows
from torchpact.flops.attention import attention_flops
from torchpact.models import TransformerUnit
from torchpact.nn.transformer import attention_layer
from torchpact.specs import dense_execution, gated_execution, register_price


@pytest.fixture(autouse=True)
def _small_ones_pay(monkeypatch):
    monkeypatch.setattr(rows, "LEAST", 0)


class Masked(TransformerUnit):
    """The definition, by layers of torch: all is computed, and what is not wanted multiplied by zero."""

    def forward(self, u, padding=None, gate=None):  # type: ignore[override]
        gate = torch.ones_like(u[..., :1]) if gate is None else gate
        x, later = self.norm1(u), torch.ones(u.size(1), u.size(1), dtype=torch.bool).triu(1)
        options = {"attn_mask": later if self.causal else None, "key_padding_mask": padding}
        seen = u + gate * self.self_attn(x, x, x, need_weights=False, **options)[0]
        return seen + gate * self.linear2(self.activation(self.linear1(self.norm2(seen))))


def units(kind=TransformerUnit, **options):
    torch.manual_seed(0)
    made = kind(12, heads=3, hidden=20, **options)
    for parameter in made.parameters():
        nn.init.normal_(parameter, 0, 0.3)  # norms and biases, too, are none that do nothing
    return made


def padded(batch, length):
    return torch.arange(length) >= torch.randint(2, length + 1, (batch, 1))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("pads", [False, True])
@pytest.mark.parametrize("bias", [True, False])
def test_where_nobody_halts_it_is_the_layer_of_torch(causal, pads, bias):
    layer = nn.TransformerEncoderLayer(
        12, 3, 20, dropout=0.0, activation="gelu", norm_first=True, batch_first=True, bias=bias
    )
    unit = TransformerUnit.of(layer, causal=causal)
    u, padding = torch.randn(4, 7, 12), padded(4, 7) if pads else None
    mask = torch.ones(7, 7, dtype=torch.bool).triu(1) if causal else None
    expected = layer(u, src_mask=mask, src_key_padding_mask=padding)
    for gate in (None, torch.ones(4, 7, 1), torch.ones(4, 1, 1)):
        assert torch.allclose(unit(u, padding, gate=gate), expected, atol=1e-5)
    assert unit.training == layer.training


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"bias": False}])
@pytest.mark.parametrize("pads", [False, True])
def test_outputs_and_gradients_are_those_of_the_masked_layer(share, options, pads):
    ours, masked = units(**options), units(Masked, **options)
    u = torch.randn(5, 9, 12, requires_grad=True)
    padding = padded(5, 9) if pads else None
    gate = torch.rand(5, 9, 1)
    gate = torch.where(gate < share, gate + 0.1, 0.0).requires_grad_()
    results = []
    for unit in (ours, masked):
        output = unit(u, padding, gate=gate)
        asked = [u, gate, *unit.parameters()]
        found = torch.autograd.grad(output.square().sum(), asked, materialize_grads=True)
        closed = gate == 0  # where a clipped mask has no gradient
        results.append([output, found[0], found[1].masked_fill(closed, 0.0), *found[2:]])
    for got, expected in zip(*results, strict=True):
        assert got.shape == expected.shape
        assert torch.allclose(got, expected, rtol=1e-3, atol=1e-4)


def test_tokens_that_have_halted_stay_and_are_seen():
    unit, u, gate = units(), torch.randn(2, 6, 12), torch.ones(2, 6, 1)
    gate[:, 2] = 0
    output = unit(u, gate=gate)
    assert torch.equal(output[:, 2], u[:, 2])
    other = u.clone()
    other[:, 2] += torch.randn(2, 12)
    changed = (unit(other, gate=gate) - output).abs().amax(2) > 1e-3
    assert changed.all()
    hidden = torch.zeros(2, 6, dtype=torch.bool)
    hidden[:, 2] = True  # unless they are padding
    left = (unit(other, hidden, gate=gate) - unit(u, hidden, gate=gate)).abs().amax(2) > 1e-3
    assert left.sum(1).tolist() == [1, 1]


@pytest.mark.parametrize("counts", [(3, 3, 3), (9, 9, 9), (4, 0, 4), (7, 1, 3)])
@torch.no_grad()
def test_halted_tokens_cost_what_it_says(counts):
    unit = units()
    gate = (torch.arange(9) < torch.tensor(counts)[:, None]).unsqueeze(2)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        unit(torch.randn(3, 9, 12), gate=gate.float())
    said = attention_flops(attention_layer(unit), gate, 9)
    assert counter.get_total_flops() == said.sum()
    assert said[1] == 0 or counts[1]


@pytest.mark.parametrize("options", [{}, {"causal": True}])
@torch.no_grad()
def test_examples_may_have_very_many_open_tokens_or_few(options):
    ours, masked = units(**options), units(Masked, **options)
    u, padding = torch.randn(7, 64, 12), padded(7, 64)
    gate = (torch.arange(64) < torch.tensor([1, 60, 2, 33, 30, 0, 7])[:, None])[..., None].float()
    gate = gate[:, torch.randperm(64)]
    assert torch.allclose(ours(u, padding, gate=gate), masked(u, padding, gate=gate), atol=1e-4)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        ours(u, padding, gate=gate)
    spec = attention_layer(ours)
    said = attention_flops(spec, gate > 0, 64).sum()
    everything = attention_flops(spec, torch.ones(7, 64, 1) > 0, 64).sum()
    assert said < counter.get_total_flops() < said + 0.1 * everything  # 0.3 if all had room for 60


def flops_of(unit, u, gate):
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        unit(u, gate=gate)
    return counter.get_total_flops()


@torch.no_grad()
def test_where_little_would_be_saved_none_are_picked(monkeypatch):
    unit, u = units(), torch.randn(2, 20, 12)
    gate = torch.ones(2, 20, 1)
    everything = flops_of(unit, u, gate)
    gate[:, 3] = 0
    assert flops_of(unit, u, gate) == everything
    gate[:, 3:] = 0
    saved = 2 * 17 * 4 * 12 * (12 + 20 + 20)
    assert flops_of(unit, u, gate) == everything - saved
    monkeypatch.setattr(rows, "LEAST", saved)
    assert flops_of(unit, u, gate) == everything - saved
    monkeypatch.setattr(rows, "LEAST", saved + 1)
    assert flops_of(unit, u, gate) == everything
    with torch.enable_grad():
        assert flops_of(unit, u, gate) == everything - saved


@pytest.mark.parametrize("causal", [False, True])
@torch.no_grad()
def test_examples_without_open_tokens_are_left_out_even_where_tokens_are_not_picked(monkeypatch, causal):
    unit, masked, u = units(causal=causal), units(Masked, causal=causal), torch.randn(4, 9, 12)
    monkeypatch.setattr(rows, "LEAST", 1e9)
    gate = torch.tensor([1.0, 0.0, 0.5, 0.0]).view(4, 1, 1)
    assert flops_of(unit, u, gate) == flops_of(unit, u, torch.ones(4, 1, 1)) / 2
    for padding in (None, padded(4, 9)):
        expected = masked(u, padding, gate=gate.expand(4, 9, 1))
        assert torch.allclose(unit(u, padding, gate=gate), expected, atol=1e-5)


def with_gradients(unit, u, padding, gate):
    output = unit(u, padding, gate=gate)
    wanted = [u, gate, *unit.parameters()]
    found = torch.autograd.grad(output.square().sum(), wanted, materialize_grads=True)
    return [output, found[0], found[1].masked_fill(gate == 0, 0.0), *found[2:]]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("per", ["token", "example"])
def test_dense_execution_is_the_same_in_value_and_in_every_gradient(seed, causal, per):
    unit = units(causal=causal)
    torch.manual_seed(seed)
    batch, length = int(torch.randint(1, 6, ())), int(torch.randint(1, 12, ()))
    u = torch.randn(batch, length, 12, requires_grad=True)
    padding = (torch.arange(length) >= torch.randint(1, length + 1, (batch, 1))) if seed % 2 else None
    gate = torch.rand(batch, length if per == "token" else 1, 1)
    gate = (gate * (torch.rand_like(gate) < seed / 5)).requires_grad_()
    got = with_gradients(unit, u, padding, gate)
    with dense_execution():
        expected = with_gradients(unit, u, padding, gate)
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.shape == theirs.shape
        assert torch.allclose(ours, theirs, rtol=1e-3, atol=1e-4)


@torch.no_grad()
def test_dense_execution_computes_everything_and_ends():
    unit, u, gate = units(), torch.randn(2, 20, 12), torch.zeros(2, 20, 1)
    gate[:, :2] = 1
    few = flops_of(unit, u, gate)
    with dense_execution():
        everything = flops_of(unit, u, gate)
        with gated_execution():
            assert flops_of(unit, u, gate) == few
        assert flops_of(unit, u, gate) == everything
    with pytest.raises(KeyError), dense_execution():
        raise KeyError
    assert flops_of(unit, u, gate) == few
    assert everything == flops_of(unit, u, torch.ones(2, 20, 1))
    assert few < everything / 2


class Noting(nn.Linear):
    """A layer that remembers how many rows it was given."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.seen = []

    def forward(self, x):
        self.seen.append(x.numel() // x.size(-1))
        return super().forward(x)


def test_threads_with_other_settings_do_not_disturb_each_other():
    u, gate, both = torch.randn(2, 20, 12), torch.zeros(2, 20, 1), Barrier(3)
    gate[:, :2] = 1

    def work(setting):
        unit = units()
        unit.linear1 = Noting(12, 20)
        with setting(), torch.no_grad():
            for _ in range(20):
                both.wait(timeout=60)
                unit(u, gate=gate)
        return unit.linear1.seen

    settings = (dense_execution, gated_execution, nullcontext)
    with ThreadPoolExecutor(3) as threads, dense_execution():  # which other threads do not inherit
        dense, picked, default = threads.map(work, settings)
    assert dense == [40] * 20
    assert picked == default == [4] * 20


def blocks(mode, head, **options):
    for kind in (TransformerUnit, Masked):
        made = [units(kind, **options) for _ in range(5)]
        yield tp.AdaptiveBlock(made, copy.deepcopy(head), mode=mode)


def sure_head():
    torch.manual_seed(1)
    head = nn.Linear(12, 1)
    nn.init.normal_(head.weight, 0, 2)  # sure of itself, so that relaxed masks are clipped
    return head


class OfExample(nn.Module):
    """One decision an example, by its first token."""

    def __init__(self):
        super().__init__()
        self.linear = sure_head()

    def forward(self, u):
        return self.linear(u[:, :1])


@pytest.mark.parametrize("mode", ["relaxed", "discrete", "thresholded", "act"])
@pytest.mark.parametrize("head", [sure_head, OfExample])
def test_a_block_trains_as_with_masked_layers(mode, head):
    u, padding = torch.randn(4, 7, 12), padded(4, 7)
    results = []
    for block in blocks(mode, head()):
        torch.manual_seed(2)
        output, ponder = block(u, padding)
        tp.map_loss(output.square().mean((1, 2)), ponder, tau=0.1).backward()
        results.append([output, ponder.cost, *(p.grad for p in block.parameters())])
    for got, expected in zip(*results, strict=True):
        assert torch.allclose(got, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("head", [sure_head, OfExample])
@torch.no_grad()
def test_flops_are_counted_and_deployed_networks_do_the_same(head):
    u, padding = torch.randn(4, 7, 12), padded(4, 7)
    block, masked = blocks("thresholded", head())
    expected, reference = masked(u, padding)
    steps = reference.steps
    assert steps.unique().numel() > 1, "all halted at once: the comparison is empty"

    per_head = 2 * 12 * (1 if head is OfExample else 7)
    cost = sum(attention_flops(attention_layer(block.steps[0]), steps > index, 7) for index in range(5))
    asked = sum((steps > index).double().mean((1, 2)) * per_head for index in range(4))
    assert tp.count_flops(block, (u, padding)).total.tolist() == [round(x) for x in (cost + asked).tolist()]

    fast = tp.deploy(block, (u, padding))
    output, ponder = fast(u, padding)
    assert torch.equal(ponder.steps, steps)
    assert torch.allclose(output, expected, atol=1e-4)
    row = fast.report.measurements[0]
    assert row.flops == pytest.approx(float((cost + asked).mean()), rel=1e-3)
    if head is sure_head:
        assert "rows" in row.seconds


def test_compiled_it_is_masked():
    unit = units().eval()
    u, gate = torch.randn(2, 5, 12), torch.rand(2, 5, 1).round()
    compiled = torch.compile(unit, backend="eager", fullgraph=True)
    assert torch.allclose(compiled(u, gate=gate), unit(u, gate=gate), atol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
def test_autocast_keeps_the_precision_of_the_masked_layer(causal):
    ours, masked = units(causal=causal), units(Masked, causal=causal)
    u, gate = torch.randn(2, 5, 12), torch.rand(2, 5, 1).round()
    with torch.autocast("cpu", torch.bfloat16):
        got, expected = ours(u, gate=gate), masked(u, gate=gate)
    assert got.dtype == expected.dtype
    assert torch.allclose(got, expected, atol=0.1)
    half = ours.bfloat16()
    assert half(u.bfloat16(), gate=gate.bfloat16()).dtype == torch.bfloat16


def kept_bytes(unit, u, gate):
    """What is kept for the backward pass, each piece of memory once."""
    kept = {}

    def note(x):
        storage = x.untyped_storage()
        kept[storage.data_ptr()] = storage
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        unit(u, gate=gate)
    return sum(storage.nbytes() for storage in kept.values())


def test_training_keeps_less_than_masking_or_little_more():
    unit, u = TransformerUnit(64, 4), torch.randn(8, 100, 64, requires_grad=True)
    masked = kept_bytes(unit, u, torch.ones(8, 100, 1))
    for share, most in ((10, 0.55), (50, 0.85), (89, 1.1)):
        gate = (torch.arange(100) < share)[:, None].expand(8, 100, 1).float()
        assert kept_bytes(unit, u, gate) < most * masked


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("options", [{}, {"causal": True}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu_outputs_and_gradients_are_those_of_the_cpu(options, dtype):
    unit = units(**options)
    u, padding = torch.randn(5, 9, 12), padded(5, 9)
    gate = torch.rand(5, 9, 1).sub(0.5).clamp(min=0)
    results = []
    for device in ("cpu", "cuda"):
        own = copy.deepcopy(unit).to(device, dtype)
        given = u.to(device, dtype).requires_grad_()
        output = own(given, padding.to(device), gate=gate.to(device, dtype))
        grads = torch.autograd.grad(output.float().square().sum(), [given, *own.parameters()])
        results.append([x.float().cpu() for x in (output, *grads)])
    for got, expected in zip(*results, strict=True):
        assert (got - expected).norm() <= (1e-4 if dtype == torch.float32 else 5e-2) * expected.norm() + 1e-5


def test_nothing_at_all_is_fine():
    unit = units()
    assert unit(torch.randn(0, 5, 12), gate=torch.ones(0, 5, 1)).shape == (0, 5, 12)
    assert unit(torch.randn(3, 0, 12), gate=torch.ones(3, 0, 1)).shape == (3, 0, 12)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"u": torch.randn(5, 12)}, r"^expected tokens of shape \(batch, length, 12\), got \(5, 12\)$"),
        ({"u": torch.randn(2, 5, 8)}, r"^expected tokens of shape \(batch, length, 12\), got \(2, 5, 8\)$"),
        ({"padding": torch.zeros(2, 5)}, r"^expected padding of \(2, 5\) booleans, got \(2, 5\) of torch.fl"),
        ({"padding": torch.zeros(2, 4) > 0}, r"^expected padding of \(2, 5\) booleans, got \(2, 4\)"),
        (
            {"gate": torch.ones(2, 5)},
            r"^expected a gate for every token, \(2, 5, 1\), or example, got \(2, 5\)$",
        ),
    ],
)
def test_what_does_not_fit_is_said_in_a_line(given, message):
    with pytest.raises(ValueError, match=message):
        units()(**{"u": torch.randn(2, 5, 12)} | given)


def test_a_copy_of_a_layer_is_like_it_and_apart_from_it():
    layer = nn.TransformerEncoderLayer(
        12, 3, activation=nn.PReLU(), norm_first=True, batch_first=True
    ).double()
    layer.register_module("norm2", nn.RMSNorm(12, dtype=torch.double))
    layer.dropout1.p = 0.3
    layer.linear1.requires_grad_(False)
    state = torch.get_rng_state()
    unit = TransformerUnit.of(layer.eval(), causal=True)
    assert torch.equal(torch.get_rng_state(), state)
    u, mask = torch.randn(2, 5, 12).double(), torch.ones(5, 5, dtype=torch.bool).triu(1)
    assert torch.allclose(unit(u), layer(u, src_mask=mask))
    assert (unit.dropout1.p, unit.training, unit.linear1.weight.requires_grad) == (0.3, False, False)
    assert not {id(p) for p in unit.parameters()} & {id(p) for p in layer.parameters()}
    assert TransformerUnit.of(unit).causal
    assert "causal=True" in repr(unit)


@pytest.mark.parametrize(
    ("layer", "error", "message"),
    [
        (
            nn.TransformerEncoderLayer(12, 3),
            ValueError,
            r"^expected a layer with norm_first=True, batch_first=True, got norm_first=False, batch_first=F",
        ),
        (nn.Linear(3, 3), TypeError, r"^expected an nn.TransformerEncoderLayer, got Linear$"),
        (units(Masked), TypeError, r"^expected an nn.TransformerEncoderLayer, got Masked$"),
    ],
)
def test_other_layers_are_refused(layer, error, message):
    with pytest.raises(error, match=message):
        TransformerUnit.of(layer)


class Pixels(tp.Residual):
    """A step of one's own that has a price: so much for each pixel that runs."""


@register_price(Pixels)
def price_of_pixels(step, active, shape):
    assert type(step) is Pixels
    assert shape[1:] == (4, 8, 6)
    return 100 * active.flatten(1).sum(1)


class Changed(Pixels):
    """It does something else, and has no price."""

    def forward(self, u, *context, gate=None, **named):
        return super().forward(u, *context, gate=gate, **named)


@torch.no_grad()
def test_other_steps_may_have_a_price_and_subclasses_need_one_of_their_own():
    torch.manual_seed(0)
    u, head = torch.randn(2, 4, 8, 6), nn.Conv2d(4, 1, 1)
    for kind, price in ((Pixels, 100), (Changed, 2 * 9 * 4 * 4)):
        made = [kind(nn.Conv2d(4, 4, 3, padding=1)) for _ in range(3)]
        block = tp.AdaptiveBlock(made, head, mode="thresholded")
        _, ponder = block(u)
        steps = ponder.steps.flatten(1)
        expected = price * steps.sum(1) + 2 * 4 * steps.clamp(max=2).sum(1)
        assert tp.count_flops(block, u).total.tolist() == expected.tolist()
        assert tp.count_flops(block, u[:0]).total.tolist() == []
    units = [TransformerUnit(12, 3) for _ in range(2)]
    assert (
        tp.count_flops(tp.AdaptiveBlock(units, nn.Linear(12, 1)), torch.randn(0, 5, 12)).total.tolist() == []
    )
