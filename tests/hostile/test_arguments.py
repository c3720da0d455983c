"""Arguments of a wrong kind: one line that says what was expected and what was given."""

import numpy as np
import pytest
import torch
from torch import nn

import torchpact as tp

WRONG = [None, 3, "x", np.zeros((4, 8), "float32"), [1, 2], {}, object(), ()]


def small():
    steps, heads = [nn.Linear(8, 8) for _ in range(3)], [nn.Linear(8, 1) for _ in range(2)]
    return tp.AdaptiveBlock(steps, heads, mode="thresholded").eval()


def entered(manager):
    with manager:
        pass


@pytest.fixture(scope="module")
def calls():
    """What is called with a value of a wrong kind, by name."""
    block, net = small(), tp.models.psact_resnet32("thresholded").eval()
    rnn = tp.AdaptiveRNN(nn.LSTMCell(4, 5), max_steps=3, mode="thresholded").eval()
    x, images = torch.randn(4, 8), torch.randn(2, 3, 32, 32)
    ponder = block(x)[1]
    deployed = {name: tp.deploy(block, x, engines=[name]) for name in ("dense", "compact")}
    return {
        "block": block,
        "network": net,
        "rnn": rnn,
        **{f"deployed, {name}": fast for name, fast in deployed.items()},
        "deployed network": tp.deploy(net, images, engines=["dense"]),
        "use_mode": lambda value: entered(tp.use_mode(value, "relaxed")),
        "use_thresholds": lambda value: entered(tp.use_thresholds(value, 0.5)),
        "mode": lambda value: block(x, mode="x" if value is None else value),
        "thresholds": lambda value: block(x, thresholds="x" if value is None else value),
        "weights": lambda value: block(x, weights="x" if value is None else value),
        "collect": lambda value: entered(tp.collect(value)),
        "deploy": lambda value: tp.deploy(value, x),
        "deploy's example": lambda value: tp.deploy(block, value),
        "count_flops": lambda value: tp.count_flops(value, images),
        "count_flops's inputs": lambda value: tp.count_flops(net, value),
        "adapt": lambda value: tp.adapt(value, per="token"),
        "summary": tp.summary,
        "map_loss": lambda value: tp.map_loss(value, [ponder], 0.1),
        "reinforce_loss": lambda value: tp.reinforce_loss(value, [ponder], 0.1),
        "stick_breaking": tp.stick_breaking,
        "save_pretrained": lambda value: tp.save_pretrained(value, "nowhere"),
    }


NAMES = [
    "block", "network", "rnn", "deployed, dense", "deployed, compact", "deployed network", "use_mode",
    "use_thresholds", "mode", "thresholds", "weights", "collect", "deploy", "deploy's example",
    "count_flops", "count_flops's inputs", "adapt", "summary", "map_loss", "reinforce_loss",
    "stick_breaking", "save_pretrained",
]  # fmt: skip


@pytest.mark.parametrize("value", WRONG, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("name", NAMES)
def test_a_value_of_a_wrong_kind_is_told(calls, name, value):
    with pytest.raises((TypeError, ValueError), match=r"^expected ") as told:
        calls[name](value)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("value", [None, 3, object()], ids=lambda value: type(value).__name__)
def test_ponders_and_folders_of_a_wrong_kind_are_told(value):
    with pytest.raises(TypeError, match=r"^expected a Ponder for each block, got "):
        tp.map_loss(torch.zeros(4), value, 0.1)
    with pytest.raises(TypeError, match=r"^expected the name of a folder, got a "):
        tp.from_pretrained(value)


def test_states_of_several_tensors_remain_states():
    block = tp.AdaptiveBlock(lambda u: (u[0] + 1, u[1]), lambda u: u[0][:, :1], max_steps=2)
    output, _ = block((torch.zeros(2, 3), torch.ones(2, 3)))
    assert len(output) == 2
    with pytest.raises(TypeError, match=r"a tensor or a tuple of tensors, got a tuple of Tensor, NoneType$"):
        block((torch.zeros(2, 3), None))
