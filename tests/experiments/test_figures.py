"""What figures show, from results whose means and deviations are known."""

import builtins
import csv
import json
import math
from collections import Counter

import pytest
from matplotlib.text import Text

from tests.experiments.synthetic import evaluation, write
from torchpact_recipes.experiments import EXPERIMENTS, SCALES, fig2, fig3, fig4, fig5, frontier
from torchpact_recipes.experiments.gather import over_seeds, spread
from torchpact_recipes.experiments.labels import Label, write_labels
from torchpact_recipes.experiments.plotting import canvas

FAST = SCALES["fast"]
THREE = (90.0, 91.0, 92.0)
"""Mean 91, standard deviation 1."""


def numbers(paths, name):
    assert all(path.stat().st_size > 0 for path in paths)
    (path,) = (path for path in paths if path.name == f"{name}.json")
    return json.loads(path.read_text())


def same(accuracy, mflops, modes=("relaxed", "discrete", "thresholded")):
    return {"modes": {mode: evaluation(accuracy, mflops) for mode in modes}}


def test_ponder_cost_has_the_values_found_by_hand():
    # N = 4, 3, 2, 1 as h¹ passes 0.99 − 2/3, 0.99 − 1/3 and 0.99
    assert fig2.ponder_costs([0.0, 0.2, 0.5, 0.9, 1.0]) == pytest.approx(
        [4 + 1 / 3, 4 + 1 / 3 - 0.2, 3 + 2 / 3 - 0.5, 3 - 0.9, 2.0]
    )
    first, second, third = fig2.jumps()
    assert (first.h1, first.before, first.after) == pytest.approx((0.99 - 2 / 3, 4.01, 3.01 + 1 / 3))
    assert (second.h1, second.before, second.after) == pytest.approx((0.99 - 1 / 3, 3.01, 2.01 + 1 / 3))
    assert (third.h1, third.before, third.after) == pytest.approx((0.99, 2.01, 2.0))


def test_pact_steps_are_linear_in_the_first_probability():
    # 1 + (1 − h¹)(1 + 2/3 + 4/9)
    assert fig2.pact_steps([0.0, 0.5, 1.0]) == pytest.approx([1 + 19 / 9, 1 + 19 / 18, 1.0])


def test_fig2_writes_its_curve(archive, tmp_path):
    paths = fig2.draw(archive, FAST, [], tmp_path / "figures")
    assert {path.name for path in paths} == {"fig2.png", "fig2.pdf", "fig2.json"}
    found = numbers(paths, "fig2")
    assert len(found["h1"]) == len(found["ponder_cost"]) == len(found["expected_steps"]) == 101
    assert [round(jump["h1"], 4) for jump in found["jumps"]] == [0.3233, 0.6567, 0.99]


def test_the_same_results_give_the_same_files(archive, tmp_path):
    one = fig2.draw(archive, FAST, [], tmp_path / "one")
    two = fig2.draw(archive, FAST, [], tmp_path / "two")
    assert [path.read_bytes() for path in one] == [path.read_bytes() for path in two]


def test_fig3_has_the_loss_with_its_penalty_and_gaps_seed_by_seed(archive, tmp_path):
    for seed, run in enumerate(fig3.runs(FAST, [0, 1, 2])):
        modes = {
            "relaxed": evaluation(90 + seed, 60, nll=0.2 + 0.1 * seed),
            "discrete": evaluation(80 + seed, 50, nll=0.2),
            "thresholded": evaluation(80 - seed, 40, nll=0.2),
        }
        # one seed was looked at more often than the others
        often = [2000, 4000] if seed else [1000, 2000, 4000]
        write(archive, run, {iteration: {"modes": modes} for iteration in often})
    found = numbers(fig3.draw(archive, FAST, [0, 1, 2], tmp_path / "figures"), "fig3")
    loss = found["modes"]["loss"]["relaxed"]
    assert (loss["iterations"], loss["n"]) == ([2000, 4000], 3)
    assert loss["mean"] == pytest.approx([0.3 + 0.01 * 6] * 2)
    assert loss["sd"] == pytest.approx([0.1] * 2)
    assert found["modes"]["mflops"]["thresholded"]["mean"] == pytest.approx([40, 40])
    gap = found["minus_discrete"]["accuracy"]
    assert gap["relaxed"]["mean"] == pytest.approx([10, 10])
    assert gap["relaxed"]["sd"] == pytest.approx([0, 0], abs=1e-9)
    assert gap["thresholded"]["mean"] == pytest.approx([-2, -2])


