"""Layers of pretrained transformers, called one by one: as dense ones whose halted tokens are kept."""

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import torchpact as tp
from torchpact.core.modes import Discrete, Relaxed, Thresholded
from torchpact.engines.attention import native, packed_layer
from torchpact.engines.attention.layers import LayersRunner
from torchpact.engines.attention.linear import PackedLinear, activation_name
from torchpact.engines.attention.ragged import Ragged, ranges_of, select
from torchpact.engines.base import Unsupported
from torchpact.specs import AttentionLayer, BlockSpec, LayerContext, LinearHead, NeverHead, Opaque, Projection

SIZE, HIDDEN, LAYERS = 12, 20, 4
FAMILIES = ("bert", "vit", "llama", "qwen", "gpt2")
CAUSAL = ("llama", "qwen", "gpt2")
WINDOW = 3


def linear(inputs, outputs, bias=True):
    weight = torch.randn(outputs, inputs) / math.sqrt(inputs)
    return Projection(weight, torch.randn(outputs) / 4 if bias else None)


def normal(kind, size):
    norm = kind(size, eps=1e-5)
    for parameter in norm.parameters():
        nn.init.normal_(parameter, 1.0 if parameter is norm.weight else 0.0, 0.2)
    return norm.requires_grad_(False)


def layer_of(family: str, index: int = 0) -> AttentionLayer:
    """A layer with random weights."""
    gated, kind = family in ("llama", "qwen"), nn.RMSNorm if family in ("llama", "qwen") else nn.LayerNorm
    parts: dict[str, Any] = {"norm1": normal(kind, SIZE), "norm2": normal(kind, SIZE)}
    parts |= {"up": linear(SIZE, HIDDEN, not gated), "down": linear(HIDDEN, SIZE, not gated)}
    if family in ("vit", "gpt2"):
        parts |= {"qkv": linear(SIZE, 3 * SIZE)}
    heads, shared, size = {"llama": (6, 2, 2), "qwen": (4, 2, 6)}.get(family, (3, 3, 4))
    if family not in ("vit", "gpt2"):
        parts |= {"query": linear(SIZE, heads * size, not gated)}
        parts |= {name: linear(SIZE, shared * size, not gated) for name in ("key", "value")}
    parts |= {"out": linear(heads * size, SIZE, not gated), "heads": heads, "causal": family in CAUSAL}
    if family == "bert":
        parts |= {"order": "post", "activation": nn.GELU()}
    elif family == "vit":
        parts |= {"scale1": torch.rand(SIZE), "scale2": torch.rand(SIZE), "activation": nn.functional.gelu}
    elif family == "gpt2":
        parts |= {"activation": nn.GELU(approximate="tanh")}
    else:
        parts |= {"kv_heads": shared, "head_size": size, "rotary": True, "gate": linear(SIZE, HIDDEN, False)}
        parts |= {"activation": nn.SiLU(), "index": index}
    if family == "qwen":
        parts |= {"q_norm": normal(kind, size), "k_norm": normal(kind, size), "scale": 0.3}
        parts |= {"window": WINDOW if index % 2 else None}
    return AttentionLayer(**parts)


class First(nn.Module):
    """The logit of the first token of an example."""

    def __init__(self, weight, bias):
        super().__init__()
        self.weight, self.bias = nn.Parameter(weight), nn.Parameter(bias)

    def forward(self, u):
        return u[:, :1] @ self.weight.T.to(u.dtype) + self.bias.to(u.dtype)


class Fixed(nn.Module):
    """Logits that are given."""

    def __init__(self, logits):
        super().__init__()
        self.logits = logits

    def forward(self, u):
        return self.logits


def block_of(family, per="token", mode=None, layers=LAYERS, heads=None):
    steps = tuple(layer_of(family, index) for index in range(layers))
    if heads is None:
        made = []
        for _ in range(layers - 1):
            weight, bias = torch.randn(1, SIZE), torch.randn(1) - 0.5
            module = First(weight, bias)
            made.append(LinearHead(weight, bias, module) if per == "token" else Opaque(module))
        heads = tuple(made)
    return BlockSpec(
        nn.Identity(), steps, heads, mode or Thresholded(), name="layers", label="mine", price=2.0
    )


