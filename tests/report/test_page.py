"""How the page behaves in a real browser where one acts on it."""

import json
from dataclasses import replace

import numpy as np
import pytest

from tests.browser import CHROMIUM, Page
from tests.report.pages import gallery, run, three
from tests.training.small import config
from torchpact_recipes.report import read_run, write_page
from torchpact_recipes.report.naming import distinct
from torchpact_recipes.training import SequenceTrainConfig, TrainConfig, sequence_preset

in_browser = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")

PROBE = "document.querySelector('#probe p').textContent"
OF = "document.getElementById('gallery-of').textContent"
FOCUSED = "[document.activeElement.closest('[id]').id, document.activeElement.dataset.key]"


@pytest.fixture
def opened(tmp_path):
    with Page(three(tmp_path / "page.html")) as page:
        yield page
        assert page.errors == []


def to_row_27(page):
    page.run("document.querySelector('#blocks button').click(); document.getElementById('stage').focus()")
    for _ in range(10):
        page.press("ArrowDown")
    assert page.run(PROBE).startswith("Row 27, column 17: ")


@in_browser
@pytest.mark.parametrize(
    "act",
    [
        "document.querySelectorAll('#runs button')[1].click()",
        "(s => { s.value = 1; s.dispatchEvent(new Event('change')); })(document.getElementById('network'))",
    ],
    ids=["table", "list"],
)
def test_another_network_is_not_asked_for_a_position_of_the_last_one(opened, act):
    to_row_27(opened)
    opened.run(act)
    assert opened.run("viewer.gallery.sizes[0][0]") == 16
    assert "Row" not in opened.run(PROBE)
    assert "SACT" in opened.run("document.querySelector('h1').textContent")
    opened.run("document.getElementById('stage').focus()")
    opened.press("ArrowDown")
    assert opened.run(PROBE) == "Row 10, column 9: runs all 2 units"


@in_browser
def test_the_theme_button_leaves_image_block_unit_and_position(opened):
    to_row_27(opened)
    opened.run("document.querySelectorAll('#blocks button')[1].click()")
    opened.run("document.querySelector('#easiest button').click(); viewer.unit = 2; viewer.draw()")
    opened.run("document.getElementById('stage').focus()")
    opened.press("ArrowRight")
    state = "[viewer.gallery.images.indexOf(viewer.image), viewer.block, viewer.unit, ...viewer.position]"
    pictures = "[...document.querySelectorAll('#stage, .thumbs canvas')].map(c => c.toDataURL())"
    before, drawn = opened.run(state), opened.run(pictures)
    assert before == [1, 1, 2, 16, 17]
    opened.run("document.getElementById('theme').click()")
    assert opened.run(state) == before
    changed = [a != b for a, b in zip(drawn, opened.run(pictures), strict=True)]
    assert changed == [True, False, True, False, True]  # the stage; images as they are, maps in new colours


@in_browser
@pytest.mark.parametrize(
    ("host", "key"), [("by-flops", "1 thresholded"), ("runs", "1"), ("runs", "2")], ids=str
)
def test_choosing_by_keyboard_keeps_the_focus(opened, host, key):
    opened.run(f"document.querySelector('#{host} [data-key=\"{key}\"]').focus()")
    opened.press("Enter")
    assert opened.run("chosen") == int(key.split()[0])
    assert opened.run(FOCUSED) == [host, key]


@in_browser
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("shade", [0, 128, 255])
def test_halted_positions_are_hatched_however_bright_the_image_is(tmp_path, dark, shade):
    path = write_page(tmp_path / "page.html", [run()], [gallery(0, 16, shade=shade)], "")
    with Page(path, dark=dark) as opened:
        opened.run("viewer.unit = 2; viewer.draw()")
        pixels = opened.run(
            "[...document.getElementById('stage').getContext('2d').getImageData(0, 0, 512, 512).data]"
        )
        grey = np.array(pixels).reshape(512, 512, 4)[..., :3].mean(-1)
        assert (grey[:, 256:] == shade).all()
        for cell in grey[:, :256].reshape(16, 32, 8, 32).transpose(0, 2, 1, 3).reshape(-1, 32 * 32):
            assert np.ptp(cell) > 30
        assert opened.errors == []


@in_browser
def test_the_gallery_says_whose_it_is(opened):
    assert opened.run(OF) == "Of ResNet-14, PSACT, τ = 0.05."
    opened.run("document.querySelectorAll('#runs button')[1].click()")
    assert opened.run(OF) == "Of ResNet-14, SACT, τ = 0.1."
    opened.run("document.querySelectorAll('#runs button')[2].click()")
    said = "A plain network computes everywhere; these are of ResNet-14, SACT, τ = 0.1."
    assert opened.run(OF) == said
    opened.run("document.getElementById('theme').click()")
    assert opened.run(OF) == said


@in_browser
def test_a_run_without_weights_is_said_to_have_no_pictures(tmp_path):
    runs = [run(), run("ResNet-14, SACT, τ = 0.1")]
    with Page(write_page(tmp_path / "page.html", runs, [gallery(1, 8)], "")) as opened:
        there_are_none = "There are no pictures of ResNet-14, PSACT, τ = 0.05; these are of "
        assert opened.run(OF) == there_are_none + "ResNet-14, SACT, τ = 0.1."
        assert opened.errors == []


def test_names_get_no_more_than_it_takes_to_tell_them_apart():
    known = [["a", "s0", "x"], ["a", "s1", "x"], ["b", "s0", "x"], ["b", "s0", "y"], ["b", "s0", "y"]]
    names = distinct(["one"] * 5, known)
    assert names == ["one, a, s0", "one, a, s1", "one, b, x", "one, b, y", "one, b, y"]
    assert distinct(["one", "two"], known[:2]) == ["one", "two"]
    assert distinct([], []) == []


