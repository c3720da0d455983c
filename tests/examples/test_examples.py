"""Every example runs, offline and in seconds, and is short enough to be copied."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import torchpact as tp

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
# those of other packages
pytestmark = [pytest.mark.filterwarnings("ignore")]


def example(name, *packages):
    for package in packages:
        pytest.importorskip(package, reason=f"the example {name} shows how to train with it")
    return importlib.import_module(f"examples.{name}")


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_has_at_most_40_lines(path):
    assert sum(bool(line.strip()) for line in path.read_text().splitlines()) <= 40


def test_the_plain_loop_learns_the_task_and_halts_early():
    accuracy, steps = example("plain_loop", "transformers").main(steps=40)
    assert accuracy > 0.9
    assert steps < 3


def test_a_network_is_trained_calibrated_and_deployed_to_budgets():
    torch.manual_seed(0)
    table = example("budget").main(steps=10)
    assert all(row.cost <= row.budget for row in table.rows)


def test_a_looped_network_is_trained_calibrated_and_streamed():
    torch.manual_seed(0)
    solved, steps = example("looped").main(steps=40, batch=16)
    # of 12; within the budget on other strings. Guesses alone would solve 1 of 65,536
    assert steps < 9
    assert solved > 0.1


def test_the_trainer_of_transformers_trains_saves_and_evaluates(tmp_path):
    torch.manual_seed(0)
    metrics = example("hf_trainer", "transformers", "accelerate").main(steps=12, folder=str(tmp_path))
    assert 1 <= metrics["eval_ponder/steps"] < 3  # of 4: heads learn in a dozen updates


def test_a_loop_with_accelerate_trains_and_saves(tmp_path):
    example("accelerate_loop", "transformers", "accelerate").main(steps=2, folder=str(tmp_path))
    assert "4 × BertLayer" in str(tp.summary(tp.from_pretrained(tmp_path)))


def test_a_lightning_module_trains_relaxed_and_validates_thresholded():
    metrics = example("lightning_module", "lightning", "transformers").main(steps=8)
    assert metrics["valid/steps"] == 4  # heads hardly moved
    assert {"train/loss", "train/steps", "valid/loss"} <= metrics.keys()


def test_lora_is_merged_and_saved_with_its_heads(tmp_path):
    assert example("lora", "peft", "transformers").main(steps=2, folder=str(tmp_path))


@pytest.mark.parametrize(
    "options",
    [
        {"checkpoint": True},
        {"autocast": True},
        # the page about training compiles, too
        pytest.param({"checkpoint": True, "autocast": True, "backend": "aot_eager"}, marks=pytest.mark.slow),
    ],
    ids=lambda options: " ".join(options),
)
def test_checkpointing_autocast_and_compile_go_together(options):
    torch.compiler.reset()
    loss = example("checkpoint_autocast_compile", "transformers").main(steps=2, **options)
    assert 0 < loss < 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_an_example_of_several_processes_runs(name):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launcher, f"examples/{name}.py", "--steps", "2"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert {"ddp": "the same weights: True", "fsdp2": "All keys matched"}[name] in done.stdout
    assert "layers" in done.stdout
