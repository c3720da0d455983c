"""Deployed adapted networks: what the adapted network returns, with halted tokens not computed."""

import threading
import warnings

import pytest
import torch
from torch import nn

import torchpact as tp
from tests.adapt.torchvision_stub import timm_models

transformers = pytest.importorskip("transformers", reason="needs transformers")

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}


def bert(**options):
    return transformers.BertModel(transformers.BertConfig(vocab_size=50, **SIZES, **options))


def classifier():
    return transformers.BertForSequenceClassification(transformers.BertConfig(vocab_size=50, **SIZES))


def distilbert():
    config = transformers.DistilBertConfig(dim=32, n_layers=4, n_heads=4, hidden_dim=48, vocab_size=50)
    return transformers.DistilBertModel(config)


def albert():
    config = transformers.AlbertConfig(vocab_size=50, embedding_size=16, **SIZES)
    return transformers.AlbertModel(config)


def llama():
    config = transformers.LlamaConfig(
        vocab_size=50, num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=None, **SIZES
    )
    return transformers.LlamaForCausalLM(config)


def qwen():
    config = transformers.Qwen3Config(
        vocab_size=50,
        num_key_value_heads=2,
        head_dim=8,
        use_sliding_window=True,
        sliding_window=3,
        max_window_layers=2,
        **SIZES,
    )
    return transformers.Qwen3ForCausalLM(config)


def gpt2():
    config = transformers.GPT2Config(
        n_embd=32, n_layer=4, n_head=4, vocab_size=50, bos_token_id=1, eos_token_id=2
    )
    return transformers.GPT2LMHeadModel(config)


def vit():
    return transformers.ViTModel(transformers.ViTConfig(image_size=16, patch_size=4, **SIZES))


def modernbert():
    config = transformers.ModernBertConfig(
        vocab_size=50, local_attention=4, global_attn_every_n_layers=2, pad_token_id=0, **SIZES
    )
    return transformers.ModernBertModel(config)


def dinov2(**options):
    config = transformers.Dinov2Config(image_size=16, patch_size=4, layerscale_value=0.7, **SIZES, **options)
    return transformers.Dinov2Model(config)


def whisper_encoder():
    sizes = {"d_model": 32, "encoder_layers": 4, "encoder_attention_heads": 4, "encoder_ffn_dim": 48}
    config = transformers.WhisperConfig(vocab_size=50, num_mel_bins=8, max_source_positions=12, **sizes)
    return transformers.models.whisper.modeling_whisper.WhisperEncoder(config)


def timm_vit(**options):
    models = timm_models()
    sizes = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 4, "num_heads": 4, "num_classes": 5}
    return models.VisionTransformer(**sizes, **options)


def torch_encoder(norm_first):
    layer = nn.TransformerEncoderLayer(32, 4, 48, batch_first=True, norm_first=norm_first, activation="gelu")
    return nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)


def tokens(batch=3, length=7):
    lengths = torch.tensor([length, max(length - 3, 1), 1, length, 2, length, 3])[:batch]
    mask = torch.arange(length) < lengths[:, None]
    return {"input_ids": torch.randint(3, 50, (batch, length)), "attention_mask": mask.long()}


def pixels(batch=3, length=0):
    return {"pixel_values": torch.randn(batch, 3, 16, 16)}


def sounds(batch=3, length=0):
    return {"input_features": torch.randn(batch, 8, 24)}


def pictures(batch=3, length=0):
    return {"x": torch.randn(batch, 3, 16, 16)}


def adapted(build, seed=0, **options):
    torch.manual_seed(seed)
    net = tp.adapt(build().eval(), **options)
    for head in net.torchpact.runs[0].heads:
        nn.init.normal_(head.weight, std=1.0)
        nn.init.zeros_(head.bias)
    return net


