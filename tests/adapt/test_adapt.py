"""The arguments of adapt, what it refuses, and that a network it refuses is left as it was."""

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import torchpact as tp
from tests.adapt.networks import (
    BERT,
    LLAMA,
    UNFAMILIAR,
    WIDTH,
    ResidualMLP,
    Unfamiliar,
    first,
    randomize,
    runs,
    torch_encoder,
    weights,
)
from torchpact.core.criterion import PoolingHead


def snapshot(net):
    """Return all that adapt may have changed."""
    return (
        {name: (value.clone(), value.requires_grad) for name, value in net.named_parameters()},
        {name: value.clone() for name, value in net.named_buffers()},
        {
            name: (m.training, sorted(vars(m)), len(m._forward_hooks), len(m._forward_pre_hooks))
            for name, m in net.named_modules()
        },
        getattr(net, "use_nested_tensor", None),
        sorted(vars(net.config)) if hasattr(net, "config") else None,
    )


def unchanged(net, before):
    parameters, buffers, modules, *rest = snapshot(net)
    old_parameters, old_buffers, old_modules, *old_rest = before
    assert parameters.keys() == old_parameters.keys()
    for name, (value, needs) in parameters.items():
        assert torch.equal(value, old_parameters[name][0])
        assert needs == old_parameters[name][1]
    assert all(torch.equal(value, old_buffers[name]) for name, value in buffers.items())
    assert modules == old_modules
    assert rest == old_rest


def refused(net, match, kind=ValueError, **options):
    """See that adapt refuses in one line, and leaves the network as it was."""
    before = snapshot(net)
    with pytest.raises(kind, match=match) as caught:
        tp.adapt(net, **options)
    assert "\n" not in str(caught.value)
    unchanged(net, before)


class Chain(nn.Module):
    """Layers called one after the other, by a function of a layer and the state."""

    def __init__(self, layers, call=lambda layer, u: layer(u)):
        super().__init__()
        self.layers, self.call = nn.ModuleList(layers), call

    def forward(self, u):
        for layer in self.layers:
            u = self.call(layer, u)
        return u


def mlps(count=3, width=WIDTH):
    return [ResidualMLP(width) for _ in range(count)]


def states():
    return torch.randn(2, 5, WIDTH)


def test_a_network_without_layers_is_refused():
    refused(nn.Linear(3, 3), r"^expected a list of two or more layers .* in a Linear: tp\.AdaptiveBlock")


def test_a_list_that_nobody_calls_is_refused():
    refused(nn.ModuleList(mlps()), r"^expected a network with a forward, got a ModuleList", TypeError)


def test_what_holds_no_network_is_refused():
    with pytest.raises(
        TypeError, match=r"^expected a network, or an object with one as its model, got a str$"
    ):
        tp.adapt("bert-base-uncased")


def test_an_adapted_network_is_refused():
    refused(tp.adapt(Chain(mlps())), r"got an adapted one: tp\.unadapt first$")


def test_layers_that_another_adapted_network_has_are_refused():
    inner = Chain(mlps())
    tp.adapt(nn.Sequential(inner))
    refused(inner, r"^expected layers that are not adapted yet, got 'layers\.0', .* tp\.unadapt")


def test_unadapt_leaves_the_hooks_of_another_network_that_shares_modules():
    shared = Chain(mlps())
    other, net = nn.Sequential(shared), nn.Sequential(shared, Chain(mlps()))
    tp.adapt(other)
    tp.unadapt(tp.adapt(net, where="1.layers"))
    with tp.collect(other) as ponders:
        net(states())
    assert [ponder.name for ponder in ponders] == ["0.layers"]


def test_a_network_that_is_wrapped_already_is_refused():
    refused(nn.DataParallel(Chain(mlps())), r"got a DataParallel, .* adapt the network first, then wrap it$")


def test_a_network_with_adaptive_blocks_is_refused():
    refused(tp.models.psact_resnet32(), r"^expected a network without adaptive blocks, got 'blocks\.0'$")


