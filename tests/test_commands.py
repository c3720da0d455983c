"""The commands that train and evaluate, on the bundled sample."""

import json
import re

import pytest

from torchpact.models import ResNetConfig
from torchpact_recipes.commands import common
from torchpact_recipes.data import Images, load_sample
from torchpact_recipes.training import TrainConfig, preset


@pytest.fixture(autouse=True)
def _few_to_test_on(monkeypatch):
    """All test images of the sample would take most of the time."""

    def load(split, device="cpu"):
        data = load_sample(split, device)
        return Images(data.images[:50], data.labels[:50]) if split == "test" else data

    monkeypatch.setattr(common, "load_sample", load)


IMAGES = ("train", "images")
SMALL = (
    "--network",
    2,
    "--preset",
    "smoke",
    "--iterations",
    2,
    "--batch",
    8,
    "--images",
    16,
    "--data",
    "sample",
)


def test_train_warm_start_and_evaluate_work_together(run, tmp_path):
    code, _, _ = run(*IMAGES, tmp_path / "plain", "--method", "plain", *SMALL)
    assert code == 0
    start = tmp_path / "plain" / "last.safetensors"
    code, out, _ = run(*IMAGES, tmp_path / "psact", *SMALL, "--warm-start", start, "--group", 4, "--json")
    assert code == 0
    trained = json.loads(out)[str(tmp_path / "psact")]
    assert set(trained) == {"relaxed", "discrete", "thresholded"}
    code, out, _ = run(
        "evaluate",
        tmp_path / "psact" / "last.safetensors",
        "--data",
        "sample",
        "--mode",
        "thresholded",
        "--json",
    )
    assert code == 0
    assert json.loads(out)["thresholded"] == trained["thresholded"]
    # it can learn from the network it starts from, or from another
    for number, options in enumerate((("--distill", 0.5), ("--teacher", "resnet32-plain"))):
        folder = tmp_path / f"taught{number}"
        assert run(*IMAGES, folder, *SMALL, "--warm-start", start, *options)[0] == 0
        record = json.loads((folder / "run.json").read_text())
        assert record["config"]["distill"] == (0.5, 0.9)[number]
        assert ("plain/last.safetensors", "resnet32-plain")[number] in record["teacher"]
    # a folder is as good as its last checkpoint; one that has none is told
    folder = run("evaluate", tmp_path / "psact", "--data", "sample", "--mode", "thresholded", "--json")
    assert folder[:2] == (0, out)
    code, _, error = run("evaluate", tmp_path, "--data", "sample")
    assert code == 2
    assert "expected a checkpoint, or config.json and model.safetensors; got a folder without any" in error


def test_several_taus_and_seeds_make_a_sweep(run, tmp_path):
    sweep = ("--tau", 0.1, "--tau", 0.2, "--seed", 0, "--seed", 5)
    code, out, _ = run(*IMAGES, tmp_path, "--method", "act", *SMALL, *sweep)
    assert code == 0
    names = {f"act-tau{tau}-seed{seed}" for tau in (0.1, 0.2) for seed in (0, 5)}
    assert {folder.name for folder in tmp_path.iterdir()} == names
    assert all(name in out for name in names)
    assert all(
        json.loads((tmp_path / name / "run.json").read_text())["status"] == "finished" for name in names
    )


@pytest.mark.parametrize(
    "twice", [("--tau", 0.01, "--tau", 0.0100000001), ("--seed", 3, "--seed", 0, "--seed", 3)]
)
def test_a_run_that_is_asked_for_twice_is_refused_before_any_begins(run, tmp_path, twice):
    code, _, error = run(*IMAGES, tmp_path / "sweep", *SMALL, *twice, "--resume")
    assert code == 2
    assert re.fullmatch(r"torchpact: expected every price and seed once, got relaxed-tau.* 2 times\n", error)
    assert not (tmp_path / "sweep").exists()


def test_a_damaged_checkpoint_is_told_in_one_line(run, tmp_path):
    folder = tmp_path / "a folder with [bold]quite[/bold] a long name, and then some more of it"
    arguments = (*IMAGES, folder, "--method", "plain", *SMALL, "--json")
    assert run(*arguments)[0] == 0
    last = folder / "last.safetensors"
    last.write_bytes(last.read_bytes()[:-1])
    (folder / "previous.safetensors").write_bytes(last.read_bytes())
    code, _, error = run(*arguments, "--resume")
    assert code == 2  # neither can be used
    assert error.count("\n") == 1
    assert str(last) in error


def test_evaluate_prints_a_table_for_people(run, tmp_path):
    run(*IMAGES, tmp_path / "plain", "--method", "plain", *SMALL)
    code, out, _ = run("evaluate", tmp_path / "plain" / "last.safetensors", "--data", "sample")
    assert code == 0
    assert "accuracy" in out
    assert "52.8 ± 0.0" in out
    assert "16.5 ± 0.0" in out  # a block of it
    assert max(map(len, out.splitlines())) <= 80


