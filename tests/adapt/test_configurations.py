"""What stands in a configuration of transformers, which networks share and checkpoints are written with."""

import copy
import json
import pickle

import pytest
import torch

import torchpact as tp
from tests.adapt.networks import BERT, first, randomize, runs

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
RUN = "bert.encoder.layer"
SIZES = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 24}


def two():
    config = transformers.BertConfig(vocab_size=50, **SIZES)
    return config, *(transformers.BertForMaskedLM(config).eval() for _ in range(2))


def test_a_configuration_that_another_network_has_stays_as_it_was(tmp_path):
    config, one, other = two()
    before = config.to_dict()
    tp.adapt(one)
    assert config.to_dict() == before
    assert other.config is config
    assert one.config is not config
    assert all(m.config is one.config for m in one.bert.modules() if hasattr(m, "config"))
    other.save_pretrained(tmp_path)
    with pytest.raises(
        FileNotFoundError, match=r"^expected torchpact\.json, or a config\.json of an adapted"
    ):
        tp.from_pretrained(tmp_path)


def test_each_of_two_networks_keeps_its_record(tmp_path):
    config, one, other = two()
    tp.adapt(one)
    tp.adapt(other, per="example")
    tp.unadapt(one)
    assert one.config is config
    assert not hasattr(config, "torchpact")
    other.save_pretrained(tmp_path)
    assert tp.from_pretrained(tmp_path).torchpact.config.runs[0].per == "example"


def test_what_was_changed_while_it_was_adapted_stays_and_what_others_changed_does_too():
    config, one, _ = two()
    tp.adapt(one)
    one.config.use_cache = False
    one.config.label = "mine"
    config.pad_token_id = 7
    tp.unadapt(one)
    assert (one.config.use_cache, one.config.label, one.config.pad_token_id) == (False, "mine", 7)
    assert all(m.config is config for m in one.modules() if hasattr(m, "config"))


def test_a_setting_reaches_all_parts_as_before():
    _, one, _ = two()
    tp.adapt(one)
    one.set_attn_implementation("eager")
    assert one(**BERT.inputs(2, 5), output_attentions=True).attentions[0].shape == (2, 2, 5, 5)


THRESHOLDS = tp.Thresholds({RUN: [0.3, "never", -0.2]})


def test_the_networks_own_save_keeps_thresholds(tmp_path):
    net, inputs = randomize(tp.adapt(BERT.build())), BERT.inputs(3, 5)
    tp.use_thresholds(net, THRESHOLDS)
    net.save_pretrained(tmp_path)
    again = tp.from_pretrained(tmp_path)
    assert runs(again)[0].bounds == (0.3, float("inf"), -0.2)
    with torch.no_grad(), tp.collect(net) as ponders, tp.collect(again) as others:
        assert torch.equal(first(again(**inputs)), first(net(**inputs)))
    assert torch.equal(ponders[0].steps, others[0].steps)


def test_thresholds_of_a_while_are_not_kept(tmp_path):
    net = tp.adapt(BERT.build())
    with tp.use_thresholds(net, THRESHOLDS):
        assert net.config.torchpact["thresholds"] == {RUN: [0.3, "never", -0.2]}
    net.save_pretrained(tmp_path)
    assert runs(tp.from_pretrained(tmp_path))[0].bounds is None


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))])
def test_copies_note_thresholds_of_their_own(copied):
    net = tp.adapt(BERT.build())
    again = copied(net)
    tp.use_thresholds(again, THRESHOLDS)
    assert again.config.torchpact["thresholds"] == {RUN: [0.3, "never", -0.2]}
    assert net.config.torchpact["thresholds"] == {}


def test_damaged_thresholds_give_one_line(tmp_path):
    tp.adapt(BERT.build()).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    record = json.loads(file.read_text())
    for wrong in ({RUN: [0.0]}, {RUN: "often"}, [1]):
        record["torchpact"]["thresholds"] = wrong
        file.write_text(json.dumps(record))
        with pytest.raises(ValueError, match=r'^expected "thresholds" of this network in [^\n]*$'):
            tp.from_pretrained(tmp_path)


def test_a_folder_with_a_record_but_no_heads_is_told(tmp_path):
    tp.save_pretrained(tp.adapt(BERT.build()), tmp_path / "adapted")
    transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "adapted").save_pretrained(
        tmp_path / "plain"
    )
    message = (
        r"^expected the weights of halting heads in [^\n]*, got a record of them but no heads: the network"
    )
    with pytest.raises(ValueError, match=message):
        tp.from_pretrained(tmp_path / "plain")


def test_unadapt_leaves_no_record_of_the_folder_that_a_network_came_from(tmp_path):
    tp.save_pretrained(tp.adapt(BERT.build()), tmp_path)
    assert not hasattr(tp.unadapt(tp.from_pretrained(tmp_path)).config, "torchpact")