def test_fig4_averages_logarithms_and_says_what_is_missing(archive, tmp_path):
    runs = fig4.runs(FAST, [0, 1])
    for run in runs:
        if (run.config.network.group, run.config.method, run.config.seed) == (1, "reinforce", 1):
            continue
        exponent = -5 - run.config.seed + 2 * (run.config.method == "reinforce")
        variance = {"latents": 10.0**exponent, "halting": 0.0, "total": 10.0 ** (exponent + 1)}
        events = {i: same(88 + run.config.seed, 50) | {"gradient_variance": variance} for i in (8000, 16000)}
        write(archive, run, events)
    found = numbers(fig4.draw(archive, FAST, [0, 1], tmp_path / "figures"), "fig4")
    assert found["missing"] == ["resnet32-reinforce-tau0.1-seed1"]
    settings = {(s["method"], s["latents"]): s for s in found["settings"]}
    assert settings.keys() == {(m, n) for m in ("relaxed", "reinforce") for n in (21, 84, 336, 1344)}
    curve = settings["relaxed", 84]["log10_variance"]["latents"]
    assert curve["mean"] == pytest.approx([-5.5, -5.5])
    assert curve["sd"] == pytest.approx([math.sqrt(0.5)] * 2)
    assert settings["relaxed", 84]["log10_variance"]["halting"] is None
    alone = settings["reinforce", 1344]
    assert alone["log10_variance"]["total"] == {
        "iterations": [8000, 16000], "mean": [-2, -2], "sd": None, "n": 1,
    }  # fmt: skip
    assert alone["end"]["accuracy"] == {"mean": pytest.approx(88), "sd": None, "n": 1}


def test_fig4_is_drawn_of_runs_without_variance(archive, tmp_path):
    write(archive, fig4.runs(FAST, [0])[0], {16000: same(88, 50)})
    found = numbers(fig4.draw(archive, FAST, [0], tmp_path / "figures"), "fig4")
    assert found["settings"][0]["log10_variance"]["total"] is None


@pytest.mark.parametrize("name", ["fig5", "fig5-resnet110"])
def test_fig5_has_mean_and_deviation_in_both_directions(archive, tmp_path, name):
    experiment = EXPERIMENTS[name]
    for run in experiment.runs(FAST, [0, 1, 2]):
        seed = run.config.seed
        modes = run.config.modes or ("plain",)
        write(archive, run, {16000: same(THREE[seed], 100 + 2 * seed, modes)})
    paths = experiment.draw(archive, FAST, [0, 1, 2], tmp_path / "figures")
    found, extended = numbers(paths, name), numbers(paths, f"{name}-extended")
    for point in extended["points"]:
        assert point["accuracy"] == {"mean": pytest.approx(91), "sd": pytest.approx(1), "n": 3}
        assert point["mflops"] == {"mean": pytest.approx(102), "sd": pytest.approx(2), "n": 3}
    kinds = {(point["method"], point["mode"]) for point in found["points"]}
    assert kinds == {
        ("plain", "plain"), ("relaxed", "discrete"), ("relaxed", "thresholded"), ("act", "act")
    }  # fmt: skip
    assert {(p["method"], p["mode"]) for p in extended["points"]} == kinds | {("act", "thresholded")}
    assert {point["label"] for point in found["published"]} > {"vanilla"}
    assert found["missing"] == []


def test_fig5_of_one_run_shows_that_run(archive, tmp_path):
    wanted = fig5.runs(FAST, [0, 1])
    write(archive, wanted[-1], {16000: same(90, 100, ("act", "thresholded"))})
    found = numbers(fig5.draw(archive, FAST, [0, 1], tmp_path / "figures"), "fig5")
    (point,) = found["points"]
    assert (point["tau"], point["n"], point["accuracy"]["sd"]) == (0.005, 1, None)
    assert found["runs"] == ["resnet32-act-tau0.005-seed1"]
    assert len(found["missing"]) == len(wanted) - 1


