"""A family that a third party registers: what follows is all that it takes."""

import pytest
import torch
from torch import nn

import torchpact as tp
from tests.adapt.networks import randomize
from torchpact.adapt import Family, register_family
from torchpact.specs import AttentionLayer, LayerContext, Projection


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


class AttentionOfOnesOwn(nn.Module):
    """A layer that begins with norms, of a package of one's own."""

    def __init__(self, width=32, heads=4):
        super().__init__()
        self.heads, self.norm1, self.norm2 = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 64), nn.Linear(64, width)

    def forward(self, x, mask=None):
        pairs = self.qkv(self.norm1(x)).chunk(3, -1)
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in pairs)
        mask = None if mask is None else mask[:, None, None, :]
        attended = nn.functional.scaled_dot_product_attention(q, k, v, mask)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Attentive(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([AttentionOfOnesOwn() for _ in range(4)])

    def forward(self, x, attention_mask=None):
        for layer in self.layers:
            x = layer(x, attention_mask)
        return x


def read_call(call):
    mask = call.args[1] if len(call.args) > 1 else call.kwargs.get("mask")
    return LayerContext(None if mask is None else mask[:, None, None, :])


def spec(layer):
    return AttentionLayer(
        norm1=layer.norm1,
        norm2=layer.norm2,
        qkv=Projection.of(layer.qkv),
        out=Projection.of(layer.out),
        up=Projection.of(layer.up),
        down=Projection.of(layer.down),
        activation=nn.functional.gelu,
        heads=layer.heads,
        read_call=read_call,
    )


register_family(
    Family(
        "attentive",
        layers=(f"{__name__}.AttentionOfOnesOwn",),
        width=lambda layer: layer.out.out_features,
        spec=spec,
    )
)


@pytest.mark.parametrize("masked", [True, False])
def test_a_family_with_a_spec_runs_on_the_engine_attention(masked):
    torch.manual_seed(0)
    net, x = randomize(tp.adapt(Attentive().eval())), torch.randn(3, 7, 32)
    mask = torch.arange(7) < torch.tensor([[7], [4], [6]])
    given = (x, mask) if masked else (x,)
    real = mask if masked else torch.ones_like(mask)
    fast = tp.deploy(net, (x, mask), engines=["attention"])
    assert fast.report.measurements[0].engine == "attention"
    with tp.collect(fast) as ponders, torch.no_grad():
        output = fast(*given)
    # the layers one by one, halted tokens as they are
    state, active, steps = x, real.unsqueeze(2), torch.zeros(3, 7, 1, dtype=torch.long)
    with torch.no_grad():
        for index, layer in enumerate(net.layers):
            state = torch.where(active, layer(state, real), state)
            steps += active
            if index < 3:
                head = net.torchpact.runs[0].heads[index]
                normal = nn.functional.layer_norm(state, (32,))
                active = active & (normal @ head.weight[0] + head.bias <= 0).unsqueeze(2)
    assert steps[real].unique().numel() > 2
    assert torch.equal(ponders[0].steps[real], steps[real])
    torch.testing.assert_close(output[real], state[real], rtol=1e-4, atol=1e-4)


def test_it_is_saved_and_loaded(tmp_path):
    net, u = tp.adapt(Mixer()).eval(), torch.randn(2, 5, 8)
    tp.save_pretrained(net, tmp_path)
    assert torch.equal(tp.from_pretrained(tmp_path, net=Mixer())(u), net(u))
