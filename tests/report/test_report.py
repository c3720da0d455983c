"""The report: what it reads of runs, and the page in a real browser."""

import base64
import json
import shutil
import sys

import pytest
import torch

from tests.browser import CHROMIUM, Page
from tests.training.small import burst, config, images
from tests.viz.networks import network
from torchpact import cli
from torchpact.core.overrides import use_mode
from torchpact.flops.count import count_flops
from torchpact_recipes.data import as_input, load_sample
from torchpact_recipes.report import gallery, measure, read_run, write_page
from torchpact_recipes.report.page import embedded
from torchpact_recipes.training import Trainer, sequence_preset


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    test = images("test", 32)
    for method in ("plain", "relaxed", "act"):
        Trainer(config(method), folder / method, images(), test).run()
    return folder


@pytest.fixture(scope="module")
def unfinished(runs, tmp_path_factory):
    """A run that was interrupted while it wrote a line, after its second checkpoint."""
    folder = tmp_path_factory.mktemp("unfinished") / "run"
    trainer = Trainer(config("relaxed"), folder, images(), images("test", 32))
    while trainer.learner.iteration < 6:
        burst(trainer)
    with (folder / "history.jsonl").open("a") as file:
        file.write('{"kind": "train", "iter')
    return folder


def call(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["torchpact", "report", *map(str, arguments)])
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    return exit_.value.code or 0


def data_of(page):
    text = page.read_text().partition('id="data">')[2].partition("</script>")[0]
    return json.loads(text)


def test_a_finished_run_is_read_with_its_results(runs):
    found = read_run(runs / "relaxed")
    record = json.loads((runs / "relaxed" / "run.json").read_text())
    assert found.values["results"] == record["results"]
    assert found.values["title"] == "ResNet-14, PSACT, τ = 0.05"
    assert found.values["status"] == "finished"
    assert [e["iteration"] for e in found.values["history"] if e["kind"] == "train"] == [4, 8, 12]
    assert found.model is not None


def test_an_interrupted_run_is_read_as_far_as_it_came(unfinished):
    values = read_run(unfinished).values
    assert (values["status"], values["iteration"], values["iterations"]) == ("started", 6, 12)
    assert set(values["results"]) == {"relaxed", "discrete", "thresholded"}


def test_a_run_that_has_only_begun_is_read_too(tmp_path):
    Trainer(config("relaxed"), tmp_path / "run", images(), images("test", 32))
    found = read_run(tmp_path / "run")
    assert (found.values["results"], found.values["history"], found.model) == ({}, [], None)


def test_numbers_without_weights_are_enough(runs, tmp_path, monkeypatch):
    (tmp_path / "run").mkdir()
    for name in ("run.json", "history.jsonl"):
        shutil.copy(runs / "relaxed" / name, tmp_path / "run")
    assert call(monkeypatch, tmp_path / "run", "-o", tmp_path / "page.html") == 0
    data = data_of(tmp_path / "page.html")
    assert data["galleries"] == []
    assert data["runs"][0]["results"]


def test_the_gallery_holds_what_the_network_did():
    model, sample = network(units=3), load_sample("test")
    few = type(sample)(sample.images[:20], sample.labels[:20])
    found = gallery(model, few, each=3)
    assert [one["kind"] for one in found["images"]] == ["hardest"] * 3 + ["easiest"] * 3
    with torch.no_grad(), use_mode(model, "thresholded"):
        _, ponders = model(as_input(few.images))
        count = count_flops(model, as_input(few.images)).total
    spent = [one["mflops"] for one in found["images"]]
    assert spent[0] == count.max().item() / 1e6
    assert spent[3] == count.min().item() / 1e6
    hardest = int(count.argmax())
    block = found["images"][0]["blocks"][1]
    steps = torch.frombuffer(bytearray(base64.b64decode(block["steps"])), dtype=torch.uint8)
    assert torch.equal(steps.view(16, 16), ponders[1].steps[hardest, 0].byte())
    probs = torch.frombuffer(bytearray(base64.b64decode(block["probs"])), dtype=torch.uint8).view(2, 16, 16)
    assert (probs / 255 - ponders[1].probs[:2, hardest, 0]).abs().max() <= 0.5 / 255 + 1e-6


def test_times_are_taken_in_every_mode():
    sample = load_sample("test")
    found = measure(network(units=2), sample, ("relaxed", "thresholded"), batch=4)
    assert set(found["modes"]) == {"relaxed", "thresholded"}
    assert min([found["plain"], *found["modes"].values()]) > 0
    assert found["batch"] == 4


def test_nothing_in_the_data_can_leave_its_element_and_what_is_no_number_is_null():
    text = embedded({"name": "</script><b>", "loss": [float("nan"), float("inf"), 1.5]})
    assert "<" not in text
    assert json.loads(text) == {"name": "</script><b>", "loss": [None, None, 1.5]}


