"""What holds for the networks of every family; each case is a tiny network with random weights."""

import copy
import pickle
import time
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchpact as tp
from tests.adapt.networks import ALL, BERT, Case, first, mask_of, parameters, randomize, runs, weights

every_family = pytest.mark.parametrize("case", parameters(ALL))
pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")


@pytest.fixture
def no_fast_path():
    """Let layers of torch.nn run as they do with hooks: their fast path is for layers without any."""
    torch.backends.mha.set_fastpath_enabled(False)
    yield
    torch.backends.mha.set_fastpath_enabled(True)


def close(case: Case, ours: torch.Tensor, original: torch.Tensor) -> bool:
    if case.exact:
        return torch.equal(ours, original)
    return bool((ours - original).norm() <= 1e-6 * original.norm())


def real(case: Case, inputs: dict[str, Any], output: torch.Tensor) -> torch.Tensor:
    """Return the output at real positions; torch's fast path gives zeros elsewhere."""
    mask = inputs.get("src_key_padding_mask")
    if mask is None:
        return output
    return output[~mask] if output.shape[:2] == mask.shape else output.transpose(0, 1)[~mask]


@every_family
@pytest.mark.parametrize(("batch", "length"), [(7, 5), (1, 1), (2, 8)])
def test_an_untrained_network_returns_what_it_did(case, batch, length):
    net, inputs = case.build(), case.inputs(batch, length)
    with torch.no_grad():
        original = first(net(**inputs))
        ours = first(tp.adapt(net)(**inputs))
    assert close(case, real(case, inputs, ours), real(case, inputs, original))
    assert type(net) is type(case.build())


@every_family
def test_an_untrained_network_returns_what_it_did_with_gradients_too(case):
    net, inputs = case.build(), case.inputs(3, 5)
    original = first(net(**inputs))
    assert torch.equal(first(tp.adapt(net)(**inputs)), original)


def everything(output: Any) -> list[torch.Tensor]:
    """Return all tensors that a network returned, but those of its cache."""
    if isinstance(output, Tensor):
        return [output]
    if not isinstance(output, Mapping | tuple | list):
        return []
    values = output.values() if isinstance(output, Mapping) else output
    return [tensor for value in values for tensor in everything(value)]


of_transformers = pytest.mark.parametrize("case", parameters([case for case in ALL if case.of_transformers]))


@of_transformers
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("captured_before", [False, True], ids=["first call", "hooks of captures installed"])
def test_hidden_states_and_attentions_of_an_untrained_network_are_the_originals(
    case, attention, captured_before
):
    inputs = case.inputs(3, 5)
    wanted = {"output_hidden_states": True, "output_attentions": attention == "eager"}
    net = case.build(attn_implementation=attention)
    with torch.no_grad():
        original = everything(case.build(attn_implementation=attention)(**inputs, **wanted))
        if captured_before:
            net(**inputs, **wanted)
        ours = everything(tp.adapt(net)(**inputs, **wanted))
    assert len(ours) == len(original) > sum(run.max_steps for run in runs(net))
    assert all(torch.equal(a, b) for a, b in zip(ours, original, strict=True))


@of_transformers
def test_padding_on_either_side_changes_nothing_of_an_untrained_network(case):
    for left in (False, True):
        inputs = case.inputs(4, 7)
        for name in ("attention_mask", "decoder_attention_mask"):
            if name in inputs:
                inputs[name] = mask_of(4, 7, left)
        net = case.build()
        with torch.no_grad():
            original = first(net(**inputs))
            assert torch.equal(first(tp.adapt(net)(**inputs)), original)


@every_family
def test_tied_parameters_stay_the_same_objects(case):
    net = case.build()
    before = {name: id(p) for name, p in net.named_parameters(remove_duplicate=False)}
    tp.adapt(net)
    after = {name: id(p) for name, p in net.named_parameters(remove_duplicate=False)}
    assert {name: after[name] for name in before} == before
    tied = len(set(before.values())) < len(before)
    assert tied == bool(getattr(net, "_tied_weights_keys", None) and net.config.tie_word_embeddings)