def test_layers_of_different_shapes_are_refused():
    refused(
        Chain([*mlps(), ResidualMLP(8)]),
        r"'layers': expected layers of equal shapes from the second on, .* layer 4$",
    )


def test_the_first_layer_may_be_of_another_shape():
    net = Chain(
        [nn.Sequential(nn.Linear(3, WIDTH)), *[nn.Sequential(nn.Linear(WIDTH, WIDTH)) for _ in range(3)]]
    )
    tp.adapt(net, example=torch.randn(2, 5, 3), bias=-5)
    assert runs(net)[0].max_steps == 4
    net.eval()(torch.randn(2, 5, 3))


def test_decoders_cannot_decide_per_example():
    refused(
        LLAMA.build(),
        r"^expected per='token' for the layers of Llama in 'model\.layers', since cached tokens could not be "
        r"dropped with their example; got 'example'$",
        per="example",
    )
    refused(
        LLAMA.build(),
        r"^expected per='token' for the layers of Llama in 'model\.layers'; got 'pixel'$",
        per="pixel",
    )


def test_runs_are_in_the_mode_of_their_layers():
    inner = Chain(mlps()).eval()
    net = Chain([inner])  # as one's own module around a pretrained network: it is in training
    x = states()
    before = net(x)
    assert torch.equal(tp.adapt(net)(x), before)


def test_a_bert_that_is_a_decoder_decides_for_tokens_and_knows_the_padding_of_its_cache():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 24}
    config = transformers.BertConfig(vocab_size=20, is_decoder=True, **sizes)
    net = transformers.BertLMHeadModel(config).eval()
    refused(net, r"^expected per='token' .* since cached tokens could not be dropped", per="example")
    ids, mask = torch.ones(2, 4, dtype=torch.long), torch.tensor([[1, 1, 1, 1], [0, 1, 1, 0]])
    tp.adapt(net)
    cache = transformers.DynamicCache(config=config)
    with tp.collect(net) as ponders, torch.no_grad():
        net(input_ids=ids[:, :2], attention_mask=mask[:, :2], past_key_values=cache)
        net(input_ids=ids[:, 2:], attention_mask=mask, past_key_values=cache)
    assert torch.equal(torch.cat([weights(ponder) for ponder in ponders], 1), mask.float())


def test_layers_of_tokens_cannot_decide_per_pixel():
    refused(
        BERT.build(),
        r"^expected per='token' or 'example' for the layers of BERT .*; got 'pixel'$",
        per="pixel",
    )


def test_a_name_that_is_no_run_is_refused_with_those_there_are():
    refused(BERT.build(), r"under where='encoder'; the network has 'bert\.encoder\.layer'$", where="encoder")


def test_a_width_that_nothing_tells_is_asked_for():
    net = Chain([nn.Sequential(nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)) for _ in range(3)])
    refused(net, r"in 'layers', got Sequential: pass example=$")
    assert runs(tp.adapt(net, example=states()))[0].heads[0].weight.shape == (1, WIDTH)


def test_layers_that_change_the_shape_are_refused_when_they_are_run():
    net = Chain(mlps(), call=lambda layer, u: layer(u)[:, :-1])
    refused(
        net, r"each with what the one before it returned; layer 2 was given another tensor", example=states()
    )


class Shorter(ResidualMLP):
    def forward(self, u):
        return super().forward(u)[:, :-1]


def test_layers_that_shorten_the_state_themselves_are_refused():
    refused(
        Chain([Shorter(WIDTH) for _ in range(3)]),
        r"keep the shape of the state, got \(2, 4, 16\) before layer 2",
        example=states(),
    )


def test_a_broken_chain_is_refused_and_named():
    net = Chain(mlps(), call=lambda layer, u: layer(u) * 1)
    refused(
        net,
        r"^expected the layers of 'layers' to be called one after the other, .*leave this run out",
        example=states(),
    )
    tp.adapt(net)
    with pytest.raises(ValueError, match="layer 2 was given another tensor"):
        net(states())