def test_a_folder_that_is_no_run_is_told_in_one_line(tmp_path, monkeypatch, capsys):
    assert call(monkeypatch, tmp_path, "-o", tmp_path / "page.html") == 2
    assert capsys.readouterr().err == (
        f"torchpact: {tmp_path}: expected the folder of a run, got one without run.json\n"
    )
    assert call(monkeypatch, tmp_path / "none", "-o", tmp_path / "page.html") == 2
    assert capsys.readouterr().err.endswith("none: expected the folder of a run, got no folder\n")
    (tmp_path / "run.json").write_text("[]")
    assert call(monkeypatch, tmp_path) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    "record",
    [
        {"config": {"method": "relaxed"}},
        {"config": []},
        {"config": config("relaxed").to_dict() | {"tau": "cheap"}},
        {"config": config("relaxed").to_dict() | {"network": {"depth": 3}}},
        {"config": config("relaxed").to_dict(), "results": {"relaxed": 3}},
        {"config": config("relaxed").to_dict(), "results": [1]},
        {"config": config("relaxed").to_dict(), "iteration": "many"},
        {"config": {"task": "parity"}},
    ],
)
def test_a_damaged_record_is_told_in_one_line(tmp_path, record):
    (tmp_path / "run.json").write_text(json.dumps({"status": "finished"} | record))
    with pytest.raises(ValueError, match=r"run\.json: expected what torchpact train writes, got") as told:
        read_run(tmp_path)
    assert "\n" not in str(told.value)


def test_a_record_without_a_status_is_told(tmp_path):
    (tmp_path / "run.json").write_text(json.dumps({"config": config("relaxed").to_dict()}))
    with pytest.raises(ValueError, match="expected what torchpact train writes, got KeyError"):
        read_run(tmp_path)


def test_events_that_say_nothing_are_left_out(runs, tmp_path):
    shutil.copy(runs / "relaxed" / "run.json", tmp_path)
    good = '{"kind": "train", "iteration": 4, "loss": 1.0}'
    bad = ["{}", "[]", "3", '{"kind": "train"}', '{"iteration": 5}']
    bad += [
        '{"kind": "validate", "iteration": 6}',
        '{"kind": "validate", "iteration": 6, "modes": {"act": 1}}',
    ]
    (tmp_path / "history.jsonl").write_text("\n".join([*bad, good]))
    assert [event["iteration"] for event in read_run(tmp_path).values["history"]] == [4]


def test_the_plain_network_it_is_compared_with_is_of_the_same_images(runs):
    # the images of these runs have 12 pixels a side
    plain = json.loads((runs / "plain" / "run.json").read_text())["results"]["plain"]["flops"]
    assert read_run(runs / "relaxed").values["plain_flops"] == plain


def test_a_baseline_of_random_decisions_is_reported(tmp_path, monkeypatch):
    Trainer(config("random"), tmp_path / "random", images(), images("test", 32)).run()
    assert call(monkeypatch, tmp_path / "random", "-o", tmp_path / "page.html", "--no-timing") == 0
    data = data_of(tmp_path / "page.html")
    assert data["runs"][0]["title"] == "ResNet-14, random decisions, 1.5 / 1.3 / 1.7 units"
    assert data["runs"][0]["label"] == "random, 4.5 units"
    assert data["galleries"][0]["mode"] == "discrete"


@pytest.mark.parametrize(
    ("chosen", "label"),
    [
        (config("relaxed"), "PSACT τ 0.05"),
        (config("reinforce"), "REINFORCE τ 0.05"),
        (config("act"), "SACT τ 0.05"),
        (config("act", network={"per": "image"}), "ACT τ 0.05"),
        (config("plain"), "plain"),
        (sequence_preset("parity", "tiny", method="act", tau=0.05), "ACT τ 0.05"),
        (sequence_preset("parity", "tiny", method="relaxed", tau=0.05), "PACT τ 0.05"),
        (sequence_preset("parity", "tiny", method="ponder", tau=0.05), "PonderNet τ 0.05"),
        (sequence_preset("parity", "tiny", method="repeat"), "repeat 10"),
        (sequence_preset("parity", "tiny", method="plain"), "plain"),
    ],
    ids=str,
)
def test_labels_tell_methods_apart(tmp_path, chosen, label):
    (tmp_path / "run.json").write_text(json.dumps({"status": "started", "config": chosen.to_dict()}))
    assert read_run(tmp_path).values["label"] == label


in_browser = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")

ACTIVE = "document.getElementById('active').textContent"
STAGE = "(r => [r.left, r.top, r.width])(document.getElementById('stage').getBoundingClientRect())"