@every_family
def test_empty_batches_give_what_they_gave(case, no_fast_path):
    net, inputs = case.build(), case.inputs(0, 5)
    with torch.no_grad():
        try:
            original = first(net(**inputs))
        except Exception:
            pytest.skip("the original takes no empty batch")
        assert first(tp.adapt(net)(**inputs)).shape == original.shape


@every_family
def test_the_runs_that_are_found_have_these_names_and_layers(case):
    net = tp.adapt(case.build())
    with tp.collect(net) as ponders, torch.no_grad():
        net(**case.inputs(3, 5))
    assert tuple(ponder.name for ponder in ponders) == case.runs
    assert all((ponder.steps == len(ponder.probs)).all() for ponder in ponders)
    lines = str(tp.summary(net)).splitlines()
    assert [line.split()[0] for line in lines[1:]][: len(case.runs)] == ["adaptive"] * len(case.runs)


@every_family
def test_padding_weighs_nothing(case):
    inputs = case.inputs(4, 6)
    mask = inputs.get("attention_mask", inputs.get("decoder_attention_mask"))
    if mask is None and "src_key_padding_mask" in inputs:
        mask = ~inputs["src_key_padding_mask"]
    net = tp.adapt(case.build())
    with tp.collect(net) as ponders, torch.no_grad():
        net(**inputs)
    if mask is None:
        assert all(ponder.weights is None for ponder in ponders)
    else:
        assert torch.equal(weights(ponders[-1]), mask.to(torch.float32))
        assert ponders[-1].steps.shape == (4, 6, 1)
    if case.name == "Whisper":
        assert ponders[0].weights is None


@every_family
def test_gradients_reach_heads_and_layers(case):
    net = randomize(tp.adapt(case.build()), scale=0.1).train()
    for module in net.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.eval()
    with tp.collect(net) as ponders:
        output = first(net(**case.inputs(3, 5)))
    (output.double().square().mean() + ponders.cost).backward()
    for head in (head for run in runs(net) for head in run.heads):
        assert head.weight.grad.abs().sum() > 0
        assert head.bias.grad.abs().sum() > 0
    layers = [layer for run in runs(net) for layer in run.layers]
    assert all(
        any(p.grad is not None and p.grad.abs().sum() > 0 for p in layer.parameters()) for layer in layers
    )


@every_family
def test_unadapt_gives_the_original_back(case):
    net, inputs = case.build(), case.inputs(3, 5)
    next(net.parameters()).requires_grad_(False)
    before, with_gradients = net.state_dict(), [p.requires_grad for p in net.parameters()]
    hooks = {
        name: (len(m._forward_hooks), len(m._forward_pre_hooks), len(m._forward_hooks_always_called))
        for name, m in net.named_modules()
    }
    attributes = {name: sorted(vars(m)) for name, m in net.named_modules()}
    with torch.no_grad():
        original = first(net(**inputs))
        tp.adapt(net, frozen=True)(**inputs)
        assert not any(p.requires_grad for name, p in net.named_parameters() if "torchpact" not in name)
        assert tp.unadapt(net) is net
        assert torch.equal(first(net(**inputs)), original)
    after = net.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[key], before[key]) for key in before)
    assert [p.requires_grad for p in net.parameters()] == with_gradients
    assert hooks == {
        name: (len(m._forward_hooks), len(m._forward_pre_hooks), len(m._forward_hooks_always_called))
        for name, m in net.named_modules()
    }
    assert attributes == {name: sorted(vars(m)) for name, m in net.named_modules()}
    assert not hasattr(getattr(net, "config", None), "torchpact")


