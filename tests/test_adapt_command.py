"""torchpact adapt."""

import json
from functools import partial

import pytest
import torch
from PIL import Image

import torchpact as tp
from tests.test_diagnose_command import saved, texts
from torchpact_recipes.report.adapted import Report, Way


@pytest.fixture
def run(run):
    return partial(run, "adapt")


SHORT = ("--updates", 4, "--batch", 4, "--limit", 40)


def _saved(folder, kind):
    net, tokenizer = saved(folder, kind == "decoder")
    if kind == "classifier":
        import transformers

        net = transformers.BertForSequenceClassification(net.config).eval()
    net.save_pretrained(folder)
    return net, tokenizer


@pytest.mark.parametrize("kind", ["encoder", "classifier", "decoder"])
def test_a_folder_learns_to_meet_a_budget_on_texts(run, tmp_path, kind):
    _saved(tmp_path / "net", kind)
    out = tmp_path / "out"
    code, printed, err = run(
        tmp_path / "net", "--data", texts(tmp_path, 40), "--budget", 0.8, *SHORT, "-o", out
    )
    assert code == 0, err
    record = json.loads((out / "report.json").read_text())
    ways = {way["criterion"] for way in record["ways"]}
    assert {"heads", "layer 1", "layer 3", "fewer layers"} <= ways
    assert ("confidence" in ways) == ("patience" in ways) == (kind == "classifier")
    assert ("random" in ways) == (kind != "decoder")
    full = next(way for way in record["ways"] if way["criterion"] == "layer 3")
    layers = {way["criterion"]: way["cost"] for way in record["ways"]}
    assert layers["layer 1"] < layers["fewer layers"] < full["cost"]
    page = (out / "report.html").read_text()
    assert "<svg" in page
    assert "http://" not in page.replace("http://www.w3.org", "").replace("http://purl.org", "").replace(
        "http://creativecommons.org", ""
    )
    card = (out / "network" / "README.md").read_text()
    assert "made adaptive" in card
    assert "| trained heads |" in card
    assert "on texts of texts.txt that were" in card
    assert not (out / "checkpoint").exists()
    again = tp.from_pretrained(out / "network")
    assert again.torchpact.runs[0].bounds is not None
    assert "At a budget of 80%" in printed


def test_a_network_for_images_learns_on_a_folder_of_images(run, tmp_path):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 24}
    config = transformers.ViTConfig(image_size=8, patch_size=4, **sizes)
    transformers.ViTForImageClassification(config).save_pretrained(tmp_path / "net")
    folder = tmp_path / "images"
    folder.mkdir()
    for number in range(16):
        Image.new("RGB", (10, 9), (15 * number, 90, 240 - 15 * number)).save(folder / f"{number:02}.png")
    out = tmp_path / "out"
    code, _, err = run(
        tmp_path / "net", "--data", folder, "--budget", 0.8, *SHORT, "--no-students", "-o", out
    )
    assert code == 0, err
    assert json.loads((out / "report.json").read_text())["examples"] == 4
    assert "on images of images that were" in (out / "network" / "README.md").read_text()
    assert not hasattr(
        transformers.AutoModelForImageClassification.from_pretrained(out / "network"), "torchpact"
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--budget", 0.0001), "expected a budget of 0."),
        (("--budget", 60), "expected --budget in (0, 1], a share of the FLOPs, got 60"),
        (("--budget", 0.8, "--batch", 40), "expected at least 4 batches"),
        (("--budget", 0.8, "--per", "pixel"), "expected --per token or example"),
    ],
)
def test_what_cannot_be_done_is_refused_in_one_line(run, tmp_path, options, message):
    _saved(tmp_path / "net", "encoder")
    code, _, err = run(tmp_path / "net", "--data", texts(tmp_path, 40), *SHORT[:2], "--batch", 4, *options)
    assert code != 0
    assert message in err
    assert err.strip().count("\n") == 0
    assert not (tmp_path / "adapted").exists()


def test_an_adaptive_network_is_refused_with_a_way_out(run, tmp_path):
    net, _ = _saved(tmp_path / "net", "encoder")
    tp.save_pretrained(tp.adapt(net), tmp_path / "net")
    code, _, err = run(tmp_path / "net", "--data", texts(tmp_path, 40), "--budget", 0.8)
    assert (code, err.count("\n")) == (2, 1)
    assert "got one that is adaptive already: name the folder of the original" in err


def _report(ways):
    return Report("net", "data", 0.6, tuple(ways), 1.0, 2.0, "a batch", "table", "summary", 10)


def test_the_verdict_names_what_loses_less_within_the_budget():
    heads = Way("heads", 0.6, 0.59, 0.2)
    full, late = Way("layer 4", 1.0, 1.0, 0.0), Way("layer 1", 0.3, 0.3, 1.0)
    ideal = Way("oracle", 0.6, 0.59, 0.05)
    assert "Nothing else" in _report([heads, full, late, ideal]).verdict()
    better = Way("fewer layers", 0.55, 0.55, 0.1, note="2 layers, distilled alone")
    assert (
        "2 layers, distilled alone loses less, 0.1 at 55.0%" in _report([heads, full, late, better]).verdict()
    )