@pytest.fixture(scope="module")
def page(runs, unfinished, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "report.html"
    folders = [runs / "plain", runs / "relaxed", runs / "act", unfinished]
    with pytest.MonkeyPatch.context() as patch:
        assert call(patch, *folders, "-o", path, "--no-timing") == 0
    return path


@in_browser
def test_the_page_opens_without_errors_and_asks_for_nothing(page):
    with Page(page) as opened:
        assert opened.run("document.documentElement.dataset.ready") == "true"
        assert opened.run("performance.getEntriesByType('resource').length") == 0
        assert opened.errors == []
        assert opened.run("document.querySelectorAll('#runs tr').length") == 1 + 1 + 3 + 2 + 3
        assert opened.run("document.querySelectorAll('#by-flops g').length") == 1 + 3 + 2 + 3


@in_browser
def test_the_slider_walks_through_units_and_active_positions_shrink(page):
    with Page(page) as opened:
        opened.run("document.getElementById('unit').focus(); document.getElementById('unit').value")
        for _ in range(5):
            opened.press("ArrowLeft")
        first = opened.run(ACTIVE)
        before = opened.run("document.getElementById('stage').toDataURL()")
        opened.press("ArrowRight")
        assert first == "100 % of positions active"
        share = json.loads(opened.run("JSON.stringify((v => [v.unit, v.steps[v.block].length])(viewer))"))
        assert share[0] == 2
        counted = opened.run("[...viewer.steps[viewer.block]].filter(s => s >= 2).length")
        assert opened.run(ACTIVE) == f"{100 * counted / share[1]:.0f} % of positions active"
        if counted < share[1]:
            assert opened.run("document.getElementById('stage').toDataURL()") != before
        assert opened.errors == []


@in_browser
def test_pointer_and_arrow_keys_show_halting_probabilities(page):
    with Page(page) as opened:
        opened.run("document.getElementById('stage').scrollIntoView()")
        left, top, size = opened.run(STAGE)
        opened.hover(left + 8, top + 8)  # corners are round
        assert opened.run("document.querySelector('#probe p').textContent").startswith("Row 1, column 1: ")
        assert opened.run("document.querySelectorAll('#probe .bar').length") >= 1
        opened.hover(left + size - 8, top + 8)
        columns = opened.run("viewer.gallery.sizes[viewer.block][1]")
        assert f"column {columns}:" in opened.run("document.querySelector('#probe p').textContent")
        opened.run("document.getElementById('stage').focus()")
        opened.press("ArrowDown")
        assert opened.run("document.querySelector('#probe p').textContent").startswith("Row 2, ")
        assert opened.errors == []


@in_browser
def test_another_run_can_be_chosen_by_keyboard(page):
    with Page(page) as opened:
        assert "PSACT" in opened.run("document.querySelector('h1').textContent")
        opened.run("document.querySelectorAll('#runs button')[2].focus()")
        opened.press("Enter")
        assert opened.run("document.querySelector('h1').textContent") == "ResNet-14, SACT, τ = 0.05"
        assert opened.run("document.getElementById('caption').textContent").endswith("ACT mode")
        opened.run("document.querySelectorAll('#runs button')[3].click()")
        assert "50 %" in opened.run("document.getElementById('headline').textContent")
        assert opened.errors == []


@in_browser
@pytest.mark.parametrize("dark", [False, True])
def test_it_fits_a_phone_in_light_and_dark(page, dark):
    with Page(page, width=390, dark=dark) as opened:
        assert opened.run("document.documentElement.scrollWidth") <= 390
        background = opened.run("getComputedStyle(document.body).backgroundColor")
        lightness = sum(map(int, background.strip("rgb()").split(","))) / 3
        assert lightness < 60 if dark else lightness > 200
        opened.run("document.getElementById('theme').click()")
        assert opened.run("getComputedStyle(document.body).backgroundColor") != background
        assert opened.errors == []


@in_browser
def test_text_is_reported_in_bits_and_nothing_that_is_no_number_stops_the_page(tmp_path):
    chosen = sequence_preset("enwik8", "tiny", method="relaxed", iterations=8)
    measured = {"bits_per_character": 2.345, "accuracy": 0.0123, "steps": 1.5}
    history = [
        {"kind": "train", "iteration": 4, "loss": None, "accuracy": None, "expected_steps": [1.5]},
        {"kind": "train", "iteration": 8, "loss": 2.0, "accuracy": 0.2, "expected_steps": [None]},
    ]
    broken = {"accuracy": None, "flops": None, "steps": [1.0, None]}
    for name, of, results in (("text", chosen, measured), ("broken", config("relaxed"), broken)):
        (tmp_path / name).mkdir()
        record = {"status": "finished", "config": of.to_dict(), "results": {"thresholded": results}}
        (tmp_path / name / "run.json").write_text(json.dumps(record))
        (tmp_path / name / "history.jsonl").write_text("\n".join(map(json.dumps, history)))
    both = [read_run(tmp_path / name).values for name in ("text", "broken")]
    both.append(both[1] | {"results": {"act": {}}, "method": "act"})
    with Page(write_page(tmp_path / "page.html", both, [], "")) as opened:
        shown = opened.run("document.getElementById('headline').textContent")
        assert "2.345" in shown
        assert "bits per character" in shown
        assert "accuracy" not in shown
        for index in (1, 2):
            opened.run(f"document.querySelectorAll('#runs button')[{index}].click()")
            assert opened.run("document.getElementById('headline').textContent").startswith("–accuracy")
        assert "NaN" not in opened.run("document.body.innerHTML")
        assert opened.run("document.documentElement.dataset.ready") == "true"
        assert opened.errors == []
