"""A family that a third party registers: what follows is all that it takes."""

import torch
from torch import nn

import torchpact as tp
from torchpact.adapt import Family, register_family


class MixerLayer(nn.Module):
    """A layer that nothing but its author knows: tokens first, then features, normalised at the end."""

    def __init__(self, tokens, width):
        super().__init__()
        self.tokens, self.features = nn.Linear(tokens, tokens), nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, u):
        u = u + self.tokens(u.transpose(-2, -1)).transpose(-2, -1)
        return self.norm(u + self.features(u).relu()), None


class Mixer(nn.Module):
    def __init__(self, layers=3):
        super().__init__()
        self.layers = nn.ModuleList([MixerLayer(5, 8) for _ in range(layers)])

    def forward(self, u, attention_mask=None):
        for layer in self.layers:
            u, _ = layer(u)
        return u


register_family(
    Family(
        "Mixer",
        layers=(f"{__name__}.MixerLayer",),
        width=lambda layer: layer.features.out_features,
        per=("example", "token"),
        normalize=False,
    )
)


class Variant(MixerLayer):
    """A class that inherits ``forward`` belongs to the family, too."""


class Other(MixerLayer):
    """A class with a ``forward`` of its own does not."""

    def forward(self, u):
        return super().forward(u)


def test_a_family_of_ones_own_is_found_by_its_class():
    net, u, mask = Mixer().eval(), torch.randn(4, 5, 8), torch.ones(4, 5)
    expected = net(u)
    net = tp.adapt(net)
    with tp.collect(net) as ponders:
        assert torch.equal(net(u, attention_mask=mask), expected)
    assert ponders[0].steps.shape == (4, 1, 1)  # the first of ``per`` is the default
    assert not net.torchpact.runs[0].heads[0].normalize
    assert "layers: 3 × MixerLayer, per example" in str(tp.summary(net))


def test_its_subclasses_belong_to_it_unless_they_have_a_forward_of_their_own():
    for kind, per in ((Variant, "example"), (Other, "token")):
        net = Mixer()
        net.layers = nn.ModuleList([kind(5, 8) for _ in range(3)])
        assert tp.adapt(net).torchpact.runs[0].per == per


def test_it_is_saved_and_loaded(tmp_path):
    net, u = tp.adapt(Mixer()).eval(), torch.randn(2, 5, 8)
    tp.save_pretrained(net, tmp_path)
    assert torch.equal(tp.from_pretrained(tmp_path, net=Mixer())(u), net(u))
