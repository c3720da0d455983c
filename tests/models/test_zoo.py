"""The zoo: what ships, and how an entry is made."""

import dataclasses
import json
import re

import pytest
import torch
from safetensors.torch import save_file

import torchpact as tp
from tests.training.small import config, images
from torchpact.flops.count import max_flops
from torchpact.models import ResNetConfig, build
from torchpact_recipes import model_card, publishing, zoo
from torchpact_recipes.commands.common import network_file
from torchpact_recipes.data import load_sample, standardize
from torchpact_recipes.model_card import markdown, plain_flops
from torchpact_recipes.training import Trainer
from torchpact_recipes.training.checkpoint import (
    CheckpointError,
    load_checkpoint,
    load_model,
    save_checkpoint,
)
from torchpact_recipes.training.evaluate import evaluate, evaluate_modes

ENTRIES = {entry.name: entry for entry in zoo.entries()}
LAST = config("relaxed").iterations


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("zoo") / "run"
    Trainer(config("relaxed"), folder, images(), images("test", 32)).run()
    return folder


@pytest.mark.parametrize(
    ("network", "names"),
    [
        (
            "resnet32",
            [
                *("plain", "plain-paper", "plain-strong", "tau0.01", "tau0.05", "sact-tau0.01"),
                *("paper-tau0.005", "paper-tau0.01", "paper-tau0.02", "strong-tau0.03"),
            ],
        ),
        (
            "resnet110",
            [
                *("plain", "plain-strong", "tau0.001", "tau0.005", "tau0.01", "sact-tau0.005"),
                *("strong-tau0.002", "strong-tau0.006"),
            ],
        ),
    ],
)
def test_the_zoo_has_plain_networks_several_prices_and_sact(network, names):
    assert {f"{network}-{name}" for name in names} <= set(ENTRIES)


@pytest.mark.parametrize("entry", ENTRIES.values(), ids=list(ENTRIES))
def test_an_entry_is_small_carries_its_card_and_was_measured_on_the_whole_test_set(entry):
    assert entry.path.stat().st_size <= 4_000_000
    assert entry.path.with_suffix(".md").read_text() == markdown(entry)
    assert all(m["images"] == 10_000 for m in entry.card["results"].values())
    assert max(map(abs, entry.card["change_of_accuracy"].values())) <= 0.0005


@pytest.mark.slow
@pytest.mark.parametrize("entry", ENTRIES.values(), ids=list(ENTRIES))
def test_an_entry_does_on_the_sample_about_what_its_card_says(entry):
    sample = load_sample("test")
    sample = sample.random(200 if entry.network.units > 5 else 500, seed=0)  # they take their time
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
    ("make", "short", "full"),
    [
        (tp.models.resnet32, "plain", "resnet32-plain"),
        (tp.models.resnet110, "plain", "resnet110-plain"),
        (tp.models.psact_resnet32, "sact-tau0.01", "resnet32-sact-tau0.01"),
        (tp.models.psact_resnet110, "tau0.005", "resnet110-tau0.005"),
    ],
)
def test_the_name_that_the_zoo_lists_is_as_good_as_the_short_one(make, short, full):
    one, other = make(pretrained=short), make(pretrained=full)
    assert one.config == other.config
    for ours, theirs in zip(one.state_dict().values(), other.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs)


def test_deep_networks_are_loaded_by_name_too():
    model = tp.models.psact_resnet110(pretrained="tau0.005")
    assert model.config.units == 18
    assert model.blocks[0].mode == tp.Relaxed()
    assert tp.models.psact_resnet110(pretrained="sact-tau0.005").blocks[0].mode == tp.ACT()
    assert not tp.models.resnet110(pretrained="plain").config.adaptive


