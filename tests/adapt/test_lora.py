"""LoRA by peft: adapters before adapt, and after it.

``get_peft_model`` freezes all parameters but its own, halting heads included. So after it say which heads
train: ``net.torchpact.requires_grad_(True)``; or adapt the network that has adapters already.
"""

import pytest
import torch

import torchpact as tp
from tests.adapt.networks import BERT, first, randomize, runs

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
    assert runs(net)[0].name == "base_model.model.bert.encoder.layer"
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


def test_merged_adapters_leave_an_adapted_network(tmp_path):
    ada, inputs = randomize(tp.adapt(BERT.build())), BERT.inputs(3, 5)
    net = peft.get_peft_model(ada, config())
    ada.torchpact.requires_grad_(True)
    train(net, inputs)
    merged = net.eval().merge_and_unload()
    with torch.no_grad(), tp.collect(merged) as ponders:
        output = first(merged(**inputs))
    assert ponders[0].name == "bert.encoder.layer"
    tp.save_pretrained(merged, tmp_path)
    with torch.no_grad():
        assert torch.equal(first(tp.from_pretrained(tmp_path)(**inputs)), output)


def test_adapters_are_to_be_merged_before_saving(tmp_path):
    outside = peft.get_peft_model(tp.adapt(BERT.build()), config())
    with pytest.raises(
        ValueError, match=r"^expected the network that was adapted, got a PeftModel around it"
    ):
        tp.save_pretrained(outside, tmp_path)
    assert not list(tmp_path.iterdir())


def test_unadapt_reaches_through_the_wrapper():
    net = peft.get_peft_model(tp.adapt(BERT.build()), config())
    tp.unadapt(net)
    assert not any("torchpact" in name for name, _ in net.named_modules())
    assert str(type(net)) == str(type(peft.get_peft_model(BERT.build(), config())))