def angles(length, size, start=0, batch=1):
    each = torch.arange(start, start + length)[:, None] / 10 ** (torch.arange(size // 2) / 2)
    each = torch.cat((each, each), -1).expand(batch, -1, -1)
    return each.cos(), each.sin()


def expected_layer(layer, u, mask, rotary, cache=None):
    """A layer by its formulas; ``mask`` is true where attention goes, or a number that is added."""
    batch, length = u.shape[:2]
    x = layer.norm1(u) if layer.order == "pre" else u
    parts = []
    for projection, heads in zip(
        layer.separate(), (layer.heads, layer.kv_heads, layer.kv_heads), strict=True
    ):
        y = x @ projection.weight.T + (0 if projection.bias is None else projection.bias)
        parts.append(y.view(batch, length, heads, layer.head_size).transpose(1, 2))
    queries, keys, values = parts
    if layer.q_norm is not None:
        queries, keys = layer.q_norm(queries), layer.k_norm(keys)
    if rotary is not None:
        cosines, sines = (part.unsqueeze(1) for part in rotary)

        def turn(y):
            first, second = y.chunk(2, -1)
            return y * cosines + torch.cat((-second, first), -1) * sines

        queries, keys = turn(queries), turn(keys)
    if cache is not None:
        cache.append((keys, values))
        keys, values = (torch.cat(each, 2) for each in zip(*cache, strict=True))
    times = layer.heads // layer.kv_heads
    keys, values = (y.repeat_interleave(times, 1) for y in (keys, values))
    scale = layer.scale or 1 / math.sqrt(layer.head_size)
    scores = queries @ keys.transpose(2, 3) * scale
    scores = scores.masked_fill(~mask, -1e9) if mask.dtype == torch.bool else scores + mask
    seen = (scores.softmax(-1) @ values).transpose(1, 2).flatten(2)

    def times_and_bias(y, projection):
        return y @ projection.weight.T + (0 if projection.bias is None else projection.bias)

    attended = times_and_bias(seen, layer.out) * (1 if layer.scale1 is None else layer.scale1)
    v = layer.norm1(u + attended) if layer.order == "post" else u + attended
    x = v if layer.order == "post" else layer.norm2(v)
    hidden = times_and_bias(x, layer.up)
    hidden = layer.activation(hidden) if layer.gate is None else (
        layer.activation(times_and_bias(x, layer.gate)) * hidden)  # fmt: skip
    after = v + times_and_bias(hidden, layer.down) * (1 if layer.scale2 is None else layer.scale2)
    return layer.norm2(after) if layer.order == "post" else after


def visible(layer, real, length, total=None):
    """What may be attended to, (batch, 1, length, keys), given which keys are real."""
    total = length if total is None else total
    queries, keys = torch.arange(total - length, total)[:, None], torch.arange(total)
    seen = keys <= queries if layer.causal else torch.ones(length, total, dtype=torch.bool)
    if layer.window is not None:
        seen = seen & (keys > queries - layer.window)
    return seen[None, None] & real[:, None, None, :]


def expected_run(spec, u, masks, rotary, bounds, caches=None):
    """Run the layers one by one, keep halted tokens as they are; also the distance to the nearest bound."""
    active, margin = torch.ones(*u.shape[:2], 1, dtype=torch.bool), math.inf
    steps = torch.ones(*u.shape[:2], 1, dtype=torch.long)
    states = []
    for index, layer in enumerate(spec.steps):
        cache = None if caches is None else caches[index]
        u = torch.where(active, expected_layer(layer, u, masks[index], rotary, cache), u)
        states.append(u)
        if index + 1 < len(spec.steps):
            logits = spec.heads[index].module(u) if spec.heads[index].module.__class__ is not First else (
                (u if isinstance(spec.heads[index], LinearHead) else u[:, :1])
                @ spec.heads[index].module.weight.T + spec.heads[index].module.bias)  # fmt: skip
            bound = 0.0 if bounds is None else bounds[index]
            margin = min(margin, float((logits - bound).abs().min())) if math.isfinite(bound) else margin
            active = active & ~((logits > bound) | (bound == -math.inf))
            steps = steps + active
    return u, steps, margin, states


def our_run(spec, u, real, contexts, bounds=None, in_place=False, cached=False, rectangles=False):
    runner = LayersRunner(spec)
    for layer in runner.layers:
        layer.native = layer.native and not rectangles
    run = runner.begin(u, real, bounds, cached, in_place=in_place)
    states = []
    for index, context in enumerate(contexts):
        u = run.layer(index, u, context)
        states.append(u)
    return u, run.ponder(), states


def padding(batch, length, kind, generator):
    places = torch.arange(length)
    lengths = torch.randint(1, length + 1, (batch, 1), generator=generator)
    return {"none": None, "right": places < lengths, "left": places >= length - lengths}[kind]


def as_given(mask, kind):
    """A mask as Hugging Face's attention takes it."""
    return mask if kind == "booleans" else torch.zeros(mask.shape).masked_fill(~mask, torch.finfo().min)


@pytest.fixture(params=["kernel", "rectangles"])
def way(request, monkeypatch):
    if request.param == "rectangles":
        monkeypatch.setattr(packed_layer, "native_problem", lambda *_: "not wanted")
    elif native.native_problem(torch.float32, torch.device("cpu"), 4) is not None:
        pytest.skip("no C++ compiler")
    return request.param


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("per", ["token", "example"])
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_it_is_what_layers_compute_one_by_one(family, per, data):
    seed = data.draw(st.integers(0, 10_000))
    batch, length = data.draw(st.sampled_from([1, 2, 7])), data.draw(st.sampled_from([1, 5, 9, 21]))
    # an example that decides by its first token must have one
    kind = data.draw(st.sampled_from(["none", "right", "left"] if per == "token" else ["none", "right"]))
    given_as = data.draw(st.sampled_from(["booleans", "numbers"]))
    rectangles = data.draw(st.booleans())
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        spec, u = block_of(family, per), torch.randn(batch, length, SIZE)
        real = padding(batch, length, kind, generator)
        everyone = torch.ones(batch, length, dtype=torch.bool)
        masks = [visible(layer, everyone if real is None else real, length) for layer in spec.steps]
        rotary = angles(length, spec.steps[0].head_size) if spec.steps[0].rotary else None
        expected, steps, margin, states = expected_run(spec, u, masks, rotary, None)
        assume(margin > 1e-4)
        contexts = [LayerContext(as_given(mask, given_as), rotary=rotary) for mask in masks]
        if real is None and data.draw(st.booleans()):
            contexts = [LayerContext(causal=layer.causal, rotary=rotary) for layer in spec.steps]
        before = u.clone()
        _, ponder, ours = our_run(spec, u, real, contexts, rectangles=rectangles)
        assert torch.equal(u, before)
        real = everyone if real is None else real
        for one, other in zip(ours, states, strict=True):
            assert torch.allclose(one[real], other[real], atol=2e-4)
        if per == "token":
            assert torch.equal(ponder.steps[real], steps[real])
        else:
            assert torch.equal(ponder.steps[:, 0], steps[:, 0])
        assert (ponder.name, ponder.price) == ("mine", 2.0)
        if per == "token" and not real.all():
            assert ponder.weights is not None
            assert torch.equal(ponder.weights[..., 0] > 0, real)
        again, _, _ = our_run(spec, u.clone(), None if real.all() else real, contexts, in_place=True)
        assert torch.allclose(again[real], expected[real], atol=2e-4)


@pytest.mark.parametrize("family", ["llama", "qwen", "gpt2"])
@pytest.mark.parametrize("kind", ["none", "left", "right"])
@pytest.mark.parametrize("batch", [1, 3])
@torch.no_grad()
def test_decoding_writes_keys_and_values_of_halted_tokens(family, kind, batch, way):
    torch.manual_seed(3)
    spec = block_of(family)
    prompt, more = 6, 5
    lead = padding(batch, prompt, kind, torch.Generator().manual_seed(1))
    lead = torch.ones(batch, prompt, dtype=torch.bool) if lead is None else lead
    theirs: list[list[Any]] = [[] for _ in spec.steps]
    ours: list[list[Any]] = [[] for _ in spec.steps]
    begin, seen = 0, set()
    for length in (prompt, *[1] * more):
        u, total = torch.randn(batch, length, SIZE), begin + length
        real = torch.cat((lead, torch.ones(batch, total - prompt, dtype=torch.bool)), 1)
        masks = [visible(layer, real, length, total) for layer in spec.steps]
        rotary = angles(length, spec.steps[0].head_size, begin, batch) if spec.steps[0].rotary else None
        expected, steps, margin, _ = expected_run(spec, u, masks, rotary, None, theirs)
        assert margin > 1e-5, "take another seed"

        def writer(index):
            def update(keys, values):
                ours[index].append((keys, values))
                return tuple(torch.cat(each, 2) for each in zip(*ours[index], strict=True))

            return update

        contexts = [
            LayerContext(None if kind == "none" else mask, layer.causal, rotary, writer(index))
            for index, (layer, mask) in enumerate(zip(spec.steps, masks, strict=True))
        ]
        output, ponder, _ = our_run(spec, u, real[:, -length:], contexts, cached=True)
        now = real[:, -length:]
        assert torch.allclose(output[now], expected[now], atol=2e-4)
        assert torch.equal(ponder.steps[now], steps[now])
        for one, other in zip(ours, theirs, strict=True):
            for mine, wanted in zip(one[-1], other[-1], strict=True):
                places = now[:, None].expand(mine.shape[:3])
                assert torch.allclose(mine[places], wanted[places], atol=2e-4)
        seen |= {*steps[now].tolist()[0]}
        begin = total
    assert len(seen) > 1 or batch == 1


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_bounds_end_at_never_and_always(family, way):
    torch.manual_seed(0)
    spec, u = block_of(family), torch.randn(3, 7, SIZE)
    everyone = torch.ones(3, 7, dtype=torch.bool)
    masks = [visible(layer, everyone, 7) for layer in spec.steps]
    rotary = angles(7, spec.steps[0].head_size) if spec.steps[0].rotary else None
    contexts = [LayerContext(mask, rotary=rotary) for mask in masks]
    inf = math.inf
    for bounds, count in (((inf,) * 3, 4), ((-inf,) * 3, 1), ((inf, -inf, inf), 2)):
        output, ponder, _ = our_run(spec, u, None, contexts, bounds)
        expected, steps, _, _ = expected_run(spec, u, masks, rotary, bounds)
        assert torch.allclose(output, expected, atol=2e-4)
        assert ponder.steps.unique().tolist() == [count] == steps.unique().tolist()


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_bfloat16_agrees_within_its_precision(family):
    torch.manual_seed(0)
    logits = [Opaque(Fixed(torch.where(torch.rand(7, 11, 1) < 0.4, 5.0, -5.0))) for _ in range(LAYERS - 1)]
    spec, u = block_of(family, heads=tuple(logits)), torch.randn(7, 11, SIZE).bfloat16()
    real = padding(7, 11, "right", torch.Generator().manual_seed(0))
    assert real is not None
    masks = [visible(layer, real, 11) for layer in spec.steps]
    rotary = angles(11, spec.steps[0].head_size) if spec.steps[0].rotary else None
    expected, steps, _, _ = expected_run(spec, u.float(), masks, rotary, None)
    half = BlockSpec(spec.module, tuple(in_bfloat16(layer) for layer in spec.steps), spec.heads, spec.mode)
    turned = None if rotary is None else (rotary[0].bfloat16(), rotary[1].bfloat16())
    output, ponder, _ = our_run(half, u, real, [LayerContext(mask, rotary=turned) for mask in masks])
    assert output.dtype == torch.bfloat16
    assert torch.equal(ponder.steps[real], steps[real])
    assert (output.float() - expected)[real].abs().max() < 0.03 * expected[real].abs().max()


def in_bfloat16(layer):
    values = dict(vars(layer))
    for name, value in values.items():
        if isinstance(value, Projection):
            bias = None if value.bias is None else value.bias.bfloat16()
            values[name] = Projection(value.weight.bfloat16(), bias)
        elif isinstance(value, Tensor | nn.LayerNorm | nn.RMSNorm):
            values[name] = value.bfloat16()
    return AttentionLayer(**values)


@torch.no_grad()
def test_masks_that_are_no_ranges_are_heeded(way):
    torch.manual_seed(0)
    spec, u = block_of("vit"), torch.randn(3, 9, SIZE)
    real = padding(3, 9, "right", torch.Generator().manual_seed(0))
    assert real is not None
    odd = (torch.rand(3, 1, 9, 9) < 0.6) | torch.eye(9, dtype=torch.bool)
    slopes = torch.randn(1, 3, 9, 9)
    for mask in (odd & real[:, None, None], slopes.masked_fill(~real[:, None, None], -torch.inf)):
        expected, steps, margin, _ = expected_run(spec, u, [mask] * LAYERS, None, None)
        assert margin > 1e-5
        output, ponder, _ = our_run(spec, u, real, [LayerContext(mask)] * LAYERS)
        assert torch.allclose(output[real], expected[real], atol=2e-4)
        assert torch.equal(ponder.steps[real], steps[real])
        assert 1 < float(ponder.steps[real].float().mean()) < LAYERS


@torch.no_grad()
def test_draws_do_not_depend_on_what_has_halted():
    torch.manual_seed(0)
    spec, u = block_of("bert", mode=Discrete()), torch.randn(3, 5, SIZE)
    torch.manual_seed(1)
    _, ponder, _ = our_run(spec, u, None, [LayerContext()] * LAYERS)
    after = torch.rand(1)
    torch.manual_seed(1)
    for _ in range(LAYERS - 1):
        Discrete().noise(torch.zeros(3, 5, 1))
    assert torch.equal(after, torch.rand(1))
    assert ponder.log_prob is not None
    assert 1 < ponder.steps.float().mean() < LAYERS


@torch.no_grad()
def test_one_layer_may_be_shared_and_details_left_out():
    torch.manual_seed(0)
    spec = block_of("bert")
    spec = BlockSpec(
        spec.module, spec.steps[:1] * 4, (*spec.heads[:2], NeverHead(None)), Thresholded(), False
    )
    runner = LayersRunner(spec)
    assert runner.layers[1] is runner.layers[3]
    u = torch.randn(2, 5, SIZE)
    run = runner.begin(u)
    for index in range(4):
        u = run.layer(index, u, LayerContext())
    assert run.ponder().probs.isnan().all()
    assert not torch.isin(run.ponder().steps, torch.tensor([3])).any()


@torch.no_grad()
def test_heads_of_several_kinds():
    torch.manual_seed(0)
    u, context = torch.randn(3, 5, SIZE), LayerContext()
    example = Opaque(Fixed(torch.tensor([1.0, -1.0, -1.0]).view(3, 1, 1)))
    token = LinearHead(torch.zeros(1, SIZE), torch.tensor([-1.0]), None)
    for heads in ((NeverHead(None), example, token), (token, example, NeverHead(None))):
        _, ponder, _ = our_run(block_of("vit", heads=heads), u, None, [context] * LAYERS)
        assert ponder.steps.squeeze(2).tolist() == [[2] * 5, [4] * 5, [4] * 5]
    _, ponder, _ = our_run(
        block_of("vit", heads=(example, *[NeverHead(None)] * 2)), u, None, [context] * LAYERS
    )
    assert ponder.steps.flatten().tolist() == [1, 4, 4]
    with pytest.raises(
        Unsupported, match=r"^expected one decision an example of all heads, got one a token$"
    ):
        our_run(block_of("vit", heads=(example, token, token)), u, None, [context] * LAYERS)


@pytest.mark.parametrize("rows", [0, 3])
@torch.no_grad()
def test_layers_without_heads_are_all_run(rows):
    torch.manual_seed(0)
    spec, u = block_of("bert", heads=()), torch.randn(rows, 5, SIZE)
    output, ponder, _ = our_run(spec, u, None, [LayerContext()] * LAYERS)
    mask = torch.ones(1, 1, 5, 5, dtype=torch.bool)
    for layer in spec.steps:
        u = expected_layer(layer, u, mask, None)
    assert torch.allclose(output, u, atol=2e-4)
    assert ponder.steps.tolist() == torch.ones(rows, 5, 1).tolist()


def test_what_it_cannot_run_is_said_in_a_line():
    spec = block_of("bert")
    with pytest.raises(Unsupported, match=r"^expected a mode that takes hard decisions, got Relaxed"):
        LayersRunner(block_of("bert", mode=Relaxed()))
    with pytest.raises(Unsupported, match=r"^expected layers of attention, got others$"):
        LayersRunner(BlockSpec(nn.Identity(), (Opaque(nn.Identity()),), (), Thresholded()))
    with pytest.raises(Unsupported, match=r"^expected 3 heads for 4 layers, got 2$"):
        LayersRunner(BlockSpec(nn.Identity(), spec.steps, spec.heads[:2], Thresholded()))
    runner = LayersRunner(spec)
    with pytest.raises(ValueError, match=r"^expected tokens of shape \(batch, length, 12\), got \(3, 12\)$"):
        runner.begin(torch.zeros(3, 12))
    with pytest.raises(ValueError, match=r"booleans for real tokens, got \(2, 5\) of torch.float32$"):
        runner.begin(torch.zeros(2, 5, 12), torch.ones(2, 5))
    with pytest.raises(ValueError, match=r"^expected at least one layer before the ponder"):
        runner.begin(torch.zeros(2, 5, 12)).ponder()
    with pytest.raises(ValueError, match=r"^expected a projection qkv, or all of query, key and value$"):
        AttentionLayer(nn.Identity(), nn.Identity(), linear(4, 4), linear(4, 4), linear(4, 4), 1, torch.relu)
    heads, u = (Opaque(Fixed(torch.zeros(1, 5, 2))),) * 3, torch.zeros(1, 5, SIZE)
    run = LayersRunner(block_of("bert", heads=heads)).begin(u)
    with pytest.raises(Unsupported, match=r"^expected a logit a token or an example, got \(1, 5, 2\)$"):
        run.layer(0, u, LayerContext())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", [None, nn.GELU(), nn.GELU("tanh"), nn.SiLU(), nn.ReLU(), torch.sin])
@pytest.mark.parametrize("rows", [1, 33])
@torch.no_grad()
def test_packed_products_are_those_of_linear_layers(dtype, activation, rows):
    torch.manual_seed(0)
    layer, x = nn.Linear(40, 24).to(dtype), torch.randn(rows, 40, dtype=dtype)
    factor = torch.rand(24)
    expected = layer(x).float() if activation is None else activation(layer(x).float())
    wrong = PackedLinear(Projection.of(layer), activation)(x).float() - expected
    assert wrong.abs().max() < (1e-5 if dtype == torch.float32 else 0.03)
    scaled = PackedLinear(Projection.of(layer), factor=factor)(x).float() - layer(x).float() * factor
    assert scaled.abs().max() < (1e-5 if dtype == torch.float32 else 0.03)


@torch.no_grad()
def test_a_runner_can_be_copied_and_pickled():
    torch.manual_seed(0)
    runner, u = LayersRunner(block_of("bert")), torch.randn(2, 5, SIZE)
    expected = runner.begin(u).layer(0, u, LayerContext())
    for copied in (copy.deepcopy(runner), pickle.loads(pickle.dumps(runner))):
        assert torch.equal(copied.begin(u).layer(0, u, LayerContext()), expected)


def test_activations_are_known_by_their_values():
    def by_hand(x):
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))

    assert activation_name(by_hand) == "gelu_tanh"
    assert activation_name(nn.ReLU()) == "relu"
    assert activation_name(nn.PReLU(3)) == activation_name(lambda x: x * torch.sigmoid(1.702 * x)) == ""


