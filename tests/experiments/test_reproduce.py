"""torchpact reproduce from end to end, on the bundled sample."""

import json
import shutil

import pytest

from torchpact_recipes.commands import reproduce as command

FIGURES = (
    "fig2", "fig3", "fig4", "fig4-variance", "fig5", "fig5-extended", "fig5-resnet110",
    "fig6", "fig6-extended", "vae",
)  # fmt: skip


@pytest.fixture
def run(run, tmp_path):
    def call(*arguments):
        return run("reproduce", *arguments, "--results", tmp_path / "results", "--work", tmp_path / "work")

    return call


@pytest.mark.slow
def test_everything_is_made_from_nothing_and_then_found_again(run, tmp_path, monkeypatch):
    code, out, _ = run("all", "--scale", "smoke")
    assert code == 0
    results = tmp_path / "results" / "smoke"
    made = {path.name for path in (results / "figures").iterdir()}
    assert made >= {f"{name}.{suffix}" for name in FIGURES for suffix in ("png", "pdf", "json")}
    assert made >= {"summary.md", "summary.csv"}
    assert "| resnet14-reinforce-tau0.1-group8 " in out
    fig3 = json.loads((results / "figures" / "fig3.json").read_text())
    assert fig3["modes"]["accuracy"]["discrete"]["iterations"] == [1, 2]
    fig4 = json.loads((results / "figures" / "fig4.json").read_text())
    assert len(fig4["settings"][0]["log10_variance"]["total"]["mean"]) == 2

    # one run is lost with its weights: it alone is made again
    lost = "resnet14-act-tau0.01-seed0"
    for folder in (results, tmp_path / "work" / "smoke"):
        shutil.rmtree(folder / lost)
    code, out, _ = run("all", "--scale", "smoke", "--list")
    assert [line.split()[1] for line in out.splitlines() if line.startswith("missing")] == [lost]
    code, out, err = run("fig5", "--scale", "smoke", "--draw-only")
    assert code == 0
    assert err.splitlines() == [f"fig5: 2 of 3 runs; missing: {lost}", "6 files, from 2 of 3 runs"]
    # tables are made from whatever there is: they have no runs of their own to count
    for name in ("summary", "table"):
        code, _, err = run(name, "--scale", "smoke", "--draw-only")
        assert (code, err) == (0, "2 files\n")
    weights = tmp_path / "work" / "smoke" / "resnet14-plain-seed0" / "last.safetensors"
    weights.rename(tmp_path / "kept")
    code, out, _ = run("fig5", "--scale", "smoke", "--list")
    assert "no weights  resnet14-plain-seed0" in out.splitlines()
    (tmp_path / "kept").rename(weights)
    before = {path: path.stat().st_mtime_ns for path in results.glob("resnet*/*")}
    assert run("fig5", "--scale", "smoke")[0] == 0
    assert (results / lost / "run.json").is_file()
    assert {path: path.stat().st_mtime_ns for path in before} == before

    def nothing(*arguments):
        raise AssertionError("trained again")

    monkeypatch.setattr(command, "_train", nothing)
    code, out, _ = run("all", "--scale", "smoke", "--list")
    assert {line.split()[0] for line in out.splitlines()} == {"finished"}
    assert run("fig5", "table", "--scale", "smoke")[0] == 0  # all would draw everything once more


def test_only_runs_of_some_names_and_what_they_start_from_are_made(run, tmp_path):
    code, out, _ = run("fig5", "--scale", "smoke", "--only", "*relaxed*", "--list")
    names = ["resnet14-relaxed-tau0.01-seed0", "resnet14-plain-seed0"]
    assert code == 0
    assert [line.split() for line in out.splitlines()] == [["missing", name] for name in names]
    assert run("fig5", "--scale", "smoke", "--only", "*relaxed*")[0] == 0
    made = {path.parent.name for path in (tmp_path / "results" / "smoke").glob("*/run.json")}
    assert made == set(names)
    code, _, err = run("fig5", "--scale", "smoke", "--only", "*relaxed*", "--only", "tau7")
    assert code == 2
    assert err == "torchpact: expected --only to match a name that --list shows, got 'tau7'\n"


def test_draw_only_trains_nothing_and_goes_on_where_one_has_no_runs(run, tmp_path):
    code, out, err = run("fig5", "fig2", "--scale", "smoke", "--draw-only")
    assert code == 2
    assert "fig2.png" in out
    assert "torchpact: fig5: expected finished runs in" in err
    assert not (tmp_path / "work").exists()


def test_a_run_that_cannot_be_made_is_named_and_the_rest_is_drawn(run, tmp_path):
    broken = tmp_path / "work" / "smoke" / "resnet14-plain-seed0"
    broken.mkdir(parents=True)
    (broken / "last.safetensors").write_bytes(b"not a checkpoint")
    code, out, err = run("fig2", "fig3", "--scale", "smoke")
    assert code == 2
    assert "fig2.png" in out
    assert "resnet14-plain-seed0: " in err
    assert "resnet14-relaxed-tau0.01-seed0: has nothing to start or learn from" in err
    assert "Traceback" not in err


def test_without_cifar10_nobody_is_told_to_take_the_sample_for_it(run, tmp_path):
    code, _, err = run("fig3", "--scale", "fast", "--data", tmp_path)
    assert code == 2
    assert err.endswith(f"to fetch CIFAR-10: torchpact data cifar10 --root {tmp_path}\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("fig9",), "expected experiments among fig2, fig3"),
        (("fig2", "--scale", "huge"), "expected a scale among smoke, fast, paper; got 'huge'"),
    ],
)
def test_a_mistake_ends_in_one_line(run, arguments, message):
    code, _, err = run(*arguments)
    assert code == 2
    assert message in err
    assert err.count("\n") == 1
