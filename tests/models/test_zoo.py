"""The zoo: what ships, and how an entry is made."""

import dataclasses
import json

import pytest
import torch

import torchpact as tp
from tests.training.small import config, images
from torchpact import publishing
from torchpact.data import load_sample, standardize
from torchpact.model_card import markdown
from torchpact.models import zoo
from torchpact.training import Trainer
from torchpact.training.checkpoint import load_model
from torchpact.training.evaluate import evaluate, evaluate_modes

ENTRIES = {entry.name: entry for entry in zoo.entries()}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("zoo") / "run"
    Trainer(config("relaxed"), folder, images(), images("test", 32)).run()
    return folder


def test_the_zoo_has_a_plain_network_several_prices_and_sact():
    assert {"resnet32-plain", "resnet32-tau0.01", "resnet32-tau0.005", "resnet32-sact-tau0.01"} <= set(
        ENTRIES
    )


@pytest.mark.parametrize("entry", ENTRIES.values(), ids=list(ENTRIES))
def test_an_entry_is_small_carries_its_card_and_was_measured_on_the_whole_test_set(entry):
    assert entry.path.stat().st_size <= 4_000_000
    assert entry.path.with_suffix(".md").read_text() == markdown(entry)
    assert all(m["images"] == 10_000 for m in entry.card["results"].values())
    assert max(map(abs, entry.card["change_of_accuracy"].values())) <= 0.0005


@pytest.mark.parametrize("entry", ENTRIES.values(), ids=list(ENTRIES))
def test_an_entry_does_on_the_sample_about_what_its_card_says(entry):
    sample = load_sample("test")
    mode = None if not entry.network.adaptive else "thresholded"
    measured = evaluate(zoo.load(entry.name), sample, mode)
    said = entry.card["results"]["thresholded" if mode else "plain"]
    # five standard deviations of a share near 0.9 of as many images
    assert measured.accuracy == pytest.approx(said["accuracy"], abs=5 * (0.09 / len(sample)) ** 0.5)
    assert measured.flops == pytest.approx(said["flops"], rel=0.03)


def test_pretrained_networks_are_loaded_by_name_in_the_mode_asked_for():
    model = tp.models.psact_resnet32(mode="thresholded", pretrained="tau0.01")
    assert not model.training
    assert model.blocks[0].mode == tp.Thresholded()
    assert tp.models.psact_resnet32(pretrained="sact-tau0.01").blocks[0].mode == tp.ACT()
    plain = tp.models.resnet32(pretrained="plain")
    sample = load_sample("test")
    with torch.no_grad():
        logits, ponders = plain(standardize(sample.images[:100]))
    assert ponders == []
    assert (logits.argmax(1) == sample.labels[:100]).float().mean() > 0.8


@pytest.mark.parametrize(
    ("make", "arguments", "message"),
    [
        (
            tp.models.psact_resnet32,
            {"pretrained": "tau7"},
            "of an adaptive ResNet-32 among tau0.005, tau0.01",
        ),
        (tp.models.resnet32, {"pretrained": "tau0.01"}, "of a plain ResNet-32 among plain; got 'tau0.01'"),
        (tp.models.psact_resnet32, {"pretrained": "tau0.01", "group": 2}, "expected group=1, as tau0.01"),
        (zoo.load, {"name": "vgg"}, "expected a network of the zoo among resnet32-plain"),
    ],
)
def test_what_is_not_in_the_zoo_is_told(make, arguments, message):
    with pytest.raises(ValueError, match=message):
        make(**arguments)


def test_a_finished_run_becomes_an_entry_with_the_same_results(run, tmp_path, monkeypatch):
    monkeypatch.setattr(publishing, "TOLERANCE", 0.2)
    test = images("test", 32)
    entry = publishing.add_entry(run, "small", test, tmp_path)
    assert entry.name == "resnet14-small"
    assert entry.card["stored_in_half"]
    model, trained = load_model(entry.path)
    assert trained == config("relaxed")
    assert evaluate_modes(model, test, trained.modes) == entry.card["results"]
    exact, _ = load_model(run / "last.safetensors")
    for (name, ours), theirs in zip(exact.state_dict().items(), model.state_dict().values(), strict=True):
        assert torch.equal(ours.half().float() if ours.dim() > 1 else ours, theirs), name


def test_weights_stay_in_single_precision_where_half_is_worse(run, tmp_path, monkeypatch):
    monkeypatch.setattr(publishing, "TOLERANCE", -1.0)
    entry = publishing.add_entry(run, "small", images("test", 32), tmp_path)
    assert not entry.card["stored_in_half"]
    exact, _ = load_model(run / "last.safetensors")
    stored, _ = load_model(entry.path)
    for ours, theirs in zip(exact.parameters(), stored.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert "in single precision" in entry.path.with_suffix(".md").read_text()


def test_what_cannot_be_an_entry_is_refused(run, tmp_path, monkeypatch):
    test = images("test", 32)
    with pytest.raises(ValueError, match=r"without run\.json"):
        publishing.add_entry(tmp_path, "a", test, tmp_path)
    with pytest.raises(ValueError, match="expected a name of letters"):
        publishing.add_entry(run, "../a", test, tmp_path)
    monkeypatch.setattr(publishing, "MOST_BYTES", 1000)
    with pytest.raises(ValueError, match="expected weights of at most 1,000 bytes"):
        publishing.add_entry(run, "a", test, tmp_path)
    record = json.loads((run / "run.json").read_text())
    (tmp_path / "run.json").write_text(json.dumps(record | {"status": "started"}))
    with pytest.raises(ValueError, match="expected a finished run on images, got one that is started"):
        publishing.add_entry(tmp_path, "a", test, tmp_path)
    assert not list(tmp_path.glob("*.safetensors"))


def test_a_card_says_how_a_network_was_trained():
    entry = ENTRIES["resnet32-tau0.01"]
    other = dataclasses.replace(
        entry, config=entry.config | {"schedule": "cosine", "nesterov": True, "tau_ramp": 0.25}
    )
    said = " ".join(markdown(other).split())
    assert "learning rate 0.1 as a cosine" in said
    assert "τ = 0.01 ramped in over 25% of training" in said
    assert "SGD with Nesterov momentum 0.9" in said
    assert "Nesterov" not in markdown(entry)