def test_square_brackets_of_a_name_are_shown(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run(*IMAGES, "run[a]", "--method", "plain", *SMALL)
    code, out, _ = run("evaluate", "run[a]/last.safetensors", "--data", "sample")
    assert code == 0
    assert "run[a]/last.safetensors, 50 test images" in " ".join(out.split())


def test_a_warm_start_of_another_depth_is_told_by_its_name_and_leaves_nothing(run, tmp_path):
    folder = tmp_path / "runs" / "z"
    code, _, err = run(*IMAGES, folder, "--warm-start", "resnet110-plain", "--data", "sample")
    assert code == 2
    said = "expected networks of equal depth, got a ResNet-32 and a ResNet-110 to start from"
    assert err == f"torchpact: resnet110-plain: {said}\n"
    assert not folder.parent.exists()


def test_who_resumes_without_the_options_is_told_where_they_are(run, tmp_path):
    run(*IMAGES, tmp_path / "a", *SMALL)
    code, _, err = run(*IMAGES, tmp_path / "a", "--data", "sample", "--resume")
    assert code == 2
    assert err.endswith("; repeat the options that it was begun with, which are in its run.json\n")


def test_a_warm_start_can_be_one_for_each_seed(run, tmp_path):
    run(*IMAGES, tmp_path / "plain-seed3", "--method", "plain", *SMALL)
    start = tmp_path / "plain-seed{seed}"
    assert run(*IMAGES, tmp_path / "warm", *SMALL, "--seed", 3, "--warm-start", start)[0] == 0
    record = json.loads((tmp_path / "warm" / "run.json").read_text())
    assert record["warm_start"] == "plain-seed3/last.safetensors"


def test_the_modes_to_validate_in_can_be_chosen(run, tmp_path):
    modes = ("--validate-mode", "thresholded", "--validate-mode", "act")
    code, out, _ = run(*IMAGES, tmp_path / "a", *SMALL, *modes, "--json")
    assert code == 0
    assert list(json.loads(out)[str(tmp_path / "a")]) == ["thresholded", "act"]


def test_a_run_on_some_images_does_not_go_on_with_others(run, tmp_path):
    arguments = (*IMAGES, tmp_path / "a", "--method", "plain", *SMALL)
    assert run(*arguments)[0] == 0
    code, _, err = run(*arguments, "--images", 24, "--resume")
    assert code == 2
    assert re.search(r"data set that it began with, 16 images \(\w+\); got 24 images", err)
    assert err.count("\n") == 1


def test_resume_of_a_finished_run_shows_its_results(run, tmp_path):
    first = run(*IMAGES, tmp_path / "a", "--method", "plain", *SMALL)
    again = run(*IMAGES, tmp_path / "a", "--method", "plain", *SMALL, "--resume")
    assert again[:2] == first[:2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            (*IMAGES, "{}", "--network", "vgg", "--data", "sample"),
            "expected a network among resnet32, resnet110",
        ),
        (
            (*IMAGES, "{}", "--method", "sarsa", "--data", "sample"),
            "expected method to be one of plain",
        ),
        (
            (*IMAGES, "{}", "--preset", "quick", "--data", "sample"),
            "expected a preset among paper, fast, strong, smoke",
        ),
        ((*IMAGES, "{}", "--tau", "-1", "--data", "sample"), "expected tau in [0, inf), got -1.0"),
        (
            (*IMAGES, "{}", "--method", "plain", "--tau", "1"),
            "expected --tau where a network decides",
        ),
        (
            (*IMAGES, "{}", "--method", "plain", "--group", "2"),
            "expected --group where a network decides",
        ),
        (
            (*IMAGES, "{}", "--batch", "0", "--data", "sample"),
            "expected batch to be an integer of at least 1",
        ),
        (
            (*IMAGES, "{}", "--batch", "2001", "--data", "sample"),
            "expected a batch of at most 2000 examples",
        ),
        (
            (*IMAGES, "{}", "--group", "3", "--data", "sample"),
            "expected a group that divides the maps",
        ),
        ((*IMAGES, "{}", "--images", "0", "--data", "sample"), "expected 1 to 2000 images, got 0"),
        *(
            (
                (*arguments, "--data", "nowhere"),
                "to fetch CIFAR-10: torchpact data cifar10 --root nowhere; "
                "or take the bundled sample: --data sample\n",
            )
            for arguments in ((*IMAGES, "{}"), ("evaluate", "resnet32-plain"))
        ),
        (
            (*IMAGES, "{}", "--device", "tpu", "--data", "sample"),
            "expected a device of auto, cpu or cuda",
        ),
        ((*IMAGES, "{}", "--device", "cpu:x", "--data", "sample"), "or one as cuda:0; got 'cpu:x'"),
        ((*IMAGES, "{}", "--warm-start", "none", "--data", "sample"), "none: no such checkpoint"),
        (
            (*IMAGES, "{}", "--warm-start", "{{tau}}", "--data", "sample"),
            "{tau}: no such checkpoint",
        ),
        ((*IMAGES, "{}", "--teacher", "{{0}}", "--data", "sample"), "{0}: no such checkpoint"),
        (
            (*IMAGES, "{}", "--validate-mode", "eager", "--data", "sample"),
            "expected modes among relaxed, discrete, thresholded, act; got 'eager'",
        ),
        (
            (*IMAGES, "{}", "--method", "plain", "--validate-mode", "act"),
            "expected --validate-mode where a network decides",
        ),
        (
            ("evaluate", "resnet32-plain", "--batch", "-5", "--data", "sample"),
            "expected batch to be an integer of at least 1, got -5",
        ),
        (
            ("evaluate", "resnet32-plain", "--batch", "0", "--data", "sample"),
            "expected batch to be an integer of at least 1, got 0",
        ),
        (
            ("evaluate", "resnet32-plain", "--precision", "fp8", "--data", "sample"),
            "expected precision to be one of fp32, bf16; got 'fp8'",
        ),
        (
            ("evaluate", "resnet32-plain", "--examples", "5", "--data", "sample"),
            "expected --examples for a network for sequences only",
        ),
        (
            ("evaluate", "{}/missing.safetensors", "--data", "sample"),
            "no such checkpoint or folder, nor network of the zoo (torchpact zoo lists them)\n",
        ),
        (("evaluate", "resnet32-tau7"), "nor network of the zoo (did you mean resnet32-tau0.05?)"),
        (
            ("evaluate", "resnet32-plain", "--mode", "act", "--data", "sample"),
            "resnet32-plain: expected no mode for a plain network, got act",
        ),
        (("data", "cifar10", "--from", "{}/nothing", "--root", "{}/root"), "nothing"),
    ],
)
def test_mistakes_are_told_in_one_line(run, tmp_path, arguments, message):
    code, out, err = run(*(part.format(tmp_path) for part in arguments))
    assert code == 2
    assert out == ""
    assert message in err
    assert err.startswith("torchpact: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize("seed", [-1, 10**23])
def test_a_seed_that_no_generator_takes_is_told(run, tmp_path, seed):
    run(*IMAGES, tmp_path / "plain", "--method", "plain", *SMALL)
    code, _, error = run("evaluate", tmp_path / "plain", "--data", "sample", "--seed", seed)
    assert code == 2
    assert re.fullmatch(rf"torchpact: expected seed to be an integer of at .*, got {seed}\n", error)


def test_a_checkpoint_evaluated_in_an_unknown_mode_is_told(run, tmp_path):
    run(*IMAGES, tmp_path / "a", *SMALL)
    code, _, err = run("evaluate", tmp_path / "a" / "last.safetensors", "--data", "sample", "--mode", "eager")
    assert code == 2
    assert "got 'eager'" in err


@pytest.mark.parametrize(
    "command",
    [
        ("demo",),
        ("train",),
        IMAGES,
        ("train", "text"),
        ("train", "sequence"),
        ("evaluate",),
        ("data",),
        ("data", "cifar10"),
    ],
)
def test_every_command_has_help_with_an_example(run, command):
    code, out, _ = run(*command, "--help")
    assert code == 0
    assert f"Example: torchpact {' '.join(command)}" in out


def test_data_without_a_data_set_is_help_and_no_mistake(run):
    code, out, err = run("data")
    assert (code, err) == (0, "")
    assert "cifar10" in out


TINY = ("--iterations", 2, "--batch", 4, "--hidden", 4, "--max-steps", 2)


@pytest.mark.parametrize("task", ["parity", "logic", "addition", "sort", "enwik8"])
def test_sequences_are_trained_evaluated_and_resumed(run, tmp_path, task):
    kind = ("text",) if task == "enwik8" else ("sequence", "--task", task)
    arguments = ("train", *kind, tmp_path / "a", "--data", "sample", *TINY)
    code, out, _ = run(*arguments, "--json")
    assert code == 0
    trained = json.loads(out)[str(tmp_path / "a")]
    assert set(trained) == {"relaxed", "discrete", "thresholded"}
    code, out, _ = run(*arguments, "--json", "--resume")
    assert code == 0
    assert json.loads(out)[str(tmp_path / "a")] == trained
    last = tmp_path / "a" / "last.safetensors"
    evaluation = ("evaluate", last, "--data", "sample", "--mode", "thresholded", "--examples", 300)
    code, out, _ = run(*evaluation, "--json")
    assert code == 0
    found = json.loads(out)
    assert list(found) == ["thresholded"]
    measure = "bits_per_character" if task == "enwik8" else "steps_by_difficulty"
    assert found["thresholded"][measure]
    code, out, _ = run(*evaluation)
    assert code == 0
    assert "steps" in out


def test_a_sweep_of_sequences_gets_a_folder_for_each(run, tmp_path):
    sweep = ("--tau", 0.1, "--tau", 0.2, "--seed", 0, "--seed", 5, "--size", "size=3", "--tensorboard")
    code, out, _ = run("train", "sequence", tmp_path, "--task", "parity", "--method", "act", *TINY, *sweep)
    assert code == 0
    names = {f"act-tau{tau}-seed{seed}" for tau in (0.1, 0.2) for seed in (0, 5)}
    assert {folder.name for folder in tmp_path.iterdir()} == names
    assert all(name in out for name in names)
    record = json.loads((tmp_path / "act-tau0.2-seed5" / "run.json").read_text())
    assert record["config"]["sizes"] == {"size": 3}
    assert any((tmp_path / "act-tau0.2-seed5" / "tensorboard").iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("sequence", "--task", "chess"),
            "expected a task among parity, logic, addition, sort, enwik8; got 'chess'",
        ),
        (
            ("sequence", "--preset", "fast"),
            "expected a preset among tiny, small, paper; got 'fast'",
        ),
        (("sequence", "--group", "2"), "No such option: --group"),
        (("images", "--hidden", "8", "--data", "sample"), "No such option: --hidden"),
        (("sequence", "--size", "8"), "expected a size as name=number, got '8'"),
        (
            ("sequence", "--size", "size=²"),
            "expected a size as name=number, got 'size=²'",
        ),
        *(
            (("sequence", "--size", f"{name}=3"), f"among size, low, high; got {name}")
            for name in ("seed", "tau", "features", "classes", "hidden", "lr")
        ),
        (
            ("sequence", "--task", "addition", "--size", "max_numbers=1"),
            "max_numbers to be an integer of at least 2",
        ),
        (
            ("sequence", "--method", "plain", "--max-steps", 5),
            "expected --max-steps where a cell",
        ),
        (
            ("sequence", "--size", "width=8"),
            "expected sizes of parity among size, low, high",
        ),
        (("sequence", "--task", "sort", "--method", "ponder"), "expected a task of one time step"),
        (
            ("sequence", "--cell", "lstn"),
            "expected cell to be one of rnn, gru, lstm; got 'lstn'",
        ),
        (("text", "--data", "nowhere"), "torchpact data enwik8 --root nowhere"),
    ],
)
def test_mistakes_about_sequences_are_told_in_one_line(run, tmp_path, arguments, message):
    code, out, err = run("train", *arguments, tmp_path / "a")
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (("--method", "plain", *SMALL), ("images", "--method", "plain", *SMALL)),
        (
            ("--task", "parity", "--method", "act", *TINY),
            ("sequence", "--method", "act", *TINY),
        ),
        (("--task=sort", *TINY), ("sequence", "--task", "sort", *TINY)),
        (("--task", "enwik8", "--data", "sample", *TINY), ("text", "--data", "sample", *TINY)),
    ],
)
def test_the_old_spelling_of_train_serves_and_says_the_new_one(run, tmp_path, old, new):
    code, _, err = run("train", tmp_path / "old", *old)
    assert code == 0
    said = (
        f"`torchpact train OUT` is now `torchpact train {new[0]} OUT`; the old spelling works until the next"
    )
    assert err.startswith(said)
    assert run("train", *new, tmp_path / "new")[0] == 0
    one, two = (json.loads((tmp_path / name / "run.json").read_text()) for name in ("old", "new"))
    assert (one["config"], one["results"]) == (two["config"], two["results"])


def test_options_are_the_fields_of_the_configuration(run, tmp_path):
    """Those of a preset unless given; a tuple is an option that is repeated."""
    options = (
        "--milestone",
        0.5,
        "--milestone",
        0.75,
        "--no-nesterov",
        "--weight-decay",
        0.001,
        "--halting-bias",
        -1,
    )
    code, _, err = run(*IMAGES, tmp_path / "a", *SMALL, "--preset", "strong", *options)
    assert (code, "Error" in err) == (0, False)
    record = json.loads((tmp_path / "a" / "run.json").read_text())
    expected = preset(
        "strong", iterations=2, batch=8, milestones=(0.5, 0.75), nesterov=False, weight_decay=0.001,
        network=ResNetConfig(units=2, halting_bias=-1.0),
    )  # fmt: skip
    assert TrainConfig.from_dict(record["config"]) == expected