def deployed(net, example, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what is slower on tiny networks
        return tp.deploy(net, example, engines=["attention"], **options)


def hidden(output, mask=None):
    """Return what a network made of real tokens."""
    first = output if isinstance(output, torch.Tensor) else output[0]
    return first if mask is None or first.dim() < 3 else first[mask > 0]


NETWORKS = {
    "BERT": (bert, tokens, {}),
    "BERT per example": (bert, tokens, {"per": "example"}),
    "classifier": (classifier, tokens, {}),
    "DistilBERT": (distilbert, tokens, {}),
    "ALBERT": (albert, tokens, {}),
    "Llama": (llama, tokens, {}),
    "Qwen3": (qwen, tokens, {}),
    "GPT-2": (gpt2, tokens, {}),
    "ViT": (vit, pixels, {}),
    "ViT per example": (vit, pixels, {"per": "example"}),
    "ModernBERT": (modernbert, tokens, {}),
    "DINOv2": (dinov2, pixels, {}),
    "DINOv2, gated": (lambda: dinov2(use_swiglu_ffn=True), pixels, {}),
    "Whisper's encoder": (whisper_encoder, sounds, {}),
    "timm's ViT": (timm_vit, pictures, {}),
    "timm's ViT, scaled": (lambda: timm_vit(init_values=0.7, qk_norm=True), pictures, {}),
}


@pytest.mark.parametrize("name", NETWORKS)
@torch.no_grad()
def test_outputs_and_decisions_are_those_of_the_adapted_network(name):
    build, inputs, options = NETWORKS[name]
    net, example = adapted(build, **options), inputs()
    fast = deployed(net, example)
    assert fast.report.measurements[0].engine == "attention", fast.explain()
    for batch, length in ((3, 7), (1, 5), (7, 9)):
        given = inputs(batch, length)
        mask = given.get("attention_mask")
        with tp.collect(net) as expected, tp.collect(fast) as found:
            reference = net(**given)
            output = fast(**given)
        assert type(output) is type(reference)
        assert torch.allclose(hidden(output, mask), hidden(reference, mask), atol=2e-5)
        (wanted,), (got,) = expected, found
        weights = torch.ones_like(wanted.cost) if wanted.weights is None else wanted.weights
        assert torch.equal(got.steps * weights, wanted.steps * weights)
        assert got.name == wanted.name
        assert found.steps == pytest.approx(float(expected.steps), abs=1e-5)
        assert found.cost == pytest.approx(float(wanted.steps.mul(weights).sum() / weights.sum()), abs=4)


@pytest.mark.parametrize("norm_first", [False, True])
@torch.no_grad()
def test_encoders_of_torch_run_too(norm_first):
    net, x = adapted(lambda: torch_encoder(norm_first)), torch.randn(3, 7, 32)
    padding = torch.arange(7) >= torch.tensor([7, 4, 2])[:, None]
    fast = deployed(net, (x,))
    assert fast.report.measurements[0].engine == "attention", fast.explain()
    assert torch.allclose(fast(x), net(x), atol=2e-5)
    found, expected = (each(x, src_key_padding_mask=padding)[~padding] for each in (fast, net))
    assert torch.allclose(found, expected, atol=2e-5)


@torch.no_grad()
def test_halted_tokens_are_not_computed():
    net, given = adapted(bert), tokens()
    fast = deployed(net, given)
    some = float(tp.count_flops(net, given).mean)
    rows: list[int] = []
    layers = fast.network.encoder.layer
    packed = layers[1].forward.patched.runner.layers
    for layer in packed:

        def counted(x, seen, finish=layer.finish):
            rows.append(len(x))
            return finish(x, seen)

        layer.finish = counted
    with tp.collect(fast) as ponders:
        fast(**given)
    weights = ponders[0].weights
    assert weights is not None
    steps = ponders[0].steps[weights > 0]
    assert rows == [int((steps > index).sum()) for index in range(4) if (steps > index).any()]
    assert some < float(tp.count_flops(tp.unadapt(net), given).mean)


@torch.no_grad()
def test_thresholds_are_an_argument_of_the_call():
    net, given = adapted(bert), tokens()
    fast = deployed(net, given)
    for thresholds in (tp.Thresholds("never"), 0.3, tp.Thresholds({"encoder.layer": [1.0, "always", 0.0]})):
        with tp.use_thresholds(net, thresholds), tp.collect(net) as expected:
            reference = net(**given)
        with tp.collect(fast) as found:
            output = fast(**given, thresholds=thresholds)
        mask = given["attention_mask"]
        assert torch.allclose(hidden(output, mask), hidden(reference, mask), atol=2e-5)
        assert found.steps == pytest.approx(float(expected.steps), abs=1e-5)
    with pytest.raises(
        ValueError, match=r"expected thresholds for blocks among 'encoder\.layer'; got 'other'"
    ):
        fast(**given, thresholds=tp.Thresholds({"other": 0.0}))


@pytest.mark.parametrize(
    "options", [{}, {"use_cache": False}, {"num_beams": 3}, {"cache_implementation": "static"}]
)
@pytest.mark.parametrize("build", [llama, gpt2])
@torch.no_grad()
def test_it_generates_what_the_adapted_network_generates(build, options):
    net = adapted(build)
    net.generation_config.eos_token_id, net.generation_config.pad_token_id = None, 0
    ids, mask = torch.randint(3, 50, (3, 6)), torch.ones(3, 6, dtype=torch.long)
    mask[1, :3] = 0  # on the left
    given = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False, **options}
    fast = deployed(net, {"input_ids": ids, "attention_mask": mask})
    with tp.collect(fast) as ponders:
        found = fast.generate(ids, **given)
    assert torch.equal(found, net.generate(ids, **given))
    assert 1 < float(ponders.steps) < 4