def test_layers_left_out_are_noticed():
    net = tp.adapt(Chain(mlps()))
    net.forward = lambda u: net.layers[1](net.layers[0](u))
    with pytest.raises(
        ValueError, match=r"^expected all 3 layers of 'layers' .* got a call that left some out"
    ):
        net(states())


class TwoStreams(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, u, v):
        return u + self.linear(v), v + self.linear(self.norm(u))


class Streams(nn.Module):
    def __init__(self, together):
        super().__init__()
        self.layers, self.together = nn.ModuleList([TwoStreams() for _ in range(3)]), together
        if together:
            for layer in self.layers:
                layer.forward = self._of_pair(layer)

    @staticmethod
    def _of_pair(layer):
        return lambda pair: TwoStreams.forward(layer, *pair)

    def forward(self, u):
        v = u
        for layer in self.layers:
            u, v = layer((u, v)) if self.together else layer(u, v)
        return u


@pytest.mark.parametrize("together", [False, True], ids=["two arguments", "one tuple"])
def test_layers_that_pass_two_states_are_refused(together):
    net = Streams(together)
    kind, match = (
        (TypeError, "takes one hidden state first")
        if together
        else (ValueError, "to pass one hidden state on")
    )
    tp.adapt(net)
    with pytest.raises(kind, match=match):
        net(states())
    tp.unadapt(net)
    before = snapshot(net)
    with pytest.raises(kind, match=match):
        tp.adapt(net, bias=-5, example=states())
    unchanged(net, before)


class InPlace(ResidualMLP):
    def forward(self, u):
        return u.add_(super().forward(u))


def test_layers_that_change_their_input_in_place_are_refused():
    with torch.no_grad():
        refused(
            Chain([InPlace(WIDTH) for _ in range(3)]),
            r"got layer 2 that changes it in place",
            example=states(),
        )


def test_layers_that_two_runs_share_are_adapted_once():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.one = Chain(mlps())
            self.two = Chain([self.one.layers[0], *mlps(2)])

        def forward(self, u):
            return self.two(self.one(u))

    lines = str(tp.summary(tp.adapt(Both()))).splitlines()
    assert lines[1].startswith("adaptive    one.layers: 3 × ResidualMLP, per token")
    assert (
        lines[2] == "unchanged   two.layers: expected layers that no other run has, got some of 'one.layers'"
    )


def test_a_head_factory_that_raises_leaves_the_network_as_it_was():
    made = []

    def heads(layer, width):
        made.append(layer)
        if len(made) == 2:
            raise RuntimeError("no more heads")
        return nn.Linear(width, 1)

    refused(BERT.build(), "no more heads", RuntimeError, heads=heads, frozen=True)
    refused(BERT.build(), "to return a module, got a str", TypeError, heads=lambda *_: "head")


def test_a_call_that_fails_leaves_the_network_as_it_was():
    net = torch_encoder().train()
    net.layers[1].eval()
    net.layers[0].linear1.weight.requires_grad_(False)
    refused(net, "last dimension|shape|embed", Exception, frozen=True, example=torch.randn(2, 5, WIDTH + 1))


def test_a_tolerance_that_cannot_be_met_leaves_the_network_as_it_was():
    refused(torch_encoder(), r"^expected a bias of -16", example=states() * 100, tolerance=1e-12, frozen=True)


def test_heads_of_ones_own_are_made_by_layer_and_width():
    seen = []

    def heads(layer, width):
        seen.append((type(layer).__name__, width))
        head = nn.Linear(width, 1)
        nn.init.constant_(head.weight, 0.0)
        nn.init.constant_(head.bias, 1.0)
        return head

    net = tp.adapt(BERT.build(), heads=heads)
    assert seen == [("BertLayer", WIDTH)] * 3
    with torch.no_grad(), tp.collect(net) as ponders:
        net(**BERT.inputs(2, 5))
    assert (ponders[0].steps == 1).all()


