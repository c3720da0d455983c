"""Deployed decoders one token after the other: caches, padding, threads, calls that ask for more."""

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import torchpact as tp
from tests.adapt.test_deployed import adapted, deployed, gpt2, llama, qwen, tokens, transformers
from torchpact.engines.attention.stacked import MOST_STACKED

BUILD = {"Llama": llama, "Qwen3": qwen, "GPT-2": gpt2}


@pytest.fixture(scope="module")
def networks():
    """Networks and what is deployed of them, whose tokens halt at all depths."""
    made = {}
    for name, build in BUILD.items():
        net = adapted(build)
        made[name] = net, deployed(net, {"input_ids": torch.randint(3, 50, (2, 4))})
    return made


def caches(net, static, past):
    kind = transformers.StaticCache if static else transformers.DynamicCache
    return kind(config=net.config, max_cache_len=past + 4) if static else kind(config=net.config)


def stored(cache, length):
    return [x[:, :, :length] for layer in cache.layers for x in (layer.keys, layer.values)]


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from([*BUILD]),
    batch=st.sampled_from([1, 2, 5, MOST_STACKED + 1]),
    past=st.integers(1, 5),
    padded=st.booleans(),
    static=st.booleans(),
    threshold=st.sampled_from([0.5, 0.2, tp.Thresholds("never"), tp.Thresholds("always")]),
    seed=st.integers(0, 100),
)
@torch.no_grad()
def test_logits_and_caches_are_those_of_the_adapted_network(
    networks, name, batch, past, padded, static, threshold, seed
):
    net, fast = networks[name]
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 50, (batch, past + 3), generator=generator)
    mask = torch.ones_like(ids)
    if padded:
        mask[::2, : past - 1] = 0
    places = (mask.cumsum(1) - 1).clamp(min=0)
    both = [caches(net, static, past) for _ in range(2)]
    ends = [past, past + 1, past + 2, past + 3]
    for begin, end in zip([0, *ends], ends, strict=False):
        given = {
            "input_ids": ids[:, begin:end],
            "attention_mask": mask[:, :end],
            "position_ids": places[:, begin:end],
            "use_cache": True,
        }
        with tp.collect(net) as expected, tp.use_thresholds(net, threshold):
            reference = net(**given, past_key_values=both[0]).logits
        with tp.collect(fast) as found:
            output = fast(**given, past_key_values=both[1], thresholds=threshold).logits
        real = mask[:, begin:end] > 0
        assert torch.allclose(output[real], reference[real], atol=5e-5)
        assert torch.equal(found[0].steps[real], expected[0].steps[real])
        for ours, theirs in zip(*(stored(cache, end) for cache in reversed(both)), strict=True):
            seen = mask[:, end - ours.size(2) : end, None].transpose(1, 2) > 0  # sliding windows keep fewer
            assert torch.allclose(ours * seen[..., None], theirs * seen[..., None], atol=5e-5)


@torch.no_grad()
def test_a_static_cache_takes_a_mask_of_the_tokens_to_come(networks):
    net, fast = networks["Llama"]
    ids, lengths = torch.randint(3, 50, (2, 5)), (4, 1)
    mask = torch.ones_like(ids)
    mask[1, :2] = 0
    places = (mask.cumsum(1) - 1).clamp(min=0)
    expected = net(input_ids=ids, attention_mask=mask, position_ids=places).logits
    for model in (net, fast):
        cache, begin = transformers.StaticCache(config=net.config, max_cache_len=9), 0
        for length in lengths:
            end = begin + length
            whole = torch.zeros(2, 9, dtype=torch.long)
            whole[:, :end] = mask[:, :end]
            given = {"input_ids": ids[:, begin:end], "position_ids": places[:, begin:end]}
            with tp.collect(model) as ponders:
                logits = model(**given, attention_mask=whole, past_key_values=cache).logits
            real = mask[:, begin:end] > 0
            weights = ponders[0].weights  # None where all tokens are real
            assert torch.equal(torch.ones(2, length) if weights is None else weights.squeeze(2), real.float())
            assert torch.allclose(logits[real], expected[:, begin:end][real], atol=5e-5)
            begin = end


