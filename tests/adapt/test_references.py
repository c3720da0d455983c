"""Adapted networks with random heads against loops over the layers written by hand."""

import pytest
import torch
from torch.nn import functional as F

import torchpact as tp
from tests.adapt.networks import (
    BERT,
    GPT2,
    LAYERS,
    LLAMA,
    OTHERS,
    VIT,
    first,
    mask_of,
    randomize,
    runs,
    text,
    weights,
)

GENERATION = {"do_sample": False, "max_new_tokens": 6, "pad_token_id": 0}


def logit(head, u):
    """The logit of a head, by its definition."""
    if head.normalize:
        u = F.layer_norm(u, u.shape[-1:])
    return (u * head.weight[0]).sum(-1, keepdim=True) + head.bias


def first_of(output):
    return output if isinstance(output, torch.Tensor) else output[0]


def thresholded(run, states):
    """Run layers one by one; tokens whose logit was above 0 keep their state.

    ``states`` calls a layer, given its number and the state.
    """

    def go(u):
        halted = torch.zeros(*u.shape[:2], 1, dtype=torch.bool)
        steps = torch.zeros(*u.shape[:2], 1, dtype=torch.long)
        every = []
        for index in range(len(run.layers)):
            steps = steps + ~halted
            u = torch.where(halted, u, states(index, u))
            every.append(u)
            if index + 1 < len(run.layers):
                halted = halted | (logit(run.heads[index], u) > 0)
        return u, steps, every

    return go


def relaxed(run, states, noise, temperature=2 / 3, clip=0.01):
    """Stick breaking: ξ = σ((logit + noise)/λ), the state moves by r·[r > δ]; the output is Σ w·state."""

    def go(u):
        remaining, output = torch.ones(*u.shape[:2], 1), torch.zeros_like(u)
        for index in range(len(run.layers)):
            gate = torch.where(remaining > clip, remaining, torch.zeros_like(remaining))
            u = states(index, u) if index == 0 else u + gate * (states(index, u) - u)
            if index + 1 == len(run.layers):
                return output + remaining * u
            fires = torch.sigmoid((logit(run.heads[index], u) + noise[index]) / temperature)
            output, remaining = output + remaining * fires * u, remaining * (1 - fires)

    return go


def bert_by_hand(net, inputs):
    """The state before the layers, how to call one, and what comes after."""
    bert, mask = net.bert, inputs["attention_mask"]
    bias = torch.zeros(mask.shape).masked_fill(mask == 0, torch.finfo(torch.float32).min)[:, None, None]
    layers = net.bert.encoder.layer
    # plain calls of a layer, outside of the network
    return bert.embeddings(inputs["input_ids"]), lambda i, u: first_of(layers[i](u, bias)), net.cls


def vit_by_hand(net, inputs):
    layers = net.layers
    return net.embeddings(inputs["pixel_values"]), lambda i, u: first_of(layers[i](u)), net.layernorm


def causal_bias(mask):
    length = mask.size(1)
    seen = torch.ones(length, length, dtype=torch.bool).tril()[None] & mask.bool()[:, None]
    seen = seen | torch.eye(length, dtype=torch.bool)  # a row of padding sees itself
    return torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)[:, None]


def llama_by_hand(net, inputs):
    model, mask = net.model, inputs["attention_mask"]
    places = torch.arange(mask.size(1))[None].expand(mask.shape)
    u = model.embed_tokens(inputs["input_ids"])
    rotary = model.rotary_emb(u, places)
    bias, layers = causal_bias(mask), model.layers

    def call(i, u):
        return first_of(layers[i](u, attention_mask=bias, position_ids=places, position_embeddings=rotary))

    return u, call, lambda u: net.lm_head(model.norm(u))


def gpt2_by_hand(net, inputs):
    model, mask = net.transformer, inputs["attention_mask"]
    u = model.wte(inputs["input_ids"]) + model.wpe(torch.arange(mask.size(1)))[None]
    bias, layers = causal_bias(mask), model.h
    return u, lambda i, u: first_of(layers[i](u, attention_mask=bias)), lambda u: net.lm_head(model.ln_f(u))


BY_HAND = {"BERT": bert_by_hand, "Llama": llama_by_hand, "ViT": vit_by_hand, "GPT-2": gpt2_by_hand}
families = pytest.mark.parametrize("case", [BERT, LLAMA, VIT, GPT2], ids=str)


def inputs_of(case):
    inputs = case.inputs(4, 6)
    if "attention_mask" in inputs:
        inputs["attention_mask"] = mask_of(4, 6)  # on the right, so that places are 0, 1, …
    return inputs


