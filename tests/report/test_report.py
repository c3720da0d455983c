"""The report: what it reads of runs, and the page in a real browser."""

import base64
import json
import shutil
import sys

import pytest
import torch

from tests.browser import CHROMIUM, Page
from tests.training.small import config, images
from tests.viz.networks import network
from torchpact import cli
from torchpact.block import use_mode
from torchpact.data import load_sample
from torchpact.flops import count_flops
from torchpact.report import gallery, measure, read_run
from torchpact.report.page import embedded
from torchpact.training import Trainer
from torchpact.training.inputs import as_input


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
        trainer.burst()
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
    (tmp_path / "run.json").write_text("[]")
    assert call(monkeypatch, tmp_path) == 2
    assert capsys.readouterr().err.count("\n") == 1


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