@settings(max_examples=40, deadline=None)
@given(
    counts=st.lists(st.tuples(st.integers(0, 5), st.integers(1, 9)), min_size=1, max_size=5),
    size=st.sampled_from([1, 4, 16, 20, 64]),
    seed=st.integers(0, 999),
    shared=st.sampled_from([1, 3]),
)
def test_the_kernel_attends_to_any_ranges_of_keys(counts, size, seed, shared):
    if native.native_problem(torch.float32, torch.device("cpu"), 4) is not None:
        pytest.skip("no C++ compiler")
    generator = torch.Generator().manual_seed(seed)
    counts = [(rows, keys * 37 if seed % 2 else keys) for rows, keys in counts if rows]
    if not counts:
        return
    rows, total = sum(rows for rows, _ in counts), sum(keys for _, keys in counts)
    queries = torch.randn(rows, 2 * shared, size, generator=generator)
    keys, values = torch.randn(2, total, 2, size, generator=generator)
    starts, offsets, first, last, expected = [0], [], [], [], []
    base = 0
    for own, many in counts:
        for row in range(starts[-1], starts[-1] + own):
            ends = sorted(torch.randint(0, many + 1, (2,), generator=generator).tolist())
            ends = ends if ends[0] < ends[1] else [0, many]
            first.append(ends[0])
            last.append(ends[1])
            k, v = (x[base + ends[0] : base + ends[1]].repeat_interleave(shared, 1) for x in (keys, values))
            weights = (torch.einsum("hd,khd->hk", queries[row], k) * 0.7).softmax(-1)
            expected.append(torch.einsum("hk,khd->hd", weights, v).flatten())
        starts.append(starts[-1] + own)
        offsets.append(base)
        base += many
    ragged = Ragged(
        torch.tensor(starts),
        torch.tensor(offsets),
        torch.tensor(first, dtype=torch.int32),
        torch.tensor(last, dtype=torch.int32),
    )
    found = native.attend_natively(queries, keys, values, 0.7, ragged)
    assert torch.allclose(found, torch.stack(expected), atol=1e-5)