@every_family
def test_frozen_leaves_the_backbone_bit_identical(case):
    net = tp.adapt(case.build(), frozen=True)
    before = {k: v.clone() for k, v in net.state_dict().items() if not k.startswith("torchpact.")}
    heads = {k: v.clone() for k, v in net.torchpact.state_dict().items()}
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, weight_decay=0.1)
    net.train()
    for _ in range(2):
        with tp.collect(net) as ponders:
            output = first(net(**case.inputs(3, 5)))
        (output.square().mean() + ponders.cost).backward()
        optimizer.step()
    after = net.state_dict()
    assert all(torch.equal(after[key], value) for key, value in before.items())
    assert not any(torch.equal(net.torchpact.state_dict()[key], value) for key, value in heads.items())


@every_family
def test_copies_pickles_and_state_dicts_are_networks_of_their_own(case):
    net, inputs = randomize(tp.adapt(case.build())), case.inputs(3, 5)
    fresh = tp.adapt(case.build())
    fresh.load_state_dict(net.state_dict())
    with torch.no_grad(), tp.collect(net) as ponders:
        expected = first(net(**inputs))
    for again in (copy.deepcopy(net), pickle.loads(pickle.dumps(net)), fresh):
        with torch.no_grad(), tp.collect(again) as own, tp.collect(net) as none:
            assert torch.equal(first(again(**inputs)), expected)
        assert [each.name for each in own] == [each.name for each in ponders]
        assert all(torch.equal(a.steps, b.steps) for a, b in zip(own, ponders, strict=True))
        assert not none
        randomize(again, seed=9)
        with torch.no_grad():
            assert torch.equal(first(net(**inputs)), expected)
        tp.unadapt(again)
    with torch.no_grad():
        assert torch.equal(first(net(**inputs)), expected)


@every_family
def test_autocast_to_bfloat16_keeps_the_type_and_the_value(case, no_fast_path):
    net, inputs = case.build(), case.inputs(3, 5)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        original = first(net(**inputs))
        ours = first(tp.adapt(net)(**inputs))
        assert ours.dtype == original.dtype
        assert torch.equal(ours, original)
    with torch.autocast("cpu", torch.bfloat16), tp.collect(net.train()) as ponders:
        first(net(**inputs)).float().mean().backward()
    assert all(ponder.probs.dtype == torch.float32 for ponder in ponders)


@every_family
def test_decisions_per_example_are_one_an_example(case):
    if case.decoder or case.name == "Whisper":
        with pytest.raises(
            ValueError, match=r"^expected per='token' .*since cached tokens could not be dropped[^\n]*$"
        ):
            tp.adapt(case.build(), per="example")
        return
    net = randomize(tp.adapt(case.build(), per="example"))
    with tp.collect(net) as ponders, torch.no_grad():
        net(**case.inputs(5, 6))
    assert all(ponder.steps.shape[0] == 5 and ponder.steps.numel() == 5 for ponder in ponders)


@pytest.mark.slow
@every_family
def test_compiling_the_whole_network_changes_nothing(case):
    net, inputs = randomize(tp.adapt(case.build())), case.inputs(3, 5)
    torch._dynamo.reset()
    compiled = torch.compile(net, fullgraph=True, backend="eager")
    with torch.no_grad(), tp.collect(net) as ponders:
        expected = first(net(**inputs))
    with torch.no_grad(), tp.collect(net) as again:
        assert torch.equal(first(compiled(**inputs)), expected)
    assert [each.name for each in again] == list(case.runs)
    assert all(torch.equal(a.steps, b.steps) for a, b in zip(again, ponders, strict=True))
    torch._dynamo.reset()


def test_adapting_a_network_of_the_size_of_bert_base_takes_less_than_a_second():
    with torch.device("meta"):
        net = BERT.build(
            hidden_size=768,
            num_hidden_layers=12,
            num_attention_heads=12,
            intermediate_size=3072,
            vocab_size=30522,
        )
    start = time.perf_counter()
    tp.adapt(net)
    assert time.perf_counter() - start < 1