@pytest.mark.parametrize(
    ("make", "arguments", "message"),
    [
        (
            tp.models.psact_resnet32,
            {"pretrained": "tau7"},
            "of an adaptive ResNet-32 among paper-tau0.005, tau0.005",
        ),
        (
            tp.models.resnet32,
            {"pretrained": "tau0.01"},
            "of a plain ResNet-32 among plain, plain-paper, plain-strong; got 'tau0.01'",
        ),
        (tp.models.psact_resnet32, {"pretrained": "tau0.01", "group": 2}, "expected group=1, as tau0.01"),
        (
            tp.models.psact_resnet32,
            {"pretrained": "resnet110-tau0.005"},
            "of an adaptive ResNet-32 among paper-tau0.005, .*; got 'resnet110-tau0.005'",
        ),
        (
            tp.models.psact_resnet32,
            {"pretrained": "resnet32-plain"},
            "of an adaptive ResNet-32 among paper-tau0.005, .*; got 'resnet32-plain'",
        ),
        (
            zoo.load,
            {"name": "vgg"},
            r"^expected a network of the zoo, got 'vgg' \(torchpact zoo lists them\)$",
        ),
        (
            zoo.load,
            {"name": "resnet32-tau0.1"},
            r"^expected a network of the zoo, got 'resnet32-tau0.1' \(did you mean resnet32-tau0.01\?\)$",
        ),
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
    unfinished = f"expected a finished run on images, got one not finished (iteration %s of {LAST})"
    with pytest.raises(ValueError, match=re.escape(unfinished % 0)):
        publishing.add_entry(tmp_path, "a", test, tmp_path)
    (tmp_path / "history.jsonl").write_text(
        '{"kind": "train", "iteration": 1}\n{"kind": "train", "iteration": 2}\n'
    )
    with pytest.raises(ValueError, match=re.escape(unfinished % 2)):
        publishing.add_entry(tmp_path, "a", test, tmp_path)
    save_checkpoint(tmp_path / "last.safetensors", {}, {"iteration": 3})
    with pytest.raises(ValueError, match=re.escape(unfinished % 3)):
        publishing.add_entry(tmp_path, "a", test, tmp_path)
    (tmp_path / "last.safetensors").unlink()
    assert not list(tmp_path.glob("*.safetensors"))


def test_weights_of_another_iteration_than_the_last_are_refused(run, tmp_path, monkeypatch):
    monkeypatch.setattr(publishing, "evaluate_modes", no_evaluation)
    last = load_checkpoint(run / "last.safetensors")
    save_checkpoint(tmp_path / "last.safetensors", last.tensors, last.info | {"iteration": 3})
    (tmp_path / "run.json").write_bytes((run / "run.json").read_bytes())
    expected = f"expected weights of iteration {config('relaxed').iterations}, the last; got 3"
    with pytest.raises(ValueError, match=expected):
        publishing.add_entry(tmp_path, "a", images("test", 32), tmp_path)


def test_a_checkpoint_is_read_once(run, tmp_path, monkeypatch):
    def counted(path):
        read.append(path)
        return load_checkpoint(path)

    read: list[object] = []
    monkeypatch.setattr(publishing, "load_checkpoint", counted)
    monkeypatch.setattr("torchpact_recipes.training.checkpoint.load_checkpoint", counted)
    publishing.add_entry(run, "a", images("test", 32), tmp_path)
    assert read == [run / "last.safetensors"]


def test_weights_without_the_state_of_an_optimizer_will_do(run, tmp_path):
    last = load_checkpoint(run / "last.safetensors")
    weights = {name: value for name, value in last.tensors.items() if name.startswith("model.")}
    assert len(weights) < len(last.tensors)
    save_checkpoint(tmp_path / "last.safetensors", weights, last.info)
    (tmp_path / "run.json").write_bytes((run / "run.json").read_bytes())
    whole = publishing.add_entry(run, "a", images("test", 32), tmp_path)
    entry = publishing.add_entry(tmp_path, "b", images("test", 32), tmp_path)
    assert entry.card == whole.card


def test_a_note_is_part_of_the_card(run, tmp_path):
    test = images("test", 32)
    assert publishing.add_entry(run, "a", test, tmp_path).card["note"] == ""
    note = "Continued once, at iteration 3."
    entry = publishing.add_entry(run, "b", test, tmp_path, note=note)
    assert note in " ".join(entry.path.with_suffix(".md").read_text().split())


def no_evaluation(*_):
    raise AssertionError("evaluated before it was refused")


def test_a_bad_name_is_refused_before_anything_is_evaluated(run, tmp_path, monkeypatch):
    monkeypatch.setattr(publishing, "evaluate_modes", no_evaluation)
    with pytest.raises(ValueError, match="expected a name of letters"):
        publishing.add_entry(run, "../a", images("test", 32), tmp_path)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"config": config("random").to_dict()}, "got one that halts at random"),
        ({"config": config("relaxed").to_dict(), "demo": True}, "got one that torchpact train did not make"),
        (
            {"config": config("plain").to_dict(), "pretrained": "a"},
            "got one that torchpact train did not make",
        ),
        ({}, "expected what torchpact train writes, got KeyError"),
        ({"config": []}, "expected what torchpact train writes, got TypeError"),
    ],
)
def test_runs_that_are_no_trained_networks_are_refused_first(tmp_path, monkeypatch, record, message):
    monkeypatch.setattr(publishing, "evaluate_modes", no_evaluation)
    (tmp_path / "run.json").write_text(json.dumps({"status": "finished"} | record))
    with pytest.raises(ValueError, match=message):
        publishing.add_entry(tmp_path, "a", images("test", 32), tmp_path)