def test_ranges_of_masks():
    cpu = torch.device("cpu")
    real = torch.tensor([[False, True, True, True], [True, True, False, True]])
    everything = ranges_of(None, False, None, (2, 4), None, real, cpu)
    assert everything.first.tolist() == [0] * 8
    assert everything.last.tolist() == [3] * 8
    in_cache = ranges_of(None, True, 2, (1, 2), 5, None, cpu)
    assert (in_cache.first.tolist(), in_cache.last.tolist()) == ([2, 3], [4, 5])
    assert select(torch.zeros(2, 3, dtype=torch.bool), None) is None


def of_transformers(kind):
    """Three layers of Hugging Face's, how one is called, and what they are."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    of = Projection.of
    sizes: dict[str, Any] = {"hidden_size": SIZE, "intermediate_size": HIDDEN, "num_attention_heads": 6}
    sizes |= {"attn_implementation": "sdpa"}
    if kind == "bert":
        from transformers import BertConfig
        from transformers.models.bert.modeling_bert import BertLayer

        layers: list[Any] = [BertLayer(BertConfig(**sizes)) for _ in range(3)]
        specs = [
            AttentionLayer(
                norm1=layer.attention.output.LayerNorm,
                norm2=layer.output.LayerNorm,
                query=of(layer.attention.self.query),
                key=of(layer.attention.self.key),
                value=of(layer.attention.self.value),
                out=of(layer.attention.output.dense),
                up=of(layer.intermediate.dense),
                down=of(layer.output.dense),
                heads=6,
                activation=layer.intermediate.intermediate_act_fn,
                order="post",
            )
            for layer in layers
        ]
        return layers, specs
    from transformers import Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

    config = Qwen3Config(**sizes, num_key_value_heads=2, head_dim=4)
    layers = [Qwen3DecoderLayer(config, index) for index in range(3)]
    specs = [
        AttentionLayer(
            norm1=layer.input_layernorm,
            norm2=layer.post_attention_layernorm,
            query=of(layer.self_attn.q_proj),
            key=of(layer.self_attn.k_proj),
            value=of(layer.self_attn.v_proj),
            out=of(layer.self_attn.o_proj),
            up=of(layer.mlp.up_proj),
            gate=of(layer.mlp.gate_proj),
            down=of(layer.mlp.down_proj),
            heads=6,
            kv_heads=2,
            head_size=4,
            q_norm=layer.self_attn.q_norm,
            k_norm=layer.self_attn.k_norm,
            rotary=True,
            causal=True,
            activation=layer.mlp.act_fn,
        )
        for layer in layers
    ]
    return layers, specs


@pytest.mark.parametrize("kind", ["bert", "qwen3"])
@torch.no_grad()
def test_layers_of_transformers_are_what_their_specs_say(kind):
    torch.manual_seed(0)
    layers, specs = of_transformers(kind)
    for name, parameter in nn.ModuleList(layers).eval().named_parameters():
        nn.init.normal_(parameter, 1.0 if "norm" in name.lower() and "weight" in name else 0.0, 0.3)
    u, real = torch.randn(3, 7, SIZE), torch.arange(7) < torch.tensor([[7], [4], [1]])
    mask, rotary = visible(specs[0], real, 7), angles(7, specs[0].head_size) if specs[0].rotary else None
    heads = tuple(LinearHead(torch.randn(1, SIZE), torch.tensor([-2.0]), None) for _ in range(2))
    output, ponder, _ = our_run(
        BlockSpec(nn.Identity(), tuple(specs), heads, Thresholded()),
        u,
        real,
        [LayerContext(mask, rotary=rotary)] * 3,
    )
    active = torch.ones(3, 7, 1, dtype=torch.bool)
    more = {} if rotary is None else {"position_embeddings": rotary}
    for layer, head in zip(layers, (*heads, None), strict=True):
        u = torch.where(active, layer(u, attention_mask=mask, **more), u)
        if head is not None:
            active = active & (u @ head.weight.T - 2 <= 0)
    assert torch.allclose(output[real], u[real], atol=1e-4)
    assert set(ponder.steps[real].flatten().tolist()) > {1}


def test_the_public_names_are_there():
    assert tp.specs.LayerContext is LayerContext
    assert tp.specs.Projection is Projection