@pytest.mark.parametrize("per", ["token", "example"])
def test_states_without_tokens_halt_by_example(per):
    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)

        def forward(self, u):
            return u + self.linear(self.norm(u))

    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Residual() for _ in range(3))

        def forward(self, u):
            for layer in self.layers:
                u = layer(u)
            return u

    torch.manual_seed(0)
    net, u = tp.adapt(Network(), per=per).eval(), torch.randn(6, 8)
    head = net.torchpact.runs[0].heads[0]
    nn.init.normal_(head.weight)
    nn.init.zeros_(head.bias)
    states = [net.layers[0](u)]
    states += [net.layers[1](states[0])]
    states += [net.layers[2](states[1])]
    with tp.collect(net) as ponders, torch.no_grad():
        output = net(u)
    normal = nn.functional.layer_norm(states[0], (8,))
    halts = normal @ head.weight[0] > 0
    assert 0 < halts.sum() < 6
    assert torch.equal(ponders[0].steps.flatten(), torch.where(halts, 1, 3))
    torch.testing.assert_close(output, torch.where(halts.unsqueeze(1), states[0], states[2]))


def plain_head(layer, width):
    return nn.Linear(width, 1)


def quiet_head(layer, width):
    """As the documentation of adapt shows it."""
    linear = nn.Linear(width, 1)
    nn.init.zeros_(linear.weight)
    nn.init.constant_(linear.bias, -5.0)
    return linear


def nested_head(layer, width):
    return nn.Sequential(nn.Linear(width, 4), nn.Tanh(), nn.Linear(4, 1))


def test_heads_of_a_factory_that_starts_at_zero_leave_outputs_as_they_were():
    with torch.no_grad():
        expected = first(BERT.build()(**BERT.inputs(3, 5)))
        assert torch.equal(first(tp.adapt(BERT.build(), heads=quiet_head)(**BERT.inputs(3, 5))), expected)


def test_a_bias_is_set_on_heads_of_a_factory_and_weights_stay():
    made = []

    def heads(layer, width):
        made.append(plain_head(layer, width))
        return made[-1]

    torch.manual_seed(0)
    kept = [plain_head(None, WIDTH).weight for _ in range(3)]
    torch.manual_seed(0)
    net = tp.adapt(BERT.build().train(), heads=heads, bias=-3.0)
    assert [head.bias.item() for head in runs(net)[0].heads] == [-3.0] * 3
    assert net.torchpact.config.bias == -3.0
    assert len(kept) == len(made)
    own = [head.bias.item() for head in runs(tp.adapt(BERT.build(), heads=plain_head))[0].heads]
    assert len({*own}) == 3  # as the factory made them


def test_an_example_chooses_the_bias_of_heads_of_a_factory():
    inputs = BERT.inputs(4, 6)
    torch.manual_seed(0)
    net = tp.adapt(BERT.build(), heads=plain_head, example=inputs, tolerance=0.05)
    with torch.no_grad():
        original = first(BERT.build()(**inputs))
        torch.manual_seed(0)
        with tp.use_mode(net, "relaxed"):
            relaxed = first(net(**inputs))
    assert 0 < (relaxed - original).norm() / original.norm() < 0.06


@pytest.mark.parametrize("options", [{"bias": -3.0}, {"example": BERT.inputs(2, 5)}], ids=["bias", "example"])
def test_a_bias_that_heads_do_not_have_is_refused(options):
    (name,) = options
    refused(
        BERT.build(),
        rf"^expected heads with a bias of one number for {name}= to set, got a Sequential: .*{name}= out$",
        heads=nested_head,
        **options,
    )


def test_criteria_have_no_bias_to_set_but_may_be_tried_on_an_example():
    criterion = tp.criteria.LatentChange()
    refused(BERT.build(), r"^expected heads with a bias .* got a LatentChange", heads=criterion, bias=-3.0)
    tp.adapt(BERT.build(), heads=criterion, example=BERT.inputs(2, 5))


def test_an_example_of_layers_of_no_known_family_goes_with_any_heads():
    net = Chain([nn.Sequential(nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)) for _ in range(3)])
    assert isinstance(runs(tp.adapt(net, heads=nested_head, example=states()))[0].heads[0], nn.Sequential)


