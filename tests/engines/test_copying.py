"""What deploying must leave as it was, and trials that fail."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import torchpact as tp
from tests.engines.networks import relative
from tests.engines.strangers import Mine, Rotate, agree
from torchpact.engines import whole

pytestmark = pytest.mark.usefixtures("no_patience")


class Encloses(nn.Module):
    """Steps that are functions, and enclose the module."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)
        self.drop, self.head = nn.Dropout(0.5), nn.Linear(6, 1)
        step = lambda u: self.drop(self.norm(self.linear(u)))  # noqa: E731
        self.block = tp.AdaptiveBlock(step, lambda u: self.head(u), max_steps=3, mode="thresholded")

    def forward(self, x):
        u, self.ponder = self.block(x)
        return {"logits": u, "ponders": [self.ponder]}


def test_functions_that_enclose_modules_keep_to_the_originals():
    """What a function encloses is not copied: steps with parameters are to be modules."""
    net, x = Encloses().train(), torch.randn(8, 6)
    net(x)["logits"].sum().backward()  # and leaves a ponder with gradients behind
    net.eval()
    fast = tp.deploy(net, x)
    assert agree(fast, net, x)


def test_copies_of_functions_keep_hooks_and_attributes():
    block = tp.AdaptiveBlock(lambda u: u * 1.1, nn.Linear(4, 1), max_steps=3, mode="thresholded")
    step: Any = block.steps[0]
    step.register_forward_hook(lambda module, inputs, output: output + 1)
    step.note = "kept"
    other, u = copy.deepcopy(block).eval(), torch.randn(2, 4)
    with torch.no_grad():
        assert torch.equal(other(u)[0], block(u)[0])
        assert torch.equal(tp.deploy(block, u)(u)[0], block(u)[0])
    assert other.steps[0].note == "kept"


def test_trials_draw_no_random_numbers_of_the_users():
    block = tp.AdaptiveBlock(Rotate(4), nn.Linear(4, 1), max_steps=3, mode="discrete")
    x = torch.randn(8, 4)
    state = torch.random.get_rng_state()
    tp.deploy(block, x)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_trials_leave_buffers_and_generators_as_they_were():
    generator = torch.Generator().manual_seed(7)

    class Counts(Mine):
        calls: torch.Tensor

        def __init__(self):
            super().__init__(tp.Discrete(generator))
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, images, scale=1.0):
            self.calls += 1
            return super().forward(images, scale) | {"calls": self.calls.clone()}

    net, images = Counts().eval(), torch.randn(3, 3, 6, 6)
    before = generator.get_state()
    fast = tp.deploy(net, images)
    assert torch.equal(generator.get_state(), before)
    assert fast(images)["calls"] == 1
    assert net.calls == 0


# --- trials that fail ---


class Fragile(nn.Module):
    """Runs, but not in every way in which one may try to run it."""

    def __init__(self, step, head):
        super().__init__()
        self.block = tp.AdaptiveBlock(step, head, max_steps=4, mode="thresholded")

    def forward(self, x):
        u, ponder = self.block(x)
        return {"logits": u, "ponders": [ponder]}


def explodes(u):
    if u.abs().max() > 1e3:
        raise FloatingPointError("too large")
    return 30 * u


class Casts(Fragile):
    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(nn.functional.linear(x, torch.eye(6)))


@pytest.mark.parametrize(
    "net",
    [
        Fragile(explodes, lambda u: u.abs().sum(1, True) - 1),
        Casts(nn.Linear(6, 6), lambda u: u[:, :1].float() + 1),
        Fragile(torch.tanh, lambda u: u.sum().view(1, 1)),
    ],
    ids=["explodes", "casts", "decides for all"],
)
def test_a_network_that_runs_deploys(net):
    x = torch.rand(5, 6) + 0.5
    fast = tp.deploy(net, x)
    with torch.no_grad():
        got, expected = fast(x), net(x)
    assert torch.equal(got["ponders"][0].steps, expected["ponders"][0].steps)
    assert relative(got["logits"], expected["logits"]) < 1e-2
    assert fast.explain()


def test_views_of_weights_and_other_layers_survive_another_layout(fastest, monkeypatch):
    monkeypatch.setattr(
        whole, "interleaved", lambda ways, **_: {n: 0.1 if n == "blocks 1" else 1.0 for n in ways}
    )

    class Standardised(Mine):
        def __init__(self):
            super().__init__()
            self.volume = nn.Conv3d(1, 1, 1)

        def forward(self, images, scale=1.0):
            weight = self.stem.weight.view(16, -1)
            return super().forward(images + weight.mean() + self.volume.weight.sum(), scale)

    net, images = Standardised().eval(), torch.randn(3, 3, 8, 8)
    fast = tp.deploy(net, images)
    assert fast.channels_last
    assert agree(fast, net, images)