@torch.no_grad()
def test_states_between_layers_are_handed_out_where_they_are_asked_for():
    net, given = adapted(bert), tokens()
    fast = deployed(net, given)
    mask = given["attention_mask"]
    for _ in range(2):
        states = [each(**given, output_hidden_states=True).hidden_states for each in (net, fast)]
        assert len(states[1]) == 5
        for expected, found in zip(*states, strict=True):
            assert torch.allclose(found[mask > 0], expected[mask > 0], atol=2e-5)


@torch.no_grad()
def test_calls_that_the_engine_cannot_run_are_run_by_the_layers():
    net, given = adapted(lambda: bert(attn_implementation="eager")), tokens()
    fast = deployed(net, given)
    with tp.collect(fast) as ponders:
        output = fast(**given, output_attentions=True)
    reference = net(**given, output_attentions=True)
    assert len(output.attentions) == 4
    assert all(torch.equal(a, b) for a, b in zip(output.attentions, reference.attentions, strict=True))
    assert len(ponders) == 1


@torch.no_grad()
def test_blocks_of_timm_in_other_forms_run_as_they_are():
    net, given = adapted(lambda: timm_vit(scale_mlp_norm=True)), pictures()
    with pytest.warns(UserWarning, match="dense"):
        fast = tp.deploy(net, given, engines=["attention"])
    assert torch.equal(fast(**given), net(**given))
    assert "without norms inside" in fast.explain()


@torch.no_grad()
def test_an_example_of_nothing_but_padding_weighs_nothing():
    net = adapted(bert, per="example")
    batch = {"input_ids": torch.randint(3, 50, (3, 5)), "attention_mask": torch.ones(3, 5, dtype=torch.long)}
    batch["attention_mask"][1] = 0
    fast = deployed(net, batch)
    with tp.collect(net) as expected, tp.collect(fast) as found:
        net(**batch)
        fast(**batch)
    for ponder in (found[0], expected[0]):
        assert ponder.weights is not None
        assert ponder.weights.flatten().tolist() == [1, 0, 1]
    assert torch.equal(found[0].steps[::2], expected[0].steps[::2])


class Doubled:
    """A forward that a layer has by itself: what its class computes, times two."""

    def __init__(self, layer):
        self.layer = layer

    def __call__(self, *args, **kwargs):
        return 2 * type(self.layer).forward(self.layer, *args, **kwargs)


@torch.no_grad()
def test_a_forward_of_a_layers_own_runs_in_the_deployed_copy():
    net, batch = adapted(bert), tokens(2, 5)
    layer = net.encoder.layer[1]
    before = net(**batch).last_hidden_state
    layer.forward = Doubled(layer)
    with pytest.warns(UserWarning, match="dense"):
        fast = tp.deploy(net, batch, engines=["attention"])
    expected = net(**batch).last_hidden_state
    assert not torch.allclose(expected, before)
    assert torch.equal(fast(**batch).last_hidden_state, expected)


