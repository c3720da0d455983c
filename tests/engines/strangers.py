"""Networks that are not ours."""

import torch
from torch import nn

import torchpact as tp
from tests.engines.networks import relative, undecided
from torchpact.models import HaltingHead, ResidualUnit


class Rotate(nn.Module):
    """A step that moves examples about, one by one."""

    def __init__(self, size):
        super().__init__()
        self.turn = nn.Linear(size, size)
        nn.init.orthogonal_(self.turn.weight)
        nn.init.normal_(self.turn.bias)
        self.seen = []

    def forward(self, u, shift=0.0):
        self.seen.append(len(u))
        return self.turn(u) + shift


class Mine(nn.Module):
    """Residual units, then a state that is thought about."""

    def __init__(self, mode="thresholded"):
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        units = [ResidualUnit(16, 32, 2), ResidualUnit(32, 32), ResidualUnit(32, 32)]
        self.looks = tp.AdaptiveBlock(units, [HaltingHead(32, bias=0.0) for _ in units[1:]], mode=mode)
        head = nn.Linear(32, 1)
        nn.init.normal_(head.weight)
        self.thinks = tp.AdaptiveBlock(Rotate(32), head, max_steps=6, mode=mode)
        self.norm, self.readout = nn.BatchNorm1d(32), nn.Linear(32, 4)

    def forward(self, images, scale=1.0):
        u, first = self.looks(self.stem(images))
        v, second = self.thinks(self.norm(u.mean((2, 3))) * scale)
        return {"logits": self.readout(v), "ponders": [first, second]}


@torch.no_grad()
def agree(fast, net, *inputs):
    got, expected = fast(*inputs), net(*inputs)
    assert got.keys() == expected.keys()
    assert got["logits"].shape == expected["logits"].shape
    for one, other in zip(got["ponders"], expected["ponders"], strict=True):
        assert not undecided(other)
        assert torch.equal(one.steps, other.steps)
        assert one.probs.isnan().all() or relative(one.probs, other.probs) < 1e-5
    return not len(inputs[0]) or relative(got["logits"], expected["logits"]) < 1e-5


class Attends(nn.Module):
    gated = True

    def __init__(self):
        super().__init__()
        self.look = nn.MultiheadAttention(6, 2, batch_first=True)

    def forward(self, u, gate=None):
        seen, _ = self.look(u, u, u, need_weights=False)
        return u + (seen if gate is None else seen * gate)