def compare(case, inputs, ours, theirs):
    real = inputs.get("attention_mask")
    if real is not None:
        ours, theirs = ours[real.bool()], theirs[real.bool()]
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=2e-5)


@families
def test_thresholded_it_is_the_layers_one_by_one_with_halted_tokens_frozen(case):
    net, inputs = randomize(tp.adapt(case.build())), inputs_of(case)
    run = runs(net)[0]
    with torch.no_grad():
        u, call, after = BY_HAND[case.name](net, inputs)
        u, steps, _ = thresholded(run, call)(u)
        with tp.collect(net) as ponders:
            ours = first(net(**inputs))
        compare(case, inputs, ours, after(u))
    real = inputs.get("attention_mask", torch.ones(steps.shape[:2])).bool()
    assert torch.equal(ponders[0].steps[real], steps[real])
    assert set(steps.flatten().tolist()) == set(range(1, LAYERS + 1))


@families
def test_relaxed_it_is_stick_breaking_with_the_same_noise(case):
    net, inputs = randomize(tp.adapt(case.build()), scale=0.3), inputs_of(case)
    run = runs(net)[0]
    with torch.no_grad():
        u, call, after = BY_HAND[case.name](net, inputs)
        generator = torch.Generator().manual_seed(5)
        like = torch.empty(*u.shape[:2], 1)
        noise = []
        for _ in range(LAYERS - 1):
            noise.append(tp.Relaxed(generator=generator).noise(like))
        theirs = after(relaxed(run, call, noise)(u))
        with tp.use_mode(net, tp.Relaxed(generator=torch.Generator().manual_seed(5))):
            ours = first(net(**inputs))
    compare(case, inputs, ours, theirs)


@families
def test_captured_hidden_states_are_those_of_frozen_tokens(case):
    net, inputs = case.build(), inputs_of(case)
    with torch.no_grad():
        net(**inputs, output_hidden_states=True)  # the network's own hooks come first now
        randomize(tp.adapt(net))
        u, call, _ = BY_HAND[case.name](net, inputs)
        _, _, every = thresholded(runs(net)[0], call)(u)
        captured = net(**inputs, output_hidden_states=True).hidden_states
    assert len(captured) == LAYERS + 1
    for state, expected in zip(captured[1:-1], every, strict=False):
        compare(case, inputs, state, expected)


others = [pytest.param(case, id=case.name, marks=pytest.mark.slow) for case in OTHERS if case.decoder]
decoders = pytest.mark.parametrize(
    "case", [*(pytest.param(case, id=case.name) for case in (LLAMA, GPT2)), *others[1:]]
)


@decoders
def test_a_cache_changes_nothing_one_token_after_the_other(case):
    net, inputs = randomize(tp.adapt(case.build())), text(3, 7)
    ids = inputs["input_ids"]
    with torch.no_grad():
        with tp.collect(net) as ponders:
            whole = net(input_ids=ids).logits
        past, each = None, []
        with tp.collect(net) as by_token:
            for place in range(ids.size(1)):
                output = net(input_ids=ids[:, place : place + 1], past_key_values=past, use_cache=True)
                past = output.past_key_values
                each.append(output.logits)
    torch.testing.assert_close(torch.cat(each, 1), whole, rtol=1e-4, atol=1e-5)
    assert torch.equal(torch.cat([ponder.steps for ponder in by_token], 1), ponders[0].steps)
    assert len(ponders[0].steps.unique()) > 1


@decoders
@pytest.mark.parametrize(
    "settings",
    [{}, {"cache_implementation": "static"}, {"num_beams": 3}],
    ids=["dynamic cache", "static cache", "beams"],
)
@pytest.mark.parametrize("heads", ["untrained", "random"])
def test_generation_with_a_cache_is_that_without(case, settings, heads):
    net, inputs = tp.adapt(case.build()), text(3, 5, left=True)
    if heads == "random":
        randomize(net)
    beams = {"num_beams": settings.get("num_beams", 1)}
    with torch.no_grad(), tp.collect(net) as ponders:
        cached = net.generate(**inputs, **GENERATION, **settings, disable_compile=True)
    with torch.no_grad():
        plain = net.generate(**inputs, **GENERATION, **beams, use_cache=False)
        assert torch.equal(cached, plain)
        if heads == "untrained":
            original = case.build().generate(**inputs, **GENERATION, **beams)
            assert torch.equal(cached, original)
    assert ponders[0].steps.shape[1] == 5
    assert all(ponder.steps.shape[1] == 1 for ponder in ponders[1:])
    if not settings:
        assert torch.equal(weights(ponders[0]), inputs["attention_mask"].float())
        assert all(weights(ponder).eq(1).all() for ponder in ponders[1:])
