"""LoRA by peft: adapters before adapt, and after it.

``get_peft_model`` freezes all parameters but its own, halting heads included. So after it say which heads
train: ``net.torchpact.requires_grad_(True)``; or adapt the network that has adapters already.
"""

import pytest
import torch

import torchpact as tp
from tests.adapt.networks import BERT, VIT, first, randomize, runs

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated")
peft = pytest.importorskip("peft", reason="peft is not installed")


def config():
    return peft.LoraConfig(r=2, target_modules=["query", "value"])


def train(net, inputs):
    """Take one step on all that needs gradients; return the names of what changed."""
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=10.0)
    for _ in range(2):  # LoRA's B starts at zero, so A moves in the second step
        with tp.collect(net.train()) as ponders:
            loss = first(net(**inputs)).square().mean() + ponders.cost
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return {name for name, p in net.named_parameters() if not torch.equal(p, before[name])}


def only_adapters_and_heads(changed):
    assert any("lora_A" in name for name in changed)
    assert any("lora_B" in name for name in changed)
    assert any("torchpact" in name and name.endswith("weight") for name in changed)
    assert all("lora_" in name or "torchpact" in name for name in changed)


def test_lora_before_adapt():
    net, inputs = peft.get_peft_model(BERT.build(), config()), BERT.inputs(3, 5)
    with torch.no_grad():
        expected = first(net.eval()(**inputs))
        assert torch.equal(first(tp.adapt(net)(**inputs)), expected)
    assert runs(net)[0].name == "bert.encoder.layer"
    only_adapters_and_heads(train(net, inputs))
    trained = {name for name, p in net.named_parameters() if p.requires_grad}
    tp.unadapt(net)
    assert {name for name, p in net.named_parameters() if p.requires_grad} == {
        n for n in trained if "lora_" in n
    }


def test_lora_after_adapt_freezes_heads_until_they_are_asked_to_train():
    ada, inputs = tp.adapt(BERT.build()), BERT.inputs(3, 5)
    with torch.no_grad():
        expected = first(ada(**inputs))
    net = peft.get_peft_model(ada, config())
    with torch.no_grad():
        assert torch.equal(first(net.eval()(**inputs)), expected)
    assert not any(p.requires_grad for p in ada.torchpact.parameters())
    ada.torchpact.requires_grad_(True)
    only_adapters_and_heads(train(net, inputs))


def with_adapters(case, before):
    """Return a network with adapters and heads, put on in one order or the other."""
    targets = config() if case is BERT else peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"])
    if before:
        net = peft.get_peft_model(case.build(), targets)
        return randomize(tp.adapt(net).get_base_model()) and net
    ada = randomize(tp.adapt(case.build()))
    net = peft.get_peft_model(ada, targets)
    ada.torchpact.requires_grad_(True)
    return net


@pytest.mark.parametrize("case", [BERT, VIT], ids=str)
@pytest.mark.parametrize("before", [True, False])
def test_merged_adapters_leave_an_adapted_network(case, before, tmp_path):
    inputs = case.inputs(3, 5)
    net = with_adapters(case, before)
    only_adapters_and_heads(train(net, inputs))
    with torch.no_grad(), tp.collect(net.eval()) as unmerged:
        expected = first(net(**inputs))
    merged = net.merge_and_unload()
    with torch.no_grad(), tp.collect(merged) as ponders:
        output = first(merged(**inputs))
    assert ponders[0].name == unmerged[0].name == case.runs[0]
    assert torch.equal(ponders[0].steps, unmerged[0].steps)
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-4)
    assert str(tp.summary(merged)).startswith(type(case.build()).__name__)
    tp.deploy(merged, inputs, engines=["attention"])
    tp.save_pretrained(merged, tmp_path)
    with torch.no_grad():
        assert torch.equal(first(tp.from_pretrained(tmp_path)(**inputs)), output)
    assert not any(module._forward_hooks for module in tp.unadapt(merged).modules())


@pytest.mark.parametrize("before", [True, False])
def test_adapters_are_to_be_merged_before_saving(before, tmp_path):
    net = with_adapters(BERT, before)
    for held in (net, net.get_base_model()):
        with pytest.raises(
            ValueError, match=r"^expected a network without adapters of peft, got a \w+ with some: save what"
        ):
            tp.save_pretrained(held, tmp_path / "folder")
    assert not list(tmp_path.iterdir())


def test_adapters_go_on_working_when_heads_are_removed():
    net, inputs = peft.get_peft_model(BERT.build(), config()).eval(), BERT.inputs(3, 5)
    with torch.no_grad():
        expected = first(net(**inputs))
        assert torch.equal(first(tp.unadapt(tp.adapt(net))(**inputs)), expected)
    assert net.config is net.get_base_model().config
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in net.modules())


def test_unadapt_reaches_through_the_wrapper():
    net = peft.get_peft_model(tp.adapt(BERT.build()), config())
    tp.unadapt(net)
    assert not any("torchpact" in name for name, _ in net.named_modules())
    assert str(type(net)) == str(type(peft.get_peft_model(BERT.build(), config())))