def test_the_frontier_tells_recipes_apart_and_takes_the_papers_from_its_scale(archive, tmp_path):
    for run in frontier.runs(FAST, [0]):
        write(archive, run, {40000: same(93, 100, run.config.modes or ("plain",))})
    for run in fig5.runs(SCALES["paper"], [0]):
        modes = run.config.modes or ("plain",)
        write(archive.beside("paper"), run, {100000: same(92, 80, modes)})
    found = numbers(frontier.draw(archive, FAST, [0], tmp_path / "figures"), "frontier")
    assert found["missing"] == []
    small, large = (
        Counter((point["recipe"], point["tau"] is None) for point in found[name])
        for name in ("ResNet-32", "ResNet-110")
    )
    papers = "the paper's, 100,000 iterations"
    assert small == {
        ("strong, taught", False): 3, ("strong, taught", True): 1, ("strong, by labels", True): 1,
        (papers, False): 5, (papers, True): 1,
    }  # fmt: skip
    assert large == {("strong, by labels", False): 3, ("strong, by labels", True): 1}
    assert {p["mflops"]["mean"] for p in found["ResNet-32"] if p["recipe"] == papers} == {80}


def test_summary_puts_seeds_together_whatever_experiment_they_are_of(archive, tmp_path, capsys):
    for run in (*fig3.runs(FAST, [0, 1, 2]), *fig4.runs(FAST, [5])[:1]):
        write(archive, run, {16000: same(THREE[run.config.seed % 3], 100 + run.config.seed)})
    markdown, table = EXPERIMENTS["summary"].draw(archive, FAST, [], tmp_path / "figures")
    assert markdown.read_text() in capsys.readouterr().out
    lines = [line.split(" | ") for line in markdown.read_text().splitlines()]
    row = [cell.strip(" |") for cell in lines[5]]
    assert row == [
        "resnet32-relaxed-tau0.01",
        "relaxed",
        "91.00 ± 1.00",
        "101.0 ± 1.0",
        "1.00 / 2.00 / 3.00",
        "3",
    ]
    first, *_ = csv.DictReader(table.read_text().splitlines())
    assert first["run"] == "resnet32-relaxed-tau0.1-group8"
    assert (first["seeds"], first["accuracy"], first["accuracy_sd"], first["mflops"]) == (
        "1",
        "92",
        "",
        "105",
    )


@pytest.mark.parametrize("name", ["fig3", "fig4", "fig5", "fig5-resnet110", "frontier", "summary"])
def test_nothing_to_draw_is_said_in_one_line(archive, tmp_path, name):
    with pytest.raises(ValueError, match=r"expected finished runs in .*got none") as caught:
        EXPERIMENTS[name].draw(archive, FAST, [0], tmp_path / "figures")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "figures").exists()


def test_without_matplotlib_it_says_what_to_install(archive, tmp_path, monkeypatch):
    real = builtins.__import__

    def without(name, *rest):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ValueError, match=r'pip install "\./src/torchpact_recipes\[plot\]"'):
        fig2.draw(archive, FAST, [], tmp_path)


def test_a_figure_says_how_many_runs_it_has_where_some_are_missing():
    wanted = fig3.runs(FAST, [0, 1, 2])
    assert over_seeds({"a": wanted}, wanted) == "mean ± sd of 3 seeds"
    assert over_seeds({"a": wanted[:1]}, wanted[:1]) == "1 seed"
    assert (
        over_seeds({"a": wanted[:1], "b": wanted[1:]}, wanted * 2)
        == "mean ± sd of 1 to 2 seeds (3 of 6 runs)"
    )


def test_a_spread_of_one_has_no_deviation():
    assert spread([3.0]).sd is None
    assert spread([1.0, 2.0, 4.0]).sd == pytest.approx(math.sqrt(7 / 3))


def test_labels_of_a_crowd_do_not_overlap():
    points = [(10 + 0.02 * k, 90 + 0.01 * (k % 3)) for k in range(8)]
    with canvas(size=(5, 4)) as (figure, (axes,)):
        axes.plot(*zip(*points, (0, 80), strict=True), "o")
        write_labels(axes, [Label(x, y, f"0.00{k}", "black") for k, (x, y) in enumerate(points)])
        figure.draw_without_rendering()
        boxes = [Text.get_window_extent(text) for text in axes.texts]  # without their arrows
    assert not any(a.overlaps(b) for k, a in enumerate(boxes) for b in boxes[:k])
