import json
import subprocess
import sys

import pytest
import torch

import torchpact as tp
from torchpact import cli
from torchpact_recipes import newton
from torchpact_recipes.commands import demo
from torchpact_recipes.data import load_sample
from torchpact_recipes.training.checkpoint import load_model


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["torchpact", *arguments])
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    return exit_.value.code or 0


def test_newtons_iteration_learns_the_exact_answer(monkeypatch, capsys):
    assert run(monkeypatch, "demo", "--newton", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["agreement"] > 0.97
    objective = result["objective"]
    assert objective["map"] <= objective["thresholded"] < objective["map"] + 0.02
    assert objective["thresholded"] < 0.75 * objective["fixed"]


def test_newtons_iteration_prints_tables_for_people(monkeypatch, capsys):
    assert run(monkeypatch, "demo", "--newton", "--iterations", "3") == 0
    shown = capsys.readouterr().out
    assert "exact MAP" in shown
    assert "of the inputs" in shown


def test_exact_map_solution_of_the_demo_is_the_best_of_all_fixed_choices():
    torch.manual_seed(0)
    result = newton.compare(newton.make_block(), count=200)
    for x, z in zip(result.log_x[:20], result.map_steps[:20], strict=True):
        u, guess, prices = x.exp().item(), 1.0, []
        for turn in range(1, newton.MAX_STEPS + 1):
            guess = (guess + u / guess) / 2
            error = torch.tensor(guess / u**0.5).log()
            prices.append(torch.log1p((error / 0.01) ** 2).item() + newton.TAU * turn)
        assert prices[z - 1] == pytest.approx(min(prices), abs=1e-3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["demo", "--tau", "-1"], "expected tau in [0, inf), got -1.0"),
        (["demo", "--newton", "--tau", "-1"], "expected tau in [0, inf), got -1.0"),
        (["zoo", "show", "vgg"], "expected a network of the zoo, got 'vgg' (torchpact zoo lists them)\n"),
        (["demo", "--newton", "-o", "out"], "expected --output without --newton only"),
        (["demo", "-o", __file__], "expected a folder for the results, got a file"),
        (
            ["zoo", "add", "nowhere", "--name", "a", "--data", "sample"],
            "nowhere: expected the folder of a run",
        ),
        (["demo", "--iterations", "0"], "expected iterations to be an integer of at least 1, got 0"),
        (["demo", "--seed", "-3"], "expected seed to be an integer of at least 0, got -3"),
        (
            ["demo", "--seed", "9" * 23],
            "expected seed to be an integer of at most 9223372036854775807, got 999",
        ),
        (["demo", "--tau", "cheap"], "--tau"),
        (["demo", "--speed", "9"], "--speed"),
        (["dance"], "dance"),
    ],
)
def test_a_mistake_is_told_in_one_line(monkeypatch, capsys, arguments, message):
    assert run(monkeypatch, *arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("torchpact: ")
    assert captured.err.count("\n") == 1
    assert message in captured.err


def test_no_arguments_show_the_help(monkeypatch, capsys):
    assert run(monkeypatch) == 0
    assert "demo" in capsys.readouterr().out


def test_every_command_has_help_with_an_example(monkeypatch, capsys):
    for command in ("demo", "report", "zoo"):
        assert run(monkeypatch, command, "--help") == 0
        assert f"Example: torchpact {command}" in capsys.readouterr().out


def test_zoo_lists_names_accuracies_and_cards(monkeypatch, capsys):
    assert run(monkeypatch, "zoo") == 0
    assert "resnet32-tau0.01" in capsys.readouterr().out
    assert run(monkeypatch, "zoo", "--json") == 0
    listed = {entry["name"]: entry for entry in json.loads(capsys.readouterr().out)}
    assert listed["resnet32-plain"]["results"]["plain"]["images"] == 10_000
    assert run(monkeypatch, "zoo", "show", "resnet32-plain") == 0
    accuracy = listed["resnet32-plain"]["results"]["plain"]["accuracy"]
    assert f"| plain | {accuracy:.2%} |" in capsys.readouterr().out


def test_zoo_add_hands_on_what_the_card_should_say(monkeypatch, capsys):
    def refuse(*arguments, note):
        raise ValueError(f"{arguments[1]}: {note}")

    monkeypatch.setattr("torchpact_recipes.commands.zoo.add_entry", refuse)
    add = ("zoo", "add", "runs/a", "--name", "a", "--data", "sample", "--note", "Continued once.")
    assert run(monkeypatch, *add) == 2
    assert capsys.readouterr().err == "torchpact: a: Continued once.\n"


def test_a_name_of_the_zoo_can_stand_for_a_checkpoint(monkeypatch, capsys, tmp_path):
    name = "resnet32-tau0.01"
    assert run(monkeypatch, "maps", "--model", name, "--count", "1", "-o", str(tmp_path), "--json") == 0
    assert json.loads(capsys.readouterr().out)["networks"][0]["title"] == "PSACT, τ = 0.01"


def test_demo_leaves_runs_maps_and_a_report(monkeypatch, capsys, tmp_path):
    def few(split):
        """All test images would take most of the time."""
        return load_sample(split).random(200, seed=0)

    monkeypatch.setattr(demo, "load_sample", few)
    arguments = ("demo", "--iterations", "2", "-o", str(tmp_path), "--json")
    assert run(monkeypatch, *arguments) == 0
    printed = capsys.readouterr()
    begins = "resnet32-plain of the zoo becomes adaptive: 2 iterations on 200 bundled images, then 200 others"
    assert printed.err.startswith(begins)
    assert printed.err.splitlines()[0].endswith(f"What it makes goes to {tmp_path}.")
    assert printed.err.count("becomes adaptive") == 1
    found = json.loads(printed.out)
    assert set(found["results"]) == {"plain", "relaxed", "discrete", "thresholded"}
    assert found["results"]["plain"]["accuracy"] > 0.85
    assert 0 < found["times"]["plain"] < found["seconds"]
    assert (tmp_path / "report.html").stat().st_size > 100_000
    assert (tmp_path / "maps.png").exists()
    trained, _ = load_model(tmp_path / "adaptive" / "last.safetensors")
    assert trained.config.adaptive
    again = tmp_path / "again.html"
    assert run(monkeypatch, "report", str(tmp_path / "adaptive"), "--no-timing", "-o", str(again)) == 0
    assert again.exists()
    for name in ("plain", "adaptive"):
        add = ("zoo", "add", str(tmp_path / name), "--name", "a", "--into", str(tmp_path), "--data", "sample")
        assert run(monkeypatch, *add) == 2
        assert "got one that torchpact train did not make\n" in capsys.readouterr().err


def test_module_runs_as_a_program():
    done = subprocess.run(
        [sys.executable, "-m", "torchpact", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith(f"torchpact {tp.__version__}, torch ")
