"""What a person sees while networks are trained."""

import io
import re
import signal

import pytest
from rich.console import Console

from tests.training.small import burst, config, images
from torchpact_recipes.commands import progress
from torchpact_recipes.commands.common import Interrupted
from torchpact_recipes.commands.progress import TrainingProgress
from torchpact_recipes.training import Trainer
from torchpact_recipes.training.stopping import Stopped

NAME = "relaxed-tau0.01-seed0"


def screen(width):
    return Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)


def lines(console):
    console.file.seek(0)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "\n", console.file.read()).replace("\r", "\n")
    return [line.rstrip() for line in text.split("\n") if line.strip()]


def watched(console, trainers, total=None):
    """Train, and draw the bars after every iteration of the first."""
    with TrainingProgress(total, console) as progress:
        learner, advance = trainers[0].learner, trainers[0].learner.advance

        def advance_and_draw():
            advance()
            progress.bar.refresh()

        learner.advance = advance_and_draw
        progress.train(trainers)
    return lines(console)


def test_bars_follow_iterations_between_the_events(tmp_path):
    run = Trainer(config(log_every=12, validate_every=12), tmp_path / "a", images(), images("test", 8))
    found = {int(n) for n in re.findall(r"a +(\d+)/12", "\n".join(watched(screen(80), [run])))}
    assert found >= set(range(1, 13))


def test_all_runs_count_what_each_has_done(tmp_path):
    console = screen(80)
    runs = [
        Trainer(config(seed=seed, iterations=4), tmp_path / str(seed), images(), images("test", 8))
        for seed in range(2)
    ]
    burst(runs[0])  # the first is three iterations ahead
    text = "\n".join(watched(console, runs, total=20))
    found = [int(n) for n in re.findall(r"all iterations +(\d+)/20", text)]
    assert found[-1] == 8
    assert found == sorted(found)


@pytest.mark.parametrize("width", [80, 120])
def test_speed_time_accuracy_and_flops_have_room(tmp_path, width):
    run = Trainer(config(log_every=4, validate_every=4), tmp_path / NAME, images(), images("test", 8))
    text = watched(screen(width), [run])[-1]
    pattern = r"12/12 +[\d,]+ img/s +0:00:0\d +test \d+\.\d% \d+ MFLOPs  loss"
    assert re.search(pattern, text), text
    assert len(text) <= width
    assert (width == 120) == ("steps" in text)


def test_square_brackets_of_a_folder_are_shown(tmp_path):
    run = Trainer(config(iterations=2), tmp_path / "run[a]", images(), images("test", 8))
    assert watched(screen(80), [run])[-1].startswith("run[a] ")


@pytest.mark.parametrize(("done", "said"), [(False, "stopped; resume it"), (True, "stopped")])
def test_who_stops_it_is_told_how_the_rest_is_trained(tmp_path, monkeypatch, done, said):
    def stop(trainers):
        raise Stopped("stopped", signal.SIGINT)

    run = Trainer(config(), tmp_path / "a", images(), images("test", 8))
    monkeypatch.setattr(progress, "train_together", stop)
    monkeypatch.setattr(Trainer, "done", done)
    with pytest.raises(Interrupted, match=f"^{said}$"), TrainingProgress(goes_on="resume it") as bars:
        bars.train([run])
