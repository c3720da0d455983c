"""Sweeps of small runs: made once, resumed, and kept apart when one of them fails."""

import math
import shutil
import weakref
from dataclasses import replace

import pytest

from tests.training import small
from torchpact_recipes.experiments import EXPERIMENTS, FIRST, SCALES, Archive, Run, make, missing, sweep
from torchpact_recipes.experiments.archive import _UNIMPORTANT
from torchpact_recipes.experiments.runs import batches, with_needed
from torchpact_recipes.training import Learner, TrainingError, train_together
from torchpact_recipes.training.stopping import Stopped


@pytest.fixture(scope="module")
def data():
    return small.images(count=16), small.images("test", 16)


def family(seed=0, **settings):
    """A plain network and one that starts from it."""
    often = {"iterations": 4, "batch": 4, "log_every": 1, "validate_every": 2, "checkpoint_every": 2}
    plain = Run(small.config("plain", seed=seed, **(often | settings)))
    return [plain, Run(small.config("act", seed=seed, **often), plain)]


def results(run, archive):
    record = archive.record(run)
    assert record is not None
    return record["results"]


def nothing(trainers):
    raise AssertionError(f"trained {trainers}")


def test_every_run_is_made_once(archive, data):
    runs = family()
    assert missing(runs, archive) == runs
    assert make([runs], archive, *data) == []
    assert missing(runs, archive) == []
    assert {path.name for path in archive.results.iterdir()} == {run.name for run in runs}
    assert make([runs], archive, *data, train_all=nothing) == []


def test_groups_are_made_one_after_the_other(archive, data):
    first, second = family(1), family(0)
    looked = replace(first[1], config=replace(first[1].config, validate_every=1))
    trained: list[list[str]] = []

    def train_all(trainers):
        trained.append([trainer.files.folder.name for trainer in trainers])
        train_together(trainers)

    assert make([first, [*second, looked]], archive, *data, train_all=train_all) == []
    assert trained == [[run.name] for run in (*first, *second)]
    looks = [event for event in archive.history(first[1]) if event["kind"] == "validate"]
    assert len(looks) == 4  # as the second group wants it


def test_kinds_stay_together_in_the_order_in_which_they_come():
    runs = [Run(small.config(method, seed=seed)) for seed in (0, 1) for method in ("relaxed", "act")]
    (part,) = batches(runs, 8)
    assert [run.config.method for run in part] == ["relaxed", "relaxed", "act", "act"]


def test_what_says_most_is_trained_first():
    assert FIRST[0] == "fig5"
    assert set(FIRST) <= set(EXPERIMENTS)


def test_only_the_run_that_is_gone_is_made_again(archive, data):
    runs = family()
    make([runs], archive, *data)
    first = results(runs[1], archive)
    for folder in (archive.results, archive.work):
        shutil.rmtree(folder / runs[1].name)
    trained: list[str] = []

    def train_all(trainers):
        trained.extend(trainer.files.folder.name for trainer in trainers)
        train_together(trainers)

    make([runs], archive, *data, train_all=train_all)
    assert trained == [runs[1].name]
    assert results(runs[1], archive) == first


def school():
    """A teacher, a plain network that it teaches, and an adaptive one that starts from this and is taught."""
    often = {"iterations": 2, "batch": 4, "log_every": 1, "validate_every": 2, "checkpoint_every": 2}
    teacher = Run(small.config("plain", seed=1, **often))
    plain = Run(small.config("plain", distill=0.5, **often), teacher=teacher)
    return [teacher, plain, Run(small.config("relaxed", distill=0.5, **often), plain, teacher)]


