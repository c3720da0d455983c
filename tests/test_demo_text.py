"""torchpact demo --text, with a tiny network of random weights; the real one is marked slow."""

import io
import json

import pytest
import torch
from rich.console import Console

import torchpact as tp
from torchpact_recipes import demo_text as making
from torchpact_recipes.commands import demo_text as command
from torchpact_recipes.data import DataError
from torchpact_recipes.data.reviews import load_reviews
from torchpact_recipes.demo_text import Word
from torchpact_recipes.pretrained import minilm

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
pytestmark = pytest.mark.filterwarnings("ignore:Where nothing can be skipped")

WORDS = ["a", "the", "film", "good", "bad", "plot", "acting", "is", "was", "and", ",", ".", "very", "#s"]
TEXTS = [
    "The film is good.",
    "the plot was bad, very bad",
    "films films and plots",
    "A very good film, and the acting was good.",
] * 4


def tokenizer():
    vocabulary = {word: n for n, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS, "##s"])}
    return transformers.BertTokenizerFast(vocab=vocabulary)


def network(layers=3):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": layers, "num_attention_heads": 2}
    config = transformers.BertConfig(vocab_size=24, intermediate_size=24, max_position_embeddings=64, **sizes)
    net = transformers.BertModel(config).eval()
    for name, parameter in net.named_parameters():
        if "encoder" in name and parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    return net


def halting(ada):
    """Give heads weights such that tokens leave after all layers."""
    generator = torch.Generator().manual_seed(1)
    for head in ada.torchpact.runs[0].heads:
        head.weight.data.normal_(std=0.7, generator=generator)
        head.bias.data.fill_(-1.0)
    return ada.eval()


def test_untrained_it_gives_the_embeddings_of_its_teacher():
    teacher = network()
    ada = making.adapt(teacher).eval()
    batch = making.encode(tokenizer(), TEXTS)
    assert torch.equal(making.embed(ada, batch), making.embed(teacher, batch))
    quality = making.compare(ada, teacher, tokenizer(), TEXTS)
    assert quality.cosine == pytest.approx(1)
    assert quality.layers == 3
    assert quality.flops == quality.full


def test_embeddings_are_means_over_real_tokens():
    batch = making.encode(tokenizer(), TEXTS[:2])
    alone = making.encode(tokenizer(), TEXTS[:1])
    net = network()
    states = net(**alone).last_hidden_state.mean(1)
    torch.testing.assert_close(making.embed(net, batch)[:1], states, rtol=1e-4, atol=1e-5)


def test_training_moves_heads_and_layers_but_neither_the_teacher_nor_word_embeddings():
    teacher = network()
    before = {name: p.clone() for name, p in teacher.named_parameters()}
    ada = making.adapt(teacher)
    steps: list[making.Step] = []
    making.train(ada, teacher, tokenizer(), TEXTS, updates=8, tau=1.0, seed=0, report=steps.append)
    assert all(torch.equal(p, before[name]) for name, p in teacher.named_parameters())
    after = dict(ada.named_parameters())
    assert torch.equal(
        after["embeddings.word_embeddings.weight"], before["embeddings.word_embeddings.weight"]
    )
    assert not torch.equal(
        after["encoder.layer.1.output.dense.weight"], before["encoder.layer.1.output.dense.weight"]
    )
    assert all(head.weight.abs().sum() > 0 for head in ada.torchpact.runs[0].heads)
    assert [step.done for step in steps] == [*range(1, 9)]
    assert not ada.training


def test_a_price_makes_tokens_leave_earlier():
    teacher = network()
    layers = []
    for tau in (0.0, 20.0):
        ada = making.adapt(teacher)
        making.train(ada, teacher, tokenizer(), TEXTS, updates=60, tau=tau, seed=0)
        layers.append(making.compare(ada, teacher, tokenizer(), TEXTS).layers)
    assert layers[1] < layers[0]


def test_words_have_the_layers_of_the_piece_that_took_most_and_spell_the_text():
    ada = halting(making.adapt(network()))
    found = making.words(ada, tokenizer(), TEXTS[:4])
    assert ["".join(word.text for word in text) for text in found] == TEXTS[:4]
    assert [word.text for word in found[2]] == ["films ", "films ", "and ", "plots"]
    with tp.collect(ada) as ponders:
        ada(**making.encode(tokenizer(), TEXTS[:4]))
    steps = ponders[0].steps[2, :, 0].int().tolist()
    # [CLS] film ##s film ##s and plot ##s [SEP]
    expected = [max(steps[1:3]), max(steps[3:5]), steps[5], max(steps[6:8])]
    assert [word.layers for word in found[2]] == expected
    assert len({word.layers for text in found for word in text}) > 1


def test_what_is_cut_off_has_no_layers(monkeypatch):
    monkeypatch.setattr(making, "LENGTH", 6)
    (found,) = making.words(halting(making.adapt(network())), tokenizer(), ["the film is good and bad"])
    assert [word.text for word in found] == ["the ", "film ", "is ", "good", " and bad"]
    assert found[-1].layers == 0
    assert all(word.layers for word in found[:-1])


def test_words_are_shaded_by_their_layers_and_numbered():
    text = command.shaded([Word("a ", 1), Word("good", 12), Word(" and more", 0)], 12)
    assert text.plain == "a₁ good₁₂ and more"
    file = io.StringIO()
    Console(file=file, force_terminal=True, color_system="truecolor", width=80).print(text)
    shown = file.getvalue()
    assert "48;2;246;217;201" in shown  # few layers
    assert "48;2;194;65;12" in shown  # all of them


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(command, "minilm", lambda **_: (network(), tokenizer()))
    monkeypatch.setattr(command, "load_reviews", lambda **_: TEXTS * 4)
    monkeypatch.setattr(command, "HELD_OUT", 20)
    monkeypatch.setattr(command, "TIMED", 4)


def test_the_command_prints_json_and_leaves_a_page_and_a_network(small, tmp_path, capsys):
    command.demo_text(tmp_path, 4, 1.0, 0, as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert found["updates"] == 4
    assert -1 <= found["quality"]["cosine"] <= 1.0001
    assert 0 < found["quality"]["flops"] <= found["quality"]["full"]
    assert found["times"]["deployed"] > 0
    page = (tmp_path / "text.html").read_text(encoding="utf-8")
    assert "<!--BODY-->" not in page
    assert "://" not in page  # nothing is asked of any network
    assert "film" in page
    again = tp.from_pretrained(tmp_path / "minilm")
    assert len(again.torchpact.runs[0].heads) == 2


def test_the_command_prints_words_a_legend_and_a_table(small, tmp_path, capsys):
    command.demo_text(tmp_path, 4, 1.0, 0, as_json=False)
    shown = capsys.readouterr().out
    assert "layers" in shown
    assert "cosine" in shown
    assert "original" in shown
    assert "text.html" in shown


@pytest.mark.slow
def test_minilm_learns_to_leave_early_and_stays_near_itself():
    try:
        (teacher, its_tokenizer), reviews = minilm(), load_reviews()
    except DataError as error:
        pytest.skip(f"weights or texts could not be fetched: {error}")
    ada = making.adapt(teacher)
    making.train(ada, teacher, its_tokenizer, reviews[:2000], updates=160, tau=6.0, seed=0)
    quality = making.compare(ada, teacher, its_tokenizer, reviews[-50:])
    assert quality.layers < 6
    assert quality.cosine > 0.5
    words = making.words(ada, its_tokenizer, reviews[-4:])
    assert ["".join(word.text for word in text).strip() for text in words] == reviews[-4:]
