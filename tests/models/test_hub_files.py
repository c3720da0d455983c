"""Folders of save_pretrained as networks of the commands, with and without huggingface_hub."""

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

import torchpact as tp
from tests.training.small import config, images
from tests.viz.networks import network, write_checkpoint
from torchpact_recipes import hub_files, zoo
from torchpact_recipes.bench.rows import NetworkBench
from torchpact_recipes.commands.common import find_network, network_file
from torchpact_recipes.data import load_sample
from torchpact_recipes.training import TrainConfig, Trainer, load_model
from torchpact_recipes.training.evaluate import evaluate_modes
from torchpact_recipes.viz import ponder_maps


def save(folder, model):
    """As save_pretrained does, which another test compares with."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(hub_files.to_settings(model)))
    save_file(model.state_dict(), folder / "model.safetensors")
    return folder


@pytest.fixture
def saved(tmp_path):
    return save(tmp_path / "mine", network(tp.Thresholded(0.45), units=2))


@pytest.fixture
def few(monkeypatch):
    sample = load_sample("test").random(20, seed=0)
    monkeypatch.setattr("torchpact_recipes.commands.evaluate.load_test", lambda root, device: sample)
    return sample


def change(folder, **settings):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


@pytest.mark.parametrize("mode", [tp.Thresholded(0.45), tp.Relaxed(0.3, 0.05), tp.ACT(0.2), None], ids=str)
def test_what_the_mixin_saves_is_read_without_it(tmp_path, mode):
    hub = pytest.importorskip("torchpact_recipes.hub", reason="needs huggingface_hub", exc_type=ImportError)
    model = network(mode, units=2, adaptive=mode is not None)
    hub.HubResNet.of(model).save_pretrained(tmp_path)
    again, trained = find_network(tmp_path)
    assert trained is None
    assert not again.training
    assert (again.config, hub_files.mode_of(again)) == (model.config, mode)
    ours, theirs = model.state_dict(), again.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_huggingface_hub_is_not_needed(saved):
    code = (
        "import sys; sys.modules['huggingface_hub'] = None\n"
        "from torchpact_recipes.commands.common import find_network\n"
        f"print(find_network({str(saved)!r}).modes)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "('thresholded',)\n"


def test_evaluate_keeps_the_mode_and_its_settings(run, saved, few):
    model = network(tp.Thresholded(0.45), units=2)
    own = evaluate_modes(model, few, {"thresholded": tp.Thresholded(0.45)})
    assert own["thresholded"]["steps"] != evaluate_modes(model, few, ["thresholded"])["thresholded"]["steps"]
    for arguments in ((), ("--mode", "thresholded")):
        code, out, err = run("evaluate", saved, *arguments, "--device", "cpu", "--json")
        assert (code, err) == (0, "")
        assert json.loads(out) == own
    _, out, _ = run("evaluate", saved, "--mode", "discrete", "--mode", "act", "--device", "cpu", "--json")
    assert json.loads(out) == evaluate_modes(model, few, ["discrete", "act"])


def test_evaluate_takes_a_plain_network_of_weights_in_half_precision(run, tmp_path, few):
    model = network(units=1, adaptive=False)
    half = {name: x.half() if x.dim() > 1 else x for name, x in model.state_dict().items()}
    model.load_state_dict(half)
    folder = save(tmp_path / "plain", model)
    save_file(half, folder / "model.safetensors")
    _, out, _ = run("evaluate", folder, "--device", "cpu", "--json")
    assert json.loads(out) == evaluate_modes(model, few, ())


def test_maps_are_called_by_the_folder_and_drawn_in_its_mode(run, saved, tmp_path):
    other = save(tmp_path / "a$price$", network(tp.ACT(0.2), units=3))
    models = ("--model", saved, "--model", other, "--model", "resnet32-tau0.01")
    code, out, err = run("maps", *models, "--count", 1, "-o", tmp_path / "out", "--device", "cpu", "--json")
    assert (code, err) == (0, "")
    one, two, three = json.loads(out)["networks"]
    assert (one["title"], one["quantity"]) == ("ResNet-14, mine", "units run")
    assert (two["title"], two["quantity"]) == ("ResNet-20, a$price$", "ponder cost")
    assert three["title"] == "ResNet-32, PSACT, τ = 0.01"
    expected = ponder_maps(network(tp.Thresholded(0.45), units=2), load_sample("test").random(1, 0).images)
    assert one["images"][0]["blocks"] == expected.means()[0]
    _, out, _ = run("maps", "--model", saved, "--mode", "act", "--count", 1, "-o", tmp_path / "out", "--json")
    assert json.loads(out)["networks"][0]["title"] == "mine, evaluated as ACT"


def test_bench_deploys_with_the_threshold_that_was_saved(run, saved, tmp_path, monkeypatch):
    def row(self, masks, model, images, mode="thresholded"):
        asked.append((masks, mode))
        raise ValueError("enough")

    asked: list[object] = []
    monkeypatch.setattr(NetworkBench, "__init__", lambda *_: None)
    monkeypatch.setattr(NetworkBench, "row", row)
    for name in (saved, "resnet32-tau0.01"):
        code, _, err = run("bench", "--model", name, "--quick", "-o", tmp_path / "out", "--device", "cpu")
        assert (code, err.splitlines()[-1]) == (2, "torchpact: enough")
    assert asked == [
        ("trained, recipe unknown", tp.Thresholded(0.45)),
        ("trained, relaxed, tau 0.01", "thresholded"),
    ]


def test_training_starts_from_and_is_taught_by_a_folder_as_by_a_checkpoint(tmp_path):
    checkpoint = write_checkpoint(tmp_path / "plain.safetensors", config("plain"))
    folder = save(tmp_path / "plain", load_model(checkpoint)[0])
    states = []
    for name, initial in {"a": checkpoint, "b": folder, "c": None}.items():
        settings = config("relaxed", distill=0.5 if initial else 0.0, seed=1)
        trainer = Trainer(settings, tmp_path / name, images(), images("test", 32), initial=initial)
        trainer.run()
        states.append(trainer.learner.model.state_dict())
    ours, theirs, other = states
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert not torch.equal(ours["stem.weight"], other["stem.weight"])
    record = json.loads((tmp_path / "b" / "run.json").read_text())
    assert record["warm_start"] == record["teacher"] == f"{tmp_path.name}/plain"


def test_a_folder_comes_before_a_name_of_the_zoo_and_is_no_run_as_well(saved, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = save(tmp_path / "resnet32-plain", network(units=2))
    assert network_file("resnet32-plain").resolve() == folder
    assert network_file("resnet32-plain-strong") == zoo.find("resnet32-plain-strong").path
    checkpoint = write_checkpoint(saved / "last.safetensors", TrainConfig())
    with pytest.raises(
        ValueError, match=r"mine: expected a run or a saved network, got both \(last.safetens"
    ):
        network_file(saved)
    assert find_network(checkpoint).config == load_model(checkpoint)[1]
    assert network_file(saved / "model.safetensors") == saved
    (saved / "config.json").unlink()
    assert network_file(saved) == checkpoint
    assert network_file(saved / "model.safetensors") == saved / "model.safetensors"


def truncate(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def drop_a_tensor(folder):
    weights = load_file(folder / "model.safetensors")
    del weights["classifier.bias"]
    save_file(weights, folder / "model.safetensors")


def count_in_integers(folder):
    weights = load_file(folder / "model.safetensors")
    save_file(weights | {"classifier.bias": torch.zeros(10).long()}, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (truncate, "model.safetensors: not a readable safetensors file (Error while deserializing"),
        (drop_a_tensor, "expected the weights that config.json describes, got classifier.bias missing"),
        (count_in_integers, "got classifier.bias of another kind of numbers"),
        (lambda f: change(f, classes=7), "got 2 tensors (classifier.weight, …) of another shape"),
        (lambda f: change(f, width=10**6), "of another shape"),
        (lambda f: change(f, width=2**31 - 1), "config.json: expected a network of a possible size"),
        (lambda f: change(f, width=10**12), "config.json: expected width to be an integer of at most"),
        (lambda f: change(f, format="torchpact network 2"), "expected the format 'torchpact network 1', got"),
        (lambda f: change(f, format=[1]), "config.json: expected the format 'torchpact network 1', got [1]"),
        (lambda f: change(f, units=0), "config.json: expected units of an adaptive network to be an integer"),
        (
            lambda f: change(f, surprise=0),
            "expected the settings of a network in config.json, got ResNetConf",
        ),
        (lambda f: change(f, mode="eager"), "config.json: expected a mode among relaxed, discrete, "),
        (lambda f: change(f, mode=["act"]), "expected the settings of a network in config.json, got "),
        (
            lambda f: change(f, mode_settings={"threshold": 7}),
            "config.json: expected threshold in (0, 1), got 7",
        ),
        (lambda f: change(f, mode_settings=[7]), "expected the settings of a network in config.json, got "),
        (lambda f: (f / "config.json").write_text("[" * 10**5), "expected the settings of a network in conf"),
        (
            lambda f: (f / "config.json").write_bytes(b"\xff\xfe"),
            "expected the settings of a network in conf",
        ),
        (
            lambda f: (f / "config.json").write_text("7"),
            "expected the settings of a network in config.json, ",
        ),
        (lambda f: (f / "config.json").write_text("{}"), "expected config.json to say how many units a blo"),
        (lambda f: (f / "config.json").unlink(), "mine: expected a checkpoint, or config.json and model.sa"),
        (lambda f: (f / "config.json").unlink(), "got model.safetensors alone"),
        (
            lambda f: f.rename(f.with_name("away")),
            "mine: no such checkpoint or folder, nor network of the zoo",
        ),
        (lambda f: (f / "last.safetensors").touch(), "mine: expected a run or a saved network, got both"),
    ],
)
def test_a_bad_folder_is_told_in_one_line(run, saved, tmp_path, spoil, told):
    spoil(saved)
    for arguments in (("evaluate", saved), ("maps", "--model", saved, "-o", tmp_path / "out")):
        code, out, err = run(*arguments, "--device", "cpu")
        assert (code, out) == (2, "")
        assert err.startswith(f"torchpact: {saved}")
        assert told in err
        assert err.count("\n") == 1


def test_a_network_of_too_few_classes_is_not_evaluated(run, tmp_path):
    folder = save(tmp_path / "seven", network("act", units=2, classes=7))
    code, _, err = run("evaluate", folder, "--data", "sample")
    assert (code, err) == (2, f"torchpact: {folder}: expected a network of 10 classes, got 7\n")