def test_who_is_taught_comes_after_who_teaches(archive, data):
    runs = school()
    trained: list[list[str]] = []

    def train_all(trainers):
        trained.append([trainer.files.folder.name for trainer in trainers])
        train_together(trainers)

    assert make([runs[2:]], archive, *data, train_all=train_all) == []
    assert trained == [[run.name] for run in runs]
    assert len({run.name for run in runs}) == 3
    # all that the last needs is made again, if it is, and nothing else
    for run, again in ((runs[2], [runs[2]]), (runs[0], [runs[0], runs[2]])):
        for folder in (archive.results, archive.work):
            shutil.rmtree(folder / runs[2].name, ignore_errors=True)
            shutil.rmtree(folder / run.name, ignore_errors=True)
        assert [each.name for each in missing(runs[2:], archive)] == [each.name for each in again]
        trained.clear()
        assert make([runs[2:]], archive, *data, train_all=train_all) == []
        assert trained == [[each.name] for each in again]


def test_without_its_teacher_a_run_is_not_made(archive, data):
    runs = school()

    def train_all(trainers):
        if trainers and trainers[0].files.folder.name == runs[0].name:
            raise TrainingError("loss is nan")
        train_together(trainers)

    problems = make([runs], archive, *data, train_all=train_all)
    assert problems == [
        f"{runs[0].name}: loss is nan",
        f"{runs[1].name}: has nothing to start or learn from",
        f"{runs[2].name}: has nothing to start or learn from",
    ]


def test_a_sweep_that_is_stopped_keeps_what_is_finished_and_starts_nothing(archive, data):
    runs = family()
    trained = []

    def train_all(trainers):
        trained.extend(trainers)
        train_together(trainers)
        raise Stopped("stopped; all had finished", 2)

    with pytest.raises(Stopped):
        make([runs], archive, *data, train_all=train_all)
    assert [trainer.files.folder.name for trainer in trained] == [runs[0].name]
    assert missing(runs, archive) == runs[1:]


def test_results_that_are_gone_come_back_from_the_work_without_training(archive, data):
    runs = family()
    make([runs], archive, *data)
    shutil.rmtree(archive.results)
    assert missing(runs, archive) == []
    make([runs], archive, *data, train_all=nothing)
    assert archive.everything().keys() == {run.name for run in runs}


def test_a_sweep_that_was_killed_goes_on_from_its_checkpoints(archive, data, tmp_path):
    runs = family()
    whole = Archive(tmp_path / "whole", tmp_path / "whole-work")
    make([runs], whole, *data)

    def killed(trainers):
        for trainer in trainers:
            while trainer.learner.iteration < 3:
                small.burst(trainer)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make([runs], archive, *data, train_all=killed)
    assert archive.files(runs[0]).last.is_file()
    assert archive.everything() == {}
    begun: list[int] = []

    def train_all(trainers):
        begun.extend(trainer.learner.iteration for trainer in trainers)
        train_together(trainers)

    # other intervals than it was begun with do not matter
    again = family(validate_every=1)
    assert make([again], archive, *data, train_all=train_all) == []
    assert begun == [2, 0]
    for run in runs:
        assert results(run, archive) == results(run, whole)


def test_weights_that_are_gone_are_made_again_and_not_taken_half_made(archive, data):
    plain, act = family()
    make([[plain]], archive, *data)
    shutil.rmtree(archive.work)
    assert missing([plain], archive) == []
    assert missing([act], archive) == [plain, act]

    def killed(trainers):
        for trainer in trainers:
            small.burst(trainer)
            small.burst(trainer)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make([[act]], archive, *data, train_all=killed)
    assert archive.files(plain).last.is_file()
    assert archive.weights(plain) is None
    assert missing([act], archive) == [plain, act]


def test_those_of_one_kind_are_trained_by_the_same_kernels(archive, data):
    """As they are on a GPU."""
    joined = []

    def train(trainers):
        sweep._join(trainers)
        joined.append([trainer.learner.ensemble is not None for trainer in trainers])
        train_together(trainers)

    runs = [*family(0), *family(1), Run(small.config("plain", seed=2, iterations=4, batch=8))]
    assert make([runs], archive, *data, train_all=train) == []
    assert joined == [[True, True, False], [True, True]]
    assert all(archive.record(run) is not None for run in runs)