@pytest.mark.parametrize("heads", [3, "linear"])
def test_what_makes_no_heads_is_refused(heads):
    message = rf"^expected heads to be a criterion, or a function of a layer and its width, got {heads!r}$"
    refused(BERT.build(), message, TypeError, heads=heads)
    with pytest.raises(TypeError, match=message):
        tp.use_heads(tp.adapt(BERT.build()), heads)


@pytest.mark.parametrize("example", [5, "text", 0.5])
def test_an_example_that_is_no_input_is_refused(example):
    refused(
        BERT.build(), r"^expected inputs of the network as example, got ['\w.]+$", TypeError, example=example
    )


def test_a_pipeline_is_adapted_but_its_model_is_what_the_other_verbs_take():
    pipe: Any = Pipeline(BERT.build())
    tp.adapt(pipe)
    inputs = BERT.inputs(2, 5)
    for verb in (
        lambda net: tp.collect(net),
        lambda net: tp.deploy(net, inputs),
        lambda net: tp.count_flops(net, inputs),
        lambda net: tp.use_mode(net, "discrete"),
    ):
        with pytest.raises(
            TypeError, match=r"^expected an nn\.Module, got a Pipeline: pass its attribute model$"
        ):
            verb(pipe)


def test_quantised_layers_are_named_where_no_engine_runs_them():
    net, inputs = BERT.build(), BERT.inputs(2, 5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        net = torch.ao.quantization.quantize_dynamic(net, {nn.Linear}, dtype=torch.qint8)
        fast = tp.deploy(tp.adapt(net), inputs, engines=["attention"])
    kind = "torch.ao.nn.quantized.dynamic.modules.linear.Linear"
    assert f"to have plain linear layers, got a {kind}" in fast.explain()


def test_a_loss_of_two_calls_pays_for_both_and_the_cost_is_of_one():
    net, inputs = tp.adapt(BERT.build()), BERT.inputs(2, 5)
    with tp.collect(net) as ponders, torch.no_grad():
        for threshold in ("always", "never"):  # one layer, then four
            with tp.use_thresholds(net, tp.Thresholds(threshold)):
                net(**inputs)
    assert ponders.cost == ponders.steps == (1 + 4) / 2
    assert tp.map_loss(torch.tensor(0.0), ponders, tau=0.5) == 0.5 * (1 + 4)


def test_a_pooling_head_of_ones_own_sees_the_padding():
    class Longest(PoolingHead):
        """Halts texts of fewer than four tokens."""

        def forward(self, u, weights):
            return 3.5 - weights.sum(1, keepdim=True)

    net = tp.adapt(BERT.build(), heads=lambda _layer, _width: Longest(), per="example")
    inputs = BERT.inputs(2, 5)
    inputs["attention_mask"] = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    with torch.no_grad(), tp.collect(net) as ponders:
        net(**inputs)
    assert ponders[0].steps.flatten().tolist() == [4, 1]


def test_where_takes_a_function_of_name_and_list():
    class Towers(nn.Module):
        def __init__(self):
            super().__init__()
            self.left, self.right = Chain(mlps()), Chain(mlps())

        def forward(self, u):
            return self.left(u) + self.right(u)

    net = tp.adapt(
        Towers(),
        where=lambda name, layers: (
            name.startswith("right") and isinstance(layers, nn.ModuleList) and len(layers) == 3
        ),
    )
    assert [run.name for run in runs(net)] == ["right.layers"]
    assert [run.name for run in runs(tp.adapt(tp.unadapt(net), where=["left.layers"]))] == ["left.layers"]
    assert len(runs(tp.adapt(tp.unadapt(net)))) == 2


def test_unknown_lists_beside_known_layers_wait_for_where():
    net = BERT.build()
    net.extra = nn.ModuleList(mlps())
    assert "unchanged   extra: layers of no known family beside known ones" in str(tp.summary(tp.adapt(net)))
    tp.unadapt(net)
    assert [run.name for run in runs(tp.adapt(net, where="extra"))] == ["extra"]


@pytest.mark.parametrize("bias", [-2.0, None])
def test_the_bias_is_as_given_or_minus_five(bias):
    net = tp.adapt(BERT.build(), bias=bias)
    assert {head.bias.item() for head in runs(net)[0].heads} == {-5.0 if bias is None else bias}


def test_an_example_bisects_the_bias_to_the_tolerance():
    inputs = BERT.inputs(4, 6)
    net, original = BERT.build(), first(BERT.build()(**inputs)).double()

    def difference(bias):
        for head in runs(net)[0].heads:
            nn.init.constant_(head.bias, bias)
        torch.manual_seed(0)
        with torch.no_grad(), tp.use_mode(net, "relaxed"):
            return ((first(net(**inputs)) - original).norm() / original.norm()).item()

    torch.manual_seed(3)
    state = torch.get_rng_state()
    tp.adapt(net, example=inputs, tolerance=0.05)
    assert torch.equal(torch.get_rng_state(), state)
    found = runs(net)[0].heads[0].bias.item()
    assert net.torchpact.config.bias == pytest.approx(found)
    assert difference(found) <= 0.05 < difference(found + 0.02)


def test_per_example_with_the_sequence_first():
    src = torch.randn(4, 3, WIDTH)
    mask = torch.tensor([[0, 0, 0, 0], [0, 0, 0, 1], [0, 0, 1, 1]]).bool()
    net = randomize(tp.adapt(torch_encoder(batch_first=False), per="example"))
    same = randomize(tp.adapt(torch_encoder(), per="example"))
    with torch.no_grad(), tp.collect(net) as ponders, tp.collect(same) as others:
        ours = net(src, src_key_padding_mask=mask)
        theirs = same(src.transpose(0, 1), src_key_padding_mask=mask)
    torch.testing.assert_close(ours.transpose(0, 1)[~mask], theirs[~mask])
    assert torch.equal(ponders[0].steps, others[0].steps)
    assert ponders[0].steps.shape == (3, 1, 1)
    assert torch.equal(weights(ponders[0]), weights(others[0]))


def test_a_sequential_network_is_adapted_too():
    net = nn.Sequential(nn.Linear(3, WIDTH), nn.Sequential(*mlps()), nn.Linear(WIDTH, 2)).eval()
    x = torch.randn(2, 5, 3)
    expected = net(x)
    assert torch.equal(tp.adapt(net)(x), expected)
    alone = nn.Sequential(*mlps()).eval()
    expected = alone(states_ := states())
    assert torch.equal(tp.adapt(alone)(states_), expected)
    with tp.collect(alone) as ponders:
        alone(states_)
    assert ponders[0].probs.shape == (3, 2, 5, 1)


def test_one_layer_several_times_in_a_list_has_one_head():
    layer = ResidualMLP(WIDTH)
    net = tp.adapt(Chain([layer] * 4)).eval()
    assert len(runs(net)[0].heads) == 1
    with tp.collect(net) as ponders:
        net(states())
    assert ponders[0].probs.shape[0] == 4


def test_convolutions_of_no_known_family_decide_per_pixel():
    class Unit(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.conv = nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3, padding=1)

        def forward(self, u):
            return u + self.conv(self.norm(u).relu())

    net = randomize(tp.adapt(Chain([Unit() for _ in range(3)]).eval()))
    with torch.no_grad(), tp.collect(net) as ponders:
        net(torch.randn(2, 4, 6, 6))
    assert ponders[0].steps.shape == (2, 1, 6, 6)


class Pipeline:
    """As those of transformers: an object with a model."""

    def __init__(self, model):
        self.model = model


class Transformer(nn.Module):
    """As that of sentence-transformers: features in, features and token embeddings out."""

    def __init__(self, auto_model):
        super().__init__()
        self.auto_model = auto_model

    def forward(self, features, **_):
        return {**features, "token_embeddings": first(self.auto_model(**features))}


class SentenceTransformer(nn.Sequential):
    def forward(self, input):
        features = input
        for _, module in self.named_children():
            features = module(features)
        return features


@pytest.mark.parametrize("kind", ["pipeline", "sentence transformer", "compiled"])
def test_the_network_within_an_object_is_found(kind):
    net = BERT.build()
    holder = {
        "pipeline": lambda: Pipeline(net),
        "sentence transformer": lambda: SentenceTransformer(Transformer(net)),
        "compiled": lambda: torch.compile(net, backend="eager"),
    }[kind]()
    assert tp.adapt(holder) is holder
    assert runs(net)[0].name == "bert.encoder.layer"
    assert str(tp.summary(holder)).startswith("BertForMaskedLM: ")
    if kind == "sentence transformer":
        with torch.no_grad(), tp.collect(holder) as ponders:
            holder(BERT.inputs(2, 5))
        assert torch.equal(weights(ponders[0]), BERT.inputs(2, 5)["attention_mask"].float())
    tp.unadapt(holder)
    assert not hasattr(net, "torchpact")


@pytest.mark.slow
def test_a_pipeline_of_transformers_runs_adapted():
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers are not installed")
    words = {word: number for number, word in enumerate(["[PAD]", "[UNK]", "a", "good", "bad", "film"])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]"
    )
    pipe = transformers.pipeline("feature-extraction", model=BERT.build().bert, tokenizer=fast, device="cpu")
    texts = ["a good film", "bad"]
    expected = pipe(texts, batch_size=2)
    with tp.collect(tp.adapt(pipe).model) as ponders:
        assert pipe(texts, batch_size=2) == expected
    assert weights(ponders[0]).tolist() == [[1, 1, 1], [1, 0, 0]]


