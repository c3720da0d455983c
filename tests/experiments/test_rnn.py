"""The experiments on sequences: what is run, and what figures show of results that are known."""

import json

import pytest

from torchpact_recipes.data import load_sample_text
from torchpact_recipes.experiments import EXPERIMENTS, SCALES, extrapolation, make, missing, rnn_tables
from torchpact_recipes.experiments.rnn_figures import points_of
from torchpact_recipes.experiments.rnn_runs import sequence_run
from torchpact_recipes.training import Texts

SMOKE = SCALES["smoke"]
NAMES = ("rnn-parity", "rnn-parity-beyond", "rnn-addition", "rnn-enwik8")


def evaluation(accuracy, steps, **others):
    return {
        "accuracy": accuracy,
        "sequence_accuracy": accuracy,
        "nll": 0.5,
        "steps": steps,
        "steps_by_difficulty": {"1": steps - 1, "2": steps + 1},
        "accuracy_by_difficulty": {"1": 1.0, "2": 2 * accuracy - 1},
        **others,
    }


def write(archive, run, results):
    folder = archive.results / run.name
    folder.mkdir(parents=True)
    record = {"status": "finished", "config": run.config.to_dict(), "results": results}
    (folder / "run.json").write_text(json.dumps(record))


@pytest.mark.parametrize("scale", list(SCALES))
def test_every_run_has_a_name_of_its_own(scale):
    for seeds in ([0], [0, 1, 2]):
        runs = [run for name in NAMES for run in EXPERIMENTS[name].runs(SCALES[scale], seeds)]
        assert len({run.name for run in runs}) == len(runs)
        settings = {run.setting for run in runs}
        assert len(settings) * len(seeds) == len(runs)


def test_smoke_is_made_from_nothing_and_then_found_again(archive, tmp_path):
    runs = [run for name in NAMES for run in EXPERIMENTS[name].runs(SMOKE, [0])]
    texts = Texts(load_sample_text("train"), load_sample_text("valid"))
    assert make([runs], archive, texts=texts) == []
    assert missing(runs, archive) == []
    record = archive.record(runs[0])
    assert record is not None
    assert record["versions"].keys() == {"torchpact", "torch", "python", "device"}
    assert record["training_seconds"] > 0
    # runs on images and their table know nothing of these
    assert archive.everything() == {}
    paths = [p for name in NAMES for p in EXPERIMENTS[name].draw(archive, SMOKE, [0], tmp_path / "figures")]
    assert {path.stem for path in paths} == {
        "rnn-parity", "rnn-parity-difficulty", "rnn-parity-beyond",
        "rnn-addition", "rnn-enwik8", "rnn-enwik8-passage",
    }  # fmt: skip
    assert all(path.stat().st_size > 0 for path in paths)


def test_text_without_a_text_is_told_and_the_rest_is_made(archive):
    runs = [
        sequence_run("smoke", "enwik8", "plain", 0),
        sequence_run("smoke", "parity", "plain", 0),
    ]
    (problem,) = make([runs], archive)
    assert problem == "enwik8-plain-seed0: expected a text to learn enwik8 from, got none"
    assert archive.record(runs[1]) is not None


def test_points_have_means_and_deviations_over_seeds_in_the_mode_of_their_method(archive):
    runs = [sequence_run("fast", "parity", "relaxed", seed, tau=0.1) for seed in (0, 1, 2)]
    for seed, run in enumerate(runs):
        wrong = evaluation(0.0, 0.0)
        write(archive, run, {"relaxed": wrong, "thresholded": evaluation(0.8 + 0.1 * seed, 2.0 + seed)})
    (point,) = points_of({"setting": runs}, archive)
    assert (point.method, point.tau, point.mode) == ("relaxed", 0.1, "thresholded")
    assert (point.accuracy.mean, point.accuracy.sd) == pytest.approx((90, 10))
    assert point.sequence_error is not None
    assert point.sequence_error.mean == pytest.approx(10)
    assert (point.steps.mean, point.steps.sd, point.steps.n) == (3.0, 1.0, 3)
    assert point.steps_by_difficulty == {"1": 2.0, "2": 4.0}
    assert point.accuracy_by_difficulty == pytest.approx({"1": 100, "2": 80})
    assert point.transfer is None


def test_what_lies_beyond_continues_the_difficulties_of_training(archive):
    (run,) = (
        r for r in extrapolation.runs(SCALES["fast"], [0]) if r.setting == "parity-size12-high6-repeat5"
    )
    far = evaluation(0.6, 5.0) | {"steps_by_difficulty": {"7": 5.0}, "accuracy_by_difficulty": {"7": 0.5}}
    write(archive, run, {"repeat": evaluation(1.0, 5.0, transfer=far)})
    (point,) = points_of({run.setting: [run]}, archive)
    assert point.transfer is not None
    assert point.transfer.mean == pytest.approx(60)
    assert point.accuracy_by_difficulty == pytest.approx({"1": 100, "2": 100, "7": 50})


def test_another_configuration_under_the_same_name_is_told(archive):
    run = sequence_run("fast", "parity", "plain", 0)
    write(archive, sequence_run("fast", "parity", "plain", 0, iterations=7), {})
    with pytest.raises(ValueError, match="expected iterations to be 10000, got 7; move the folder away"):
        archive.record(run)


def test_tables_have_a_row_for_every_setting_with_what_was_measured(archive):
    runs = [sequence_run("fast", "parity", "repeat", seed, max_steps=2) for seed in (0, 1)]
    runs += [sequence_run("fast", "parity", "act", seed, tau=0.01, free=0.5) for seed in (0, 1)]
    for number, run in enumerate(runs):
        mode = "repeat" if run.config.method == "repeat" else "act"
        write(archive, run, {mode: evaluation(0.8 + 0.01 * number, 2.0 + number)})
    table = rnn_tables.markdown(rnn_tables.points(runs, archive), "accuracy")
    assert table.splitlines()[2:] == [
        "| repeat |  |  | 80.5 ± 0.7 | 2 | 2 |",
        "| ACT, first half free | 0.01 | act | 82.5 ± 0.7 | 4.50 ± 0.71 | 2 |",
    ]
    errors = rnn_tables.markdown(rnn_tables.points(runs, archive), "sequence_error")
    assert "| 19.5 ± 0.7 | 2 | 2 |" in errors


def test_what_lies_beyond_has_a_table_of_its_own(archive):
    (run,) = (
        r for r in extrapolation.runs(SCALES["fast"], [0]) if r.setting == "parity-size12-high6-act-tau0.001"
    )
    write(archive, run, {"act": evaluation(1.0, 3.0, transfer=evaluation(0.5, 2.0))})
    points = rnn_tables.points([run], archive)
    assert len(rnn_tables.markdown(points, "accuracy").splitlines()) == 2
    row = rnn_tables.markdown_beyond(points).splitlines()[2]
    assert row == "| ACT | 0.001 | act | 100.0 | 3.00 | 50.0 | 2.00 | 1 |"