def test_one_that_fails_while_joined_is_not_finished_when_the_others_are(archive, data):
    def train(trainers):
        sweep._join(trainers)
        for trainer in trainers:
            if trainer.files.folder.name == bad[0].name:
                trainer.learner.model.stem.weight.data.fill_(math.nan)
        train_together(trainers)

    good, bad = family(0), family(1)
    problems = make([[*bad, *good]], archive, *data, train_all=train)
    assert f"{bad[0].name}: loss is nan at iteration 1" in problems[0]
    assert problems[1:] == [f"{bad[1].name}: has nothing to start or learn from"]
    assert {path.name for path in archive.results.iterdir()} == {run.name for run in good}


def test_what_was_trained_is_let_go_before_the_next_begins(archive, data):
    before: list[weakref.ref[Learner]] = []

    def train(trainers):
        assert all(learner() is None for learner in before)
        sweep._join(trainers)
        before.extend(weakref.ref(trainer.learner) for trainer in trainers)
        train_together(trainers)

    assert make([[*family(0), *family(1)]], archive, *data, train_all=train) == []
    assert len(before) == 4


@pytest.mark.parametrize("together", [1, 4])
def test_a_run_that_fails_is_reported_and_does_not_stop_the_others(archive, data, together):
    good, bad = family(0), family(1, lr=1e30)
    problems = make([[*bad, *good]], archive, *data, together=together)
    assert len(problems) == 2
    assert "resnet14-plain-seed1: loss is nan" in problems[0]
    assert problems[1] == "resnet14-act-tau0.05-seed1: has nothing to start or learn from"
    assert archive.everything().keys() == {run.name for run in good}


def test_a_run_that_cannot_start_is_reported_and_does_not_stop_the_others(archive, data):
    good, bad = family(0)[0], family(1)[0]
    archive.files(bad).folder.mkdir(parents=True)
    archive.files(bad).last.write_bytes(b"not a checkpoint")
    (problem,) = make([[bad, good]], archive, *data)
    assert problem.startswith(f"{bad.name}: ")
    assert archive.everything().keys() == {good.name}


def test_a_result_of_another_configuration_is_refused_in_one_line(archive, data):
    run = family()[0]
    make([[run]], archive, *data)
    other = Run(replace(run.config, lr=0.2))
    assert other.name == run.name
    with pytest.raises(ValueError, match=r"run.json: expected lr to be 0.2, got 0.1; move the folder away"):
        archive.record(other)
    assert archive.record(Run(replace(run.config, validate_every=1, precision="bf16"))) is not None


def test_a_damaged_result_is_named(archive):
    run = family()[0]
    (archive.results / run.name).mkdir(parents=True)
    (archive.results / run.name / "run.json").write_text("{")
    with pytest.raises(ValueError, match=r"seed0.run.json: expected JSON, got"):
        archive.record(run)


def important(run):
    values = {k: v for k, v in run.config.to_dict().items() if k not in _UNIMPORTANT}
    return repr(values), tuple(other.name for other in run.needs)


@pytest.mark.parametrize("scale", SCALES.values(), ids=list(SCALES))
def test_runs_of_one_name_are_the_same_and_the_same_runs_have_one_name(scale):
    runs = [run for e in EXPERIMENTS.values() for run in e.runs(scale, [0, 1, 2])]
    runs = with_needed(runs) + runs
    names: dict[str, object] = {}
    contents: dict[object, str] = {}
    for run in runs:
        assert names.setdefault(run.name, important(run)) == important(run)
        assert contents.setdefault(important(run), run.name) == run.name


def test_of_a_run_in_two_figures_the_one_with_more_validations_is_made():
    scale = SCALES["fast"]
    runs = [run for name in ("fig5", "fig3") for run in EXPERIMENTS[name].runs(scale, [0])]
    (chosen,) = (run for run in with_needed(runs) if run.name == "resnet32-relaxed-tau0.01-seed0")
    assert chosen.config.validate_every == 2000
