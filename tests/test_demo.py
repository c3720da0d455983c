"""What the demo does to a network; tests/test_cli.py runs it as a whole."""

import io

import pytest
import torch
from rich.console import Console
from torch import nn

from tests.training.small import images
from tests.viz.networks import network
from torchpact_recipes import demo
from torchpact_recipes.commands import demo as command
from torchpact_recipes.commands.common import Interrupted


@pytest.fixture(scope="module")
def trained():
    teacher = network(adaptive=False, units=2, image_size=12)
    config = demo.configure(0.1, 5, 0, teacher.config)
    model = demo.make_adaptive(teacher, config)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    events: list[dict[str, object]] = []
    demo.train(model, teacher, images(count=40), config, events.append)
    return teacher, model, before, events


def test_it_starts_from_the_teachers_weights():
    teacher = network(adaptive=False, units=2)
    model = demo.make_adaptive(teacher, demo.configure(0.1, 1, 0, teacher.config))
    own = model.state_dict()
    assert all(torch.equal(own[name], value) for name, value in teacher.state_dict().items())
    assert {name for name in own if name not in teacher.state_dict()} == {n for n in own if ".halting." in n}


def test_only_the_heads_learn_statistics_of_so_few_images(trained):
    _, model, before, _ = trained
    for name, module in model.named_modules():
        if isinstance(module, nn.BatchNorm2d):
            assert module.running_mean is not None
            moved = not torch.equal(module.running_mean, before[f"{name}.running_mean"])
            assert moved == (".halting." in name), name


def test_heads_and_units_learn_and_the_teacher_does_not(trained):
    teacher, model, before, events = trained
    for name, value in model.named_parameters():
        assert not torch.equal(value, before[name]), name
    fresh = network(adaptive=False, units=2, image_size=12)
    assert all(torch.equal(a, b) for a, b in zip(teacher.parameters(), fresh.parameters(), strict=True))
    assert [event["iteration"] for event in events] == [5]
    assert not model.training


def test_heads_stay_as_they_are_once_settled():
    assert demo.learning_rates(demo.SETTLED, 0.1)[0] == 0
    assert demo.learning_rates(1.0, 0.1) == (0, 0)
    assert demo.learning_rates(0.22, 0.1) == (demo.HEAD_RATE, 0.1)


def _run(data=None):
    teacher = network(adaptive=False, units=2, image_size=12)
    config = demo.configure(0.1, 20, 0, teacher.config)
    written = io.StringIO()
    model = demo.make_adaptive(teacher, config)
    command._train(model, teacher, data or images(count=40), config, Console(file=written, width=100))
    return written.getvalue().splitlines()


def test_without_a_terminal_there_are_lines():
    lines = _run()
    assert 1 <= len([line for line in lines if line.startswith("training, iteration ")]) <= 10
    assert any(line.startswith("training, iteration 20 of 20: ") for line in lines)


def test_who_stops_it_is_told_that_nothing_is_kept(monkeypatch):
    def stop(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "train", stop)
    with pytest.raises(
        Interrupted, match=r"^stopped near iteration 0 of 20; a demo keeps nothing before its end$"
    ):
        _run()


@pytest.mark.parametrize(
    ("flops", "said"), [(50e6, "50% fewer FLOPs"), (101e6, "1% more FLOPs"), (100.4e6, "0% fewer FLOPs")]
)
def test_what_it_saves_or_not_is_said_in_words(capsys, flops, said):
    before = {"accuracy": 0.9, "flops": 100e6, "images": 10}
    after = {"thresholded": {"accuracy": 0.89, "flops": flops}}
    times = {"plain": 2e-3, "modes": {"thresholded": 1e-3}, "device": "a device", "batch": 4}
    command._show(before, after, times, 1000)
    shown = " ".join(capsys.readouterr().out.split())
    assert f"Thresholded: {said} for 1.0 points less, 2.00 times" in shown
    assert "-0%" not in shown


def test_an_extra_that_is_missing_is_named_whole(monkeypatch, tmp_path):
    def refuse(*arguments):
        raise ValueError(
            "expected the package matplotlib to be installed (from a clone: "
            'pip install "./src/torchpact_recipes[plot]")'
        )

    monkeypatch.setattr(command, "compare_maps", refuse)
    written = io.StringIO()
    model = network(units=2, image_size=12)
    assert command._maps(tmp_path, model, images(count=8), Console(file=written, width=60)) == []
    said = (
        "no maps: expected the package matplotlib to be installed (from a clone: "
        'pip install "./src/torchpact_recipes[plot]")\n'
    )
    assert written.getvalue() == said