def test_runs_that_differ_have_different_titles_and_labels(tmp_path):
    several: dict[str, TrainConfig | SequenceTrainConfig] = {
        "base": config("relaxed"),
        "seed": config("relaxed", seed=1),
        "group": config("relaxed", network={"group": 3}),
        "wide": config("relaxed", network={"width": 2}),
        "deep": replace(config("relaxed"), network=replace(config("relaxed").network, units=3)),
        "pixel": config("reinforce"),
        "image": config("reinforce", network={"per": "image"}),
        "warm": config("relaxed", lr=0.2),
        "parity": sequence_preset("parity", "tiny", method="act", tau=0.05),
        "addition": sequence_preset("addition", "tiny", method="act", tau=0.05),
    }
    for name, chosen in several.items():
        (tmp_path / name).mkdir()
        record = {"status": "started", "config": chosen.to_dict()}
        (tmp_path / name / "run.json").write_text(json.dumps(record))
    runs = [read_run(tmp_path / name).values for name in several]
    page = write_page(tmp_path / "page.html", runs, [], "").read_text()
    shown = json.loads(page.partition('id="data">')[2].partition("</script>")[0])["runs"]
    for key in ("title", "label"):
        assert len({one[key] for one in shown}) == len(several)
    titles = dict(zip(several, (one["title"] for one in shown), strict=True))
    assert titles["image"] == "ResNet-14, REINFORCE, τ = 0.05, per image"
    assert titles["group"] == "ResNet-14, PSACT, τ = 0.05, groups of 3×3"
    assert titles["seed"] == "ResNet-14, PSACT, τ = 0.05, seed 1"
    assert titles["warm"] == "ResNet-14, PSACT, τ = 0.05, seed 0, warm"
    assert shown[list(several).index("deep")]["label"] == "PSACT τ 0.05, ResNet-20"
    assert titles["parity"] == "parity, ACT, τ = 0.05"
    assert shown[-1]["label"] == "ACT τ 0.05, addition"


@in_browser
def test_titles_and_chart_labels_are_told_apart(tmp_path):
    runs = [run(traits=["ResNet-14", f"seed {seed}"], loss=1.0 + seed) for seed in (0, 1)]
    with Page(write_page(tmp_path / "page.html", runs, [gallery(0, 8), gallery(1, 8)], "")) as opened:
        titles = [f"ResNet-14, PSACT, τ = 0.05, seed {seed}" for seed in (0, 1)]
        for place in ("#runs button", "#network option"):
            assert opened.run(f"[...document.querySelectorAll('{place}')].map(e => e.textContent)") == titles
        drawn = opened.run("document.getElementById('curve-loss').textContent")
        assert "seed 0" in drawn
        assert "seed 1" in drawn
        assert opened.errors == []


@in_browser
def test_the_title_does_not_break_within_a_name_or_tau(tmp_path):
    with Page(three(tmp_path / "page.html"), width=320) as opened:
        whole = (
            "[...document.querySelectorAll('h1 span')].map(s => [s.textContent, s.getClientRects().length])"
        )
        assert opened.run(whole) == [["ResNet-14,", 1], ["τ = 0.05", 1]]
        assert opened.errors == []


@in_browser
def test_labels_of_short_runs_do_not_lie_on_long_curves(tmp_path):
    runs = [run(), run("ResNet-14, plain", "plain", end=4)]
    with Page(write_page(tmp_path / "page.html", runs, [], "")) as opened:
        # both lines are at the same height: the label cannot stand right of the end of the short one
        box = opened.run(
            "(b => [b.y, b.y + b.height])([...document.querySelectorAll('#curve-loss text')]"
            ".find(t => t.textContent === 'plain').getBBox())"
        )
        line = opened.run("(b => b.y)(document.querySelector('#curve-loss .line').getBBox())")
        assert box[1] <= line + 1 or box[0] >= line - 1
        assert opened.errors == []


@in_browser
@pytest.mark.parametrize("images", [100, 50])
def test_it_says_on_how_many_images_runs_were_measured_where_that_differs(tmp_path, images):
    with Page(three(tmp_path / "page.html", images=images)) as opened:
        heads = opened.run("[...document.querySelectorAll('#runs th')].map(e => e.textContent)")
        assert ("images" in heads) == (images == 50)
        summary = opened.run("document.getElementById('summary').textContent")
        assert ("measured on 50 images and on 100" in summary) == (images == 50)
        assert opened.errors == []


@in_browser
@pytest.mark.parametrize(("width", "hinted"), [(390, True), (1200, False)])
def test_a_table_that_goes_on_says_so(tmp_path, width, hinted):
    with Page(three(tmp_path / "page.html"), width=width) as opened:
        assert opened.run("!document.getElementById('table-hint').hidden") == hinted
        assert opened.run("document.documentElement.scrollWidth") <= width


@in_browser
def test_a_finger_asks_as_the_pointer_does_and_the_answer_remains(opened):
    said = opened.run(PROBE)
    assert "touch" in said
    assert "arrow keys" in said
    opened.run(
        "(r => { for (const kind of ['pointerdown', 'pointerup', 'pointerleave'])"
        " viewer.stage.dispatchEvent(new PointerEvent(kind,"
        " { pointerType: 'touch', clientX: r.left + 2, clientY: r.top + 2 })); })"
        "(viewer.stage.getBoundingClientRect())"
    )
    assert opened.run(PROBE) == "Row 1, column 1: halts after unit 1"
