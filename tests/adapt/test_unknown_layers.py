"""Layers of no known family, and towers beside text: what adapt tells of them, and what it leaves alone."""

import pytest
import torch
from torch import nn

import torchpact as tp
from tests.adapt.networks import WIDTH, ResidualMLP, randomize, runs


class Scale(nn.Module):
    """A norm, though its name does not say so."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, u):
        return u * torch.rsqrt(u.square().mean(-1, keepdim=True) + 1e-6) * self.weight


class MyRMSNorm(Scale):
    """A norm of some package, by its name one."""


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.q_norm, self.proj = nn.RMSNorm(4), nn.Linear(width, width)

    def forward(self, u):
        return self.q_norm(self.proj(u).unflatten(-1, (-1, 4))).flatten(-2)


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.attention = MyRMSNorm(width), Attention(width)

    def forward(self, u):
        return u + self.attention(self.norm(u))


class Untold(nn.Module):
    """A layer whose parts do not tell how wide its state is."""

    def __init__(self, width):
        super().__init__()
        self.scale, self.proj = Scale(width), nn.Linear(width, width)

    def forward(self, u):
        return u + self.proj(self.scale(u))


class Stack(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def test_the_width_is_that_of_norms_of_the_layer_itself_of_whatever_package():
    torch.manual_seed(0)
    net = tp.adapt(Stack(Layer(WIDTH) for _ in range(3)))
    assert runs(net)[0].heads[0].weight.shape == (1, WIDTH)


class ChannelsFirst(nn.Module):
    """A layer whose norm tells a width that its state does not have at the end."""

    def __init__(self):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, u):
        return u + self.up(self.norm(u.transpose(1, 2))).transpose(1, 2)


def test_a_state_of_another_width_is_refused_in_one_line_when_it_is_seen():
    net = tp.adapt(Stack(ChannelsFirst() for _ in range(3)))
    message = (
        r"^expected states of 8 features in the layers of 'layers', got a state of shape \(2, 8, 5\): [^\n]*$"
    )
    with pytest.raises(ValueError, match=message):
        net(torch.randn(2, 8, 5))


class CallsForward(Stack):
    """Calls the forward of its layers, so that their hooks do not run."""

    def forward(self, u):
        for layer in self.layers:
            u = layer.forward(u)
        return u


def test_a_network_that_calls_forward_of_its_layers_is_refused_in_one_line_at_the_first_call():
    net, x = CallsForward(ResidualMLP(WIDTH) for _ in range(3)).eval(), torch.randn(2, 5, WIDTH)
    before = net(x)
    ada = tp.adapt(net)
    message = r"^expected the layers of 'layers' to be called as modules, got a CallsForward that [^\n]*$"
    with pytest.raises(ValueError, match=message):
        ada(x)
    assert torch.equal(tp.unadapt(ada)(x), before)


class CallsBoth(Stack):
    """Calls its layers, and the forward of another module."""

    def forward(self, u):
        return nn.Tanh().forward(super().forward(u))


def test_a_network_that_calls_its_layers_and_forward_of_others_is_not():
    net, x = CallsBoth(ResidualMLP(WIDTH) for _ in range(3)).eval(), torch.randn(2, 5, WIDTH)
    before = net(x)
    assert torch.equal(tp.adapt(net)(x), before)


def test_squeezebert_is_refused():
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    groups = {f"{name}_groups": 2 for name in ("q", "k", "v", "intermediate", "output")}
    sizes = {"hidden_size": 16, "embedding_size": 16, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.SqueezeBertConfig(vocab_size=50, num_hidden_layers=3, **sizes, **groups)
    net = tp.adapt(transformers.SqueezeBertModel(config).eval())
    with pytest.raises(ValueError, match=r"^expected the layers of 'encoder.layers' to be called as modules"):
        net(torch.randint(50, (2, 6)))


class Towers(nn.Module):
    """Two runs, of one of which nothing is known."""

    def __init__(self):
        super().__init__()
        self.known = Stack(ResidualMLP(WIDTH) for _ in range(3))
        self.other = Stack(Untold(WIDTH) for _ in range(3))

    def forward(self, x):
        return self.other(self.known(x))


def test_a_run_of_which_the_width_cannot_be_told_is_left_as_it_was_beside_others():
    torch.manual_seed(0)
    net, x = Towers().eval(), torch.randn(2, 5, WIDTH)
    before = net(x)
    assert torch.equal(tp.adapt(net)(x), before)
    assert [run.name for run in runs(net)] == ["known.layers"]
    assert "unchanged   other.layers: expected layers whose norms or convolutions agree" in str(
        tp.summary(net)
    )
    tp.unadapt(net)
    with pytest.raises(
        ValueError,
        match=r"^expected layers whose norms or convolutions agree on the width .* in 'other.layers'",
    ):
        tp.adapt(net, where="other.layers")
    tp.adapt(net, example=x)
    assert [run.name for run in runs(net)] == ["known.layers", "other.layers"]


def test_a_network_adapted_by_an_example_is_loaded_without_one(tmp_path):
    torch.manual_seed(0)
    net, x = Towers().eval(), torch.randn(2, 5, WIDTH)
    randomize(tp.adapt(net, example=x, bias=-5.0))
    tp.save_pretrained(net, tmp_path)
    again = tp.from_pretrained(tmp_path, net=Towers())
    assert torch.equal(again(x), net(x))
    assert len(runs(again)) == 2


class Tower(Stack):
    """An encoder of images, with as many patches as the text beside it has tokens."""

    def forward(self, pixel_values):
        return super().forward(pixel_values)


class Both(nn.Module):
    def __init__(self):
        super().__init__()
        self.vision = Tower(ResidualMLP(WIDTH) for _ in range(3))
        self.text = Stack(ResidualMLP(WIDTH) for _ in range(3))

    def forward(self, inputs_embeds, attention_mask, pixel_values):
        return self.text(inputs_embeds) + self.vision(pixel_values)


def test_padding_of_a_text_is_not_that_of_images_beside_it():
    torch.manual_seed(0)
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
    net = tp.adapt(Both()).eval()
    with tp.collect(net) as ponders:
        net(torch.randn(2, 3, WIDTH), mask, torch.randn(2, 3, WIDTH))
    by_name = {ponder.name: ponder.weights for ponder in ponders}
    assert by_name["vision.layers"] is None
    text = by_name["text.layers"]
    assert text is not None
    assert torch.equal(text.squeeze(2), mask.float())
