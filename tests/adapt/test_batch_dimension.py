"""Layers whose state has the batch as its second dimension: known ones turn it, unknown ones are refused."""

import pytest
import torch
from torch import nn

import torchpact as tp
from tests.adapt.networks import LAYERS, WIDTH, ResidualMLP, randomize, runs, text, weights


def decoder(batch_first):
    torch.manual_seed(0)
    layer = nn.TransformerDecoderLayer(WIDTH, 2, 24, dropout=0.0, batch_first=batch_first)
    net = nn.TransformerDecoder(layer, LAYERS)
    for parameter in net.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.25)
    return net.eval()


@pytest.mark.parametrize("per", ["token", "example"])
@pytest.mark.parametrize("length", [5, 3])  # as long as the batch, too
def test_torchs_decoder_decides_alike_in_both_layouts(per, length):
    torch.manual_seed(1)
    x, memory = torch.randn(3, length, WIDTH), torch.randn(3, 6, WIDTH)
    padding = torch.arange(length) >= torch.tensor([length, 2, 1]).unsqueeze(1)
    first, second = (randomize(tp.adapt(decoder(b), per=per)) for b in (True, False))
    with tp.collect(first) as ours, tp.collect(second) as theirs, torch.no_grad():
        output = first(x, memory, tgt_key_padding_mask=padding)
        turned = second(x.transpose(0, 1), memory.transpose(0, 1), tgt_key_padding_mask=padding)
    torch.testing.assert_close(turned.transpose(0, 1), output)
    assert ours[0].steps.unique().numel() > 1
    assert torch.equal(ours[0].steps, theirs[0].steps)
    for ponder in (ours[0], theirs[0]):
        expected = (~padding).float() if per == "token" else torch.ones(3, 1)
        assert torch.equal(weights(ponder), expected)


@pytest.mark.parametrize("batch_first", [True, False])
def test_an_example_of_torchs_decoder_does_not_depend_on_the_others(batch_first):
    net = randomize(tp.adapt(decoder(batch_first), per="example"))
    torch.manual_seed(1)
    x, memory = torch.randn(3, 5, WIDTH), torch.randn(3, 6, WIDTH)
    turn = (lambda x: x) if batch_first else (lambda x: x.transpose(0, 1))
    with torch.no_grad():
        together, alone = turn(net(turn(x), turn(memory))), turn(net(turn(x[:1]), turn(memory[:1])))
    torch.testing.assert_close(together[:1], alone)


def test_both_halves_of_torchs_transformer_have_padding_of_their_own():
    torch.manual_seed(0)
    net = tp.adapt(nn.Transformer(WIDTH, 2, 3, 3, 24, dropout=0.0, batch_first=True).eval())
    assert [run.name for run in runs(net)] == ["encoder.layers", "decoder.layers"]
    sources = torch.arange(4) >= torch.tensor([[4], [2]])
    targets = torch.arange(4) >= torch.tensor([[1], [3]])
    for given, expected in ((targets, (~targets).float()), (None, None)):
        with tp.collect(net) as ponders, torch.no_grad():
            net(
                torch.randn(2, 4, WIDTH),
                torch.randn(2, 4, WIDTH),
                src_key_padding_mask=sources,
                tgt_key_padding_mask=given,
            )
        assert torch.equal(weights(ponders[0]), (~sources).float())
        if expected is None:
            assert ponders[1].weights is None
        else:
            assert torch.equal(weights(ponders[1]), expected)


@pytest.mark.parametrize("length", [6, 3])
def test_xlnet_knows_its_padding_and_halts_tokens(length):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(0)
    config = transformers.XLNetConfig(vocab_size=50, d_model=16, n_layer=4, n_head=2, d_inner=24)
    net, inputs = transformers.XLNetModel(config).eval(), text(3, length)
    with torch.no_grad():
        before = net(**inputs).last_hidden_state
        assert torch.equal(tp.adapt(net)(**inputs).last_hidden_state, before)
    randomize(net)
    with tp.collect(net) as ponders, torch.no_grad():
        together = net(**inputs).last_hidden_state
        alone = net(**{name: x[:1] for name, x in inputs.items()}).last_hidden_state
    assert ponders[0].steps.shape == (3, length, 1)
    assert torch.equal(weights(ponders[0]), inputs["attention_mask"].float())
    assert torch.equal(ponders[0].steps[:1], ponders[1].steps)
    torch.testing.assert_close(together[:1], alone)


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(ResidualMLP(WIDTH) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class SequenceFirst(nn.Module):
    """An encoder of images as some older networks have it: patches, then the batch."""

    def __init__(self):
        super().__init__()
        self.patches, self.transformer = nn.Conv2d(3, WIDTH, 4, 4), Stack()

    def forward(self, images):
        x = self.patches(images).flatten(2).permute(2, 0, 1)
        return self.transformer(x).mean(0)


def test_unknown_layers_whose_batch_is_second_are_refused_in_one_line():
    net, images = SequenceFirst().eval(), torch.randn(3, 3, 8, 8)
    before = net(images)
    message = r"^expected states with the batch as their first dimension in the layers of [^\n]*where=$"
    with pytest.raises(ValueError, match=message):
        tp.adapt(net, example=images)
    tp.adapt(net)
    with pytest.raises(ValueError, match=message):
        net(images)
    assert torch.equal(tp.unadapt(net)(images), before)


class Pair(nn.Module):
    """Texts and images, of which there may be different numbers."""

    def __init__(self):
        super().__init__()
        self.embed, self.text, self.vision = nn.Embedding(9, WIDTH), Stack(), Images()

    def forward(self, input_ids, pixel_values):
        return self.text(self.embed(input_ids)), self.vision(pixel_values)


class Images(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches, self.transformer = nn.Conv2d(3, WIDTH, 4, 4), Stack()

    def forward(self, pixel_values):
        return self.transformer(self.patches(pixel_values).flatten(2).transpose(1, 2))


def test_as_many_texts_as_patches_are_not_taken_for_a_batch():
    net = tp.adapt(Pair()).eval()
    with tp.collect(net) as ponders, torch.no_grad():
        net(torch.zeros(4, 6, dtype=torch.long), torch.randn(2, 3, 8, 8))
    assert [len(ponder.steps) for ponder in ponders] == [4, 2]