@torch.no_grad()
def test_keys_of_halted_layers_are_computed_at_once(networks, monkeypatch):
    net, fast = networks["Llama"]
    runner = fast.network.model.layers[0].forward.patched.runner
    ids, calls = torch.randint(3, 50, (2, 5)), []
    product = runner.stacked.keys_and_values

    def counted(u, begin, rotary):
        calls.append(begin)
        return product(u, begin, rotary)

    monkeypatch.setattr(runner.stacked, "keys_and_values", counted)
    cache = transformers.DynamicCache(config=net.config)
    fast(input_ids=ids, past_key_values=cache, use_cache=True, thresholds=tp.Thresholds("never"))
    assert calls == []
    fast(input_ids=ids[:, :1], past_key_values=cache, use_cache=True, thresholds=tp.Thresholds("always"))
    assert calls == [1]
    assert {layer.keys.size(2) for layer in cache.layers} == {6}


@torch.no_grad()
def test_eight_threads_generate_with_one_network(networks):
    net, fast = networks["Llama"]
    prompts = [torch.randint(3, 50, (1 + number % 3, 4)) for number in range(8)]
    more = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    expected = [net.generate(ids, **more) for ids in prompts]
    wrong = []

    def work(number):
        for _ in range(3):
            with tp.collect(fast) as ponders:
                found = fast.generate(prompts[number], **more)
            if len(ponders) != 5 or not torch.equal(found, expected[number]):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize("name", BUILD)
@torch.no_grad()
def test_in_bfloat16_tokens_away_from_the_threshold_decide_alike(name):
    net = adapted(BUILD[name]).to(torch.bfloat16)
    given = tokens(7, 9)
    fast = deployed(net, given)
    assert fast.report.measurements[0].engine == "attention", fast.explain()
    real = given["attention_mask"] > 0
    run = net.torchpact.runs[0]
    with tp.use_thresholds(net, tp.Thresholds("never")):
        state = net(**given, output_hidden_states=True).hidden_states[1]
    logits = run.heads[0](state)[real].flatten().float().sort().values
    middle = logits[len(logits) // 4 : -len(logits) // 4]
    gap = int(middle.diff().argmax())
    bound = float(middle[gap : gap + 2].mean())  # as far from all of them as can be
    thresholds = tp.Thresholds({run.name: [bound, "never", "never"]})
    with tp.use_thresholds(net, thresholds), tp.collect(net) as expected:
        reference = net(**given)[0][real].float()
    with tp.collect(fast) as found:
        output = fast(**given, thresholds=thresholds)[0][real].float()
    assert torch.equal(found[0].steps[real], expected[0].steps[real])
    assert len(found[0].steps[real].unique()) == 2
    assert float((output - reference).norm() / reference.norm()) < 0.03


@torch.no_grad()
def test_hooks_of_a_run_are_back_where_the_layers_run_themselves(networks):
    _, fast = networks["GPT-2"]
    ids = torch.randint(3, 50, (2, 5))
    block = fast.network.transformer.h[0]
    assert not block._forward_hooks  # calls of an engine need not go through them
    with tp.collect(fast) as ponders:
        expected = fast(input_ids=ids).logits
    with tp.collect(fast) as others, tp.use_mode(fast.network, tp.Thresholded(0.5000001)):
        output = fast(input_ids=ids).logits  # a mode that nothing was built for
    assert torch.allclose(output, expected, atol=5e-5)
    assert torch.equal(others[0].steps, ponders[0].steps)


@torch.no_grad()
def test_output_layers_are_packed_and_said_so(networks):
    _, fast = networks["Llama"]
    if "lm_head" not in fast.explain():
        pytest.skip("packed weights are slower on this machine")
    assert "forward" in vars(fast.network.lm_head)
