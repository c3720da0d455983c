"""The way to the Hugging Face hub and back, without a network."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

import torchpact as tp
from tests.viz.networks import network
from torchpact_recipes.model_card import markdown

hub = pytest.importorskip("torchpact_recipes.hub", reason="needs huggingface_hub", exc_type=ImportError)


def test_a_network_saved_and_read_back_gives_the_same_answers(tmp_path):
    model = network("thresholded", units=2, group=4, halting_bias=-1.0)
    hub.HubResNet.of(model).save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    assert (settings["units"], settings["group"], settings["mode"]) == (2, 4, "thresholded")
    again = hub.HubResNet.from_pretrained(tmp_path)
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        (ours, ponders), (theirs, others) = model(images), again.eval()(images)
    assert torch.equal(ours, theirs)
    assert all(torch.equal(a.steps, b.steps) for a, b in zip(ponders, others, strict=True))


def test_a_pretrained_network_comes_back_as_it_was(tmp_path):
    model = tp.models.psact_resnet110("thresholded", pretrained="tau0.005")
    hub.HubResNet.of(model).save_pretrained(tmp_path)
    again = hub.HubResNet.from_pretrained(tmp_path)
    assert (again.config, again.blocks[0].mode) == (model.config, tp.Thresholded())
    ours, theirs = model.state_dict(), again.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_plain_network_needs_no_mode(tmp_path):
    model = network(adaptive=False, units=1)
    hub.HubResNet.of(model).save_pretrained(tmp_path)
    again = hub.HubResNet.from_pretrained(tmp_path)
    assert again.config == model.config
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


@pytest.mark.parametrize(
    "mode", [tp.Thresholded(0.8), tp.Relaxed(0.3, 0.05), tp.ACT(0.2), tp.Discrete()], ids=str
)
def test_a_mode_comes_back_with_its_settings(tmp_path, mode):
    hub.HubResNet.of(network(mode, units=2)).save_pretrained(tmp_path)
    again = hub.HubResNet.from_pretrained(tmp_path)
    assert [block.mode for block in again.blocks] == [mode] * 3


def test_the_mode_kept_is_the_one_the_network_is_in_when_saved(tmp_path):
    model = hub.HubResNet.of(network("relaxed", units=2))
    tp.use_mode(model, tp.Thresholded(0.7))
    model.save_pretrained(tmp_path)
    assert hub.HubResNet.from_pretrained(tmp_path).blocks[0].mode == tp.Thresholded(0.7)


def test_modes_that_cannot_be_kept_are_refused():
    class Own(tp.Thresholded):
        pass

    with pytest.raises(ValueError, match=r"expected a mode among relaxed, .*; got .*Own"):
        hub.HubResNet.of(network(Own(), units=2))
    mixed = network("thresholded", units=2)
    tp.use_mode(mixed.blocks[1], "discrete")
    with pytest.raises(ValueError, match=r"expected all blocks to be in one mode, got Thresholded.*Discrete"):
        hub.HubResNet.of(mixed)
    with pytest.raises(ValueError, match=r"expected a mode among .*; got 'eager'"):
        hub.HubResNet(mode="eager")


def test_a_repository_without_safetensors_is_refused_and_nothing_unpickled(monkeypatch, tmp_path):
    huggingface_hub = pytest.importorskip("huggingface_hub")
    from huggingface_hub import hub_mixin

    def download(repo_id, filename, **_):
        if filename != "pytorch_model.bin":
            raise huggingface_hub.errors.EntryNotFoundError(filename)
        return str(tmp_path / filename)  # which is not there: reading it would be another error

    monkeypatch.setattr(hub_mixin, "hf_hub_download", download)
    with pytest.raises(
        ValueError, match=r"expected weights as model.safetensors, got pytorch_model.bin alone"
    ):
        hub.HubResNet._from_pretrained(
            model_id="somebody/network", revision=None, cache_dir=None, force_download=False,
            local_files_only=False, token=None, units=2,
        )  # fmt: skip


@pytest.fixture
def saved(tmp_path):
    hub.HubResNet.of(network(adaptive=False, units=2)).save_pretrained(tmp_path)
    return tmp_path


def refusal(folder):
    with pytest.raises(ValueError, match="expected") as told:
        hub.HubResNet.from_pretrained(folder)
    assert "\n" not in str(told.value)
    return str(told.value)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"units": 3}, r"got 36 tensors \(blocks\.0\.steps\.2\.norm1\.weight, …\) missing$"),
        ({"units": 1}, r"got 36 tensors \(blocks\.0\.steps\.1\..*, …\) too many$"),
        ({"classes": 7}, r"got 2 tensors \(classifier\.weight, …\) of another shape$"),
        ({"surprise": 7}, r"expected the settings of a network in config\.json, .*'surprise'"),
    ],
)
def test_weights_of_another_network_than_the_configuration_are_refused(saved, change, told):
    file = saved / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    assert re.search(told, refusal(saved))


def test_weights_that_lack_a_tensor_are_refused(saved):
    file = saved / "model.safetensors"
    weights = load_file(file)
    del weights["classifier.bias"]
    save_file(weights, file)
    assert refusal(saved).endswith(
        "expected the weights that config.json describes, got classifier.bias missing"
    )


@pytest.mark.parametrize("text", ["{", "[]", "null"])
def test_a_broken_configuration_is_told(saved, text):
    (saved / "config.json").write_text(text)
    assert refusal(saved).startswith(f"{saved}: expected the settings of a network in config.json, got ")


def test_a_configuration_without_a_depth_is_not_that_of_the_default_network(saved):
    (saved / "config.json").write_text("{}")
    assert refusal(saved) == f"{saved}: expected config.json to say how many units a block has"


def test_a_folder_that_lacks_a_file_is_told(saved, tmp_path_factory):
    (saved / "config.json").unlink()
    both = "expected config.json and model.safetensors"
    assert refusal(saved) == f"{saved}: {both}, got model.safetensors"
    empty = tmp_path_factory.mktemp("empty")
    assert refusal(empty) == f"{empty}: {both}, got neither"


def test_broken_weights_are_told(saved):
    (saved / "model.safetensors").write_text("junk")
    with pytest.raises(ValueError, match="not a readable safetensors file"):
        hub.HubResNet.from_pretrained(saved)


def test_a_network_of_the_zoo_takes_its_card_along_and_another_has_none(tmp_path):
    model = tp.models.psact_resnet32("thresholded", pretrained="tau0.01")
    hub.HubResNet.of(model).save_pretrained(tmp_path / "zoo")
    card = (tmp_path / "zoo" / "README.md").read_text()
    assert card.strip() == markdown(tp.models.zoo.find("resnet32-tau0.01")).strip()
    with torch.no_grad():
        model.classifier.bias.add_(0.01)
    hub.HubResNet.of(model).save_pretrained(tmp_path / "zoo")
    card = (tmp_path / "zoo" / "README.md").read_text()
    assert "An adaptive ResNet-32 of torchpact" in card
    assert "license: apache-2.0" in card
    assert "More Information Needed" not in card
    assert "accuracy" not in card
    (tmp_path / "zoo" / "README.md").write_text("my own")
    hub.HubResNet.of(model).save_pretrained(tmp_path / "zoo")
    assert (tmp_path / "zoo" / "README.md").read_text() == "my own"