def test_summary_says_what_became_adaptive():
    text = str(tp.summary(tp.adapt(UNFAMILIAR.build(), frozen=True)))
    own = sum(p.numel() for p in Unfamiliar().parameters())
    assert text.splitlines() == [
        f"Unfamiliar: {own:,} parameters, 51 more in halting heads ({51 / own:.3%}); 51 are trained",
        "adaptive    blocks: 4 × ResidualMLP, per token, heads cost 96 FLOPs a token",
    ]


def test_a_frozen_network_with_batch_norms_uses_their_statistics_in_training():
    from tests.adapt.networks import plain_resnet

    net = plain_resnet()
    images = torch.randn(2, 3, 8, 8)
    expected = net(images)[0]
    tp.adapt(net, frozen=True).train()
    with tp.use_mode(net, "thresholded"):
        assert torch.equal(net(images)[0], expected)
    tp.unadapt(net)
    assert all(module.training for module in net.modules())
    assert not torch.equal(net(images)[0], expected)


def test_a_network_that_is_shared_by_two_wrappers_is_copied_with_one():
    net = tp.adapt(torch_encoder())
    both = nn.ModuleDict({"a": net, "b": nn.Sequential(net)})
    again = copy.deepcopy(both)
    assert again["a"] is again["b"].get_submodule("0")
    first_layer = again["a"].get_submodule("layers.0")
    assert runs(again["a"])[0].layers[0] is first_layer


def test_modes_and_thresholds_are_those_of_the_call():
    net = tp.adapt(BERT.build())
    inputs = BERT.inputs(2, 5)
    with torch.no_grad(), tp.collect(net) as ponders:
        with tp.use_thresholds(net, tp.Thresholds("always")):
            net(**inputs)
        with tp.use_thresholds(net, tp.Thresholds({"bert.encoder.layer": ["never", "always", "never"]})):
            net(**inputs)
        with tp.use_mode(net, "discrete"):
            net(**inputs)
    assert [ponder.steps.float().mean().item() for ponder in ponders[:2]] == [1, 2]
    assert ponders[2].log_prob is not None
    assert runs(net.train())[0].present_mode == tp.Relaxed()
    assert runs(net.eval())[0].present_mode == tp.Thresholded()