def with_attention_of_ones_own(net):
    for layer in net.encoder.layer:
        kind = type(layer.attention.self)

        def scaled(self, *args, kind=kind, **kwargs):
            attended, *rest = kind.forward(self, *args, **kwargs)
            return (1.5 * attended, *rest)

        layer.attention.self.__class__ = type("Scaled", (kind,), {"forward": scaled})
    return "got a Scaled of tests"


def with_an_attention_function_of_ones_own(net):
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def scaled(*args, **kwargs):
        return 1.5 * sdpa_attention_forward(*args, **kwargs)[0], None

    ALL_ATTENTION_FUNCTIONS.register("scaled", scaled)
    ALL_MASK_ATTENTION_FUNCTIONS.register("scaled", sdpa_mask)
    net.set_attn_implementation("scaled")
    return "got the implementation 'scaled'"


@torch.no_grad()
@pytest.mark.parametrize("change", [with_attention_of_ones_own, with_an_attention_function_of_ones_own])
def test_attention_of_ones_own_runs_as_it_is(change):
    net, batch = bert().eval(), tokens(2, 5)
    before = net(**batch).last_hidden_state
    reason = change(net)
    expected = tp.adapt(net)(**batch).last_hidden_state
    assert not torch.allclose(expected, before, atol=1e-3)
    with pytest.warns(UserWarning, match="dense"):
        fast = tp.deploy(net, batch, engines=["attention"])
    assert torch.equal(fast(**batch).last_hidden_state, expected)
    assert reason in fast.explain()


@torch.no_grad()
def test_other_layers_run_as_they_are_with_the_reason():
    class Step(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)

        def forward(self, u):
            return u + self.linear(self.norm(u))

    net, x = tp.adapt(nn.Sequential(*(Step() for _ in range(3)))).eval(), torch.randn(2, 5, 8)
    with pytest.warns(UserWarning, match="dense"):
        fast = tp.deploy(net, (x,), engines=["attention"])
    assert torch.equal(fast(x), net(x))
    assert "nothing is known of layer 1 of" in fast.explain()
    with tp.collect(fast) as ponders:
        fast(x)
    assert len(ponders) == 1


def test_threads_share_a_deployed_network():
    net = adapted(bert)
    batches = [tokens(batch, length) for batch, length in ((1, 5), (3, 7), (7, 9), (2, 3))]
    fast = deployed(net, batches[1])
    with torch.no_grad():
        expected = [net(**given).last_hidden_state[given["attention_mask"] > 0] for given in batches]
    wrong: list[int] = []

    def work(number):
        given = batches[number]
        for _ in range(15):
            with tp.collect(fast) as ponders:
                found = fast(**given).last_hidden_state[given["attention_mask"] > 0]
            if len(ponders) != 1 or not torch.allclose(found, expected[number], atol=2e-5):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@torch.no_grad()
def test_the_model_stays_as_it_is_and_can_be_trained_on():
    net, given = adapted(bert), tokens()
    before = net(**given).last_hidden_state
    fast = deployed(net, given)
    net.torchpact.runs[0].heads[0].bias.fill_(50.0)
    mask = given["attention_mask"] > 0
    assert torch.allclose(fast(**given).last_hidden_state[mask], before[mask], atol=2e-5)
    assert "forward" not in vars(net.encoder.layer[0])
    with tp.collect(net) as ponders:
        net(**given)
    assert float(ponders.steps) == 1


def test_rows_of_padding_stay_what_they_were_before_the_first_layer_and_others_do_not_see_them():
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    sizes = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 32}
    net = tp.adapt(transformers.BertModel(transformers.BertConfig(vocab_size=50, **sizes)).eval())
    batch = {"input_ids": torch.randint(50, (2, 6)), "attention_mask": torch.ones(2, 6, dtype=torch.long)}
    batch["attention_mask"][0, 4:] = 0
    fast = tp.deploy(net, batch, engines=["attention"])
    assert fast.report.measurements[0].engine == "attention"
    with torch.no_grad():
        found, expected = fast(**batch).last_hidden_state, net(**batch).last_hidden_state
        embedded = net.embeddings(batch["input_ids"])
    real = batch["attention_mask"] > 0
    torch.testing.assert_close(found[real], expected[real], atol=1e-5, rtol=1e-5)
    assert torch.equal(found[~real], embedded[~real])