def test_what_has_no_card_leaves_no_file(run, tmp_path, monkeypatch):
    def no_card(_):
        raise KeyError("no card")

    monkeypatch.setattr(publishing, "markdown", no_card)
    with pytest.raises(KeyError):
        publishing.add_entry(run, "a", images("test", 32), tmp_path / "zoo")
    assert not list(tmp_path.rglob("*.*"))


def test_a_card_is_that_of_the_entry_as_it_is_read_back(run, tmp_path):
    entry = publishing.add_entry(run, "small", images("test", 32), tmp_path)
    assert entry.path.with_suffix(".md").read_text() == markdown(entry)


def test_entries_of_unforeseen_methods_come_last(tmp_path):
    network = {"units": 2}
    for name, method in (("resnet14-a", "dreaming"), ("resnet14-b", "act"), ("resnet14-c", "relaxed")):
        info = {"config": {"method": method, "tau": 0.1, "network": network}, "card": {"results": {}}}
        save_checkpoint(tmp_path / f"{name}.safetensors", {"model.a": torch.ones(1)}, info)
    assert [entry.name for entry in zoo.entries(tmp_path)] == ["resnet14-c", "resnet14-b", "resnet14-a"]


@pytest.mark.parametrize("kind", ["damaged", "foreign", "cardless"])
def test_a_file_that_is_no_entry_is_told_in_one_line(tmp_path, kind):
    path = tmp_path / "other.safetensors"
    if kind == "damaged":
        path.write_bytes(b"no such thing")
    elif kind == "foreign":
        save_file({"weight": torch.ones(2)}, path)
    else:
        save_checkpoint(path, {"weight": torch.ones(2)}, {"config": {}})
    with pytest.raises(
        ValueError, match=r"other\.safetensors: expected a network as torchpact zoo add"
    ) as told:
        zoo.entries(tmp_path)
    assert "\n" not in str(told.value)


def test_the_zoo_is_asked_only_for_names_that_are_no_files(tmp_path, monkeypatch):
    def broken():
        raise ValueError("a damaged zoo")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(zoo, "entries", broken)
    file = tmp_path / "last.safetensors"
    file.touch()
    assert network_file(str(file)) == file
    assert network_file(tmp_path) == file
    with pytest.raises(ValueError, match="a damaged zoo"):
        network_file("resnet32-plain")


def test_a_folder_without_a_checkpoint_does_not_hide_a_name_of_the_zoo(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "resnet32-plain").mkdir()
    (tmp_path / "resnet32-plain" / "model.safetensors").touch()  # as save_pretrained leaves it
    assert network_file("resnet32-plain") == ENTRIES["resnet32-plain"].path
    (tmp_path / "other").mkdir()
    with pytest.raises(
        CheckpointError, match=r"expected a checkpoint, or config\.json and .*; got a folder without"
    ):
        network_file("other")


def test_the_plain_network_is_alike_in_all_but_deciding():
    network = ResNetConfig(units=2, width=2, classes=100, image_size=16, group=2)
    plain = build(ResNetConfig(units=2, width=2, classes=100, image_size=16, adaptive=False))
    assert plain_flops(network) == max_flops(plain) == max_flops(plain, (16, 16))
    entry = ENTRIES["resnet32-tau0.01"]
    small = dataclasses.replace(
        entry, config=entry.config | {"network": entry.config["network"] | {"image_size": 16}}
    )
    shares = [int(row.split(" | ")[4][:-1]) for row in markdown(small).splitlines() if "±" in row]
    said = [m["flops"] for m in entry.card["results"].values()]
    assert shares == [round(100 * flops / plain_flops(small.network)) for flops in said]
    assert min(shares) > 300  # they are of four times as many pixels


def test_a_card_says_how_many_images_it_is_of(run, tmp_path):
    entry = publishing.add_entry(run, "small", images("test", 32), tmp_path)
    trained = json.loads((run / "run.json").read_text())["data"]
    assert entry.card["data"] == trained
    said = " ".join(entry.path.with_suffix(".md").read_text().split())
    assert (
        f"trained on {trained['images']:,} of its 50,000 training images, measured on 32 test images" in said
    )
    whole = dataclasses.replace(entry, card=entry.card | {"data": {"images": 50_000}})
    assert "trained on its 50,000 training images" in " ".join(markdown(whole).split())


def code_of(entry):
    return markdown(entry).split("```")[1].removeprefix("python\n")


@pytest.mark.parametrize("place", ["zoo", "elsewhere"])
def test_the_code_on_a_card_loads_the_network(run, tmp_path, monkeypatch, place):
    entry = publishing.add_entry(run, "small", images("test", 32), tmp_path)
    monkeypatch.chdir(tmp_path)
    if place == "zoo":
        monkeypatch.setattr(model_card, "FOLDER", tmp_path)
        monkeypatch.setattr(zoo, "find", lambda name: {"resnet14-small": entry}[name])
    names = {"tp": tp}
    exec(code_of(entry), names)
    assert names["model"].config == entry.network
    assert names["model"].blocks[0].mode == tp.Thresholded()


@pytest.mark.parametrize("name", ["resnet32-plain", "resnet32-sact-tau0.01"])
def test_the_code_on_the_card_of_a_named_network_calls_it_by_name(name):
    names = {"tp": tp}
    code = code_of(ENTRIES[name])
    exec(code, names)
    assert code.startswith(f"model = tp.models.{'psact_' if 'sact' in name else ''}resnet32(")
    assert names["model"].config == ENTRIES[name].network


def test_a_card_says_how_a_network_was_trained():
    entry = ENTRIES["resnet32-tau0.01"]
    other = dataclasses.replace(
        entry,
        config=entry.config | {"schedule": "cosine", "nesterov": True, "tau_ramp": 0.25, "distill": 0.9},
    )
    said = " ".join(markdown(other).split())
    assert "learning rate 0.1 as a cosine" in said
    assert "τ = 0.01 ramped in over 25% of training" in said
    assert "SGD with Nesterov momentum 0.9" in said
    assert "(90% of the loss from a teacher's outputs, at temperature 4)" in said
    assert "Nesterov" not in markdown(entry)
    assert "teacher" not in markdown(entry)
