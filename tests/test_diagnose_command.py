"""torchpact diagnose."""

import json
from functools import partial

import pytest
import torch
from PIL import Image

import torchpact as tp
from torchpact_recipes.commands.diagnose import cosine_loss, next_token_loss
from torchpact_recipes.commands.folders import batches_for
from torchpact_recipes.data import DataError
from torchpact_recipes.data.texts import read_texts, text_batches

WORDS = ["[PAD]", "[UNK]", *"abcdefgh"]


@pytest.fixture
def run(run):
    return partial(run, "diagnose")


def saved(folder, causal=False):
    """A tiny network with its tokenizer, as Hugging Face writes it."""
    transformers, tokenizers = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
    torch.manual_seed(0)
    words = {word: number for number, word in enumerate(WORDS)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", padding_side="right"
    )
    sizes = {"vocab_size": len(WORDS), "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3}
    if causal:
        config = transformers.LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2)
        net = transformers.LlamaForCausalLM(config)
    else:
        net = transformers.BertModel(transformers.BertConfig(**sizes, num_attention_heads=2))
    fast.save_pretrained(folder)
    return net.eval(), fast


def texts(folder, count=12):
    path = folder / "texts.txt"
    path.write_text(
        "\n".join(" ".join(WORDS[2 + (i * j) % 8] for j in range(2 + i % 4)) for i in range(count))
    )
    return path


@pytest.mark.parametrize("causal", [False, True])
def test_a_folder_is_diagnosed_on_texts(run, tmp_path, causal):
    net, tokenizer = saved(tmp_path / "net", causal)
    net.save_pretrained(tmp_path / "net")
    out = tmp_path / "out"
    code, printed, err = run(tmp_path / "net", "--data", texts(tmp_path), "--limit", 12, "-o", out)
    assert code == 0, err
    found = json.loads((out / "diagnosis.json").read_text())
    assert found["verdict"] in printed
    assert [row["step"] for row in found["rows"]] == [1, 2, 3]
    assert (found["examples"], found["unit"]) == (12, "nats" if causal else "of the cosine")
    assert (out / "diagnosis.png").read_bytes().startswith(b"\x89PNG")
    assert printed.splitlines()[-3:] == [str(out / f"diagnosis.{kind}") for kind in ("json", "png", "pdf")]
    assert all((out / f"diagnosis.{kind}").is_file() for kind in ("json", "png", "pdf"))
    assert "What the columns mean: docs/diagnose.md" in printed
    if causal:  # the mean over all tokens but the first of each text
        total, count = 0.0, 0
        for text in (tmp_path / "texts.txt").read_text().splitlines():
            ids = tokenizer([text], return_tensors="pt")["input_ids"]
            with torch.no_grad():
                log_p = net(input_ids=ids).logits[0, :-1].log_softmax(-1)
            total -= float(log_p.gather(1, ids[0, 1:, None]).sum())
            count += ids.size(1) - 1
        assert found["rows"][-1]["loss"] == pytest.approx(total / count, rel=1e-4)
    else:
        assert found["rows"][-1]["loss"] == pytest.approx(0, abs=1e-6)


def test_a_saved_adapted_network_keeps_its_heads_and_thresholds(run, tmp_path):
    net, _ = saved(tmp_path / "net")
    ada = tp.adapt(net, per="example", bias=1.0)
    tp.save_pretrained(ada, tmp_path / "net")
    code, printed, err = run(
        tmp_path / "net", "--data", texts(tmp_path), "--limit", 12, "-o", tmp_path / "out", "--json"
    )
    assert code == 0, err
    heads = json.loads(printed)["heads"]
    assert [head["h"] for head in heads] == pytest.approx([torch.tensor(1.0).sigmoid().item()] * 2)
    assert heads[0]["fires"] == 1


def test_a_network_of_the_zoo_is_diagnosed_on_images(run, tmp_path):
    folder = tmp_path / "images"
    folder.mkdir()
    for number in range(4):
        Image.new("RGB", (40, 36), (30 * number, 90, 200 - 20 * number)).save(folder / f"{number}.png")
    code, printed, err = run(
        "resnet32-plain", "--data", folder, "--per", "example", "--limit", 4, "-o", tmp_path / "out", "--json"
    )
    assert (code, err) == (0, "")
    rows = json.loads(printed)["rows"]
    assert [row["of"] for row in rows] == [5] * 15
    assert rows[0]["cost"] < rows[1]["cost"] < 1


def test_texts_are_lines_or_objects(tmp_path):
    plain, objects = tmp_path / "a.txt", tmp_path / "a.jsonl"
    plain.write_text("one\n\n two \nthree\n")
    objects.write_text('{"text": "one"}\n\n{"text": " two ", "label": 1}\n{"text": ""}\n')
    assert read_texts(plain, 2) == ["one", "two"]
    assert read_texts(objects) == ["one", "two"]
    objects.write_text('{"text": "one"}\n{"words": 2}\n')
    with pytest.raises(DataError, match="in line 2, got"):
        read_texts(objects)
    plain.write_text("\n")
    with pytest.raises(DataError, match="expected texts, got none"):
        read_texts(plain)


def test_batches_have_all_texts_and_those_of_like_lengths_together(tmp_path):
    _, tokenizer = saved(tmp_path)
    batches = text_batches(["a b c", "d", "a b c d e", "e f"], tokenizer, length=4, size=2)
    assert [batch["attention_mask"].sum(1).tolist() for batch in batches] == [[1, 2], [3, 4]]


def test_the_loss_of_the_next_token_leaves_padding_out():
    logits, tokens = torch.randn(2, 4, 9), torch.randint(9, (2, 4))
    mask = torch.tensor([[1, 1, 1, 0], [0, 1, 1, 1]])
    output = type("Output", (), {"logits": logits})
    loss = next_token_loss(output, {"input_ids": tokens, "attention_mask": mask})
    assert loss.isnan().tolist() == [[False, False, True], [True, False, False]]
    assert float(loss[0, 1]) == pytest.approx(-float(logits[0, 1].log_softmax(0)[tokens[0, 2]]), rel=1e-5)


def test_the_loss_of_an_encoder_is_that_of_mean_states(tmp_path):
    net, tokenizer = saved(tmp_path)
    ada = tp.adapt(net, per="example")
    batches = text_batches(["a b c", "d"], tokenizer, size=2)
    loss = cosine_loss(ada, batches)
    with torch.no_grad():
        assert loss(ada(**batches[0]), batches[0]) == pytest.approx(0, abs=1e-5)
        with tp.use_thresholds(ada, tp.Thresholds("always")):
            output = ada(**batches[0])
        full = ada(**batches[0])
    one = output.last_hidden_state[0, :1].mean(0), full.last_hidden_state[0, :1].mean(0)
    assert float(loss(output, batches[0])[0]) == pytest.approx(
        1 - float(torch.cosine_similarity(*one, dim=0)), abs=1e-5
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nowhere", "--data", "texts.txt"), "texts.txt: no such file"),
        (("resnet32-plain", "--data", "nowhere"), "expected a folder of images"),
        (("resnet32-plain", "--data", "sample", "--per", "token"), "expected --per example or pixel"),
        (
            ("minilm", "--data", "texts.txt", "--per", "word"),
            "expected --per token, example or pixel, got 'word'",
        ),
    ],
)
def test_mistakes_are_told_in_one_line(run, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    code, printed, err = run(*arguments)
    assert (code, printed) == (2, "")
    assert message in err
    assert err.count("\n") == 1


def test_a_folder_without_a_network_is_told_in_one_line(run, tmp_path):
    (tmp_path / "empty").mkdir()
    code, _, err = run(tmp_path / "empty", "--data", texts(tmp_path))
    assert (code, err.count("\n")) == (2, 1)
    assert "expected a network of Hugging Face with its tokenizer" in err


def test_a_folder_of_a_plain_network_is_told_to_have_no_configuration(run, tmp_path):
    layer = torch.nn.TransformerEncoderLayer(16, 2, 24, batch_first=True)
    net = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    tp.save_pretrained(tp.adapt(net), tmp_path / "net")
    code, _, err = run(tmp_path / "net", "--data", texts(tmp_path))
    assert (code, err.count("\n")) == (2, 1)
    assert "got a folder without config.json: for other networks call tp.diagnose or tp.distill" in err


@pytest.mark.parametrize("command", [("diagnose",), ("adapt", "--budget", 0.8)])
@pytest.mark.parametrize("adaptive", [False, True])
def test_a_folder_without_a_tokenizer_is_refused(run, tmp_path, command, adaptive):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2}
    net = transformers.BertModel(transformers.BertConfig(vocab_size=len(WORDS), **sizes))
    folder = tmp_path / "net"
    if adaptive:
        tp.save_pretrained(tp.adapt(net), folder)
    else:
        net.save_pretrained(folder)
    name, *options = command
    code, printed, err = run.func(name, folder, "--data", texts(tmp_path), "--limit", 12, *options)
    assert (code, printed, err.count("\n")) == (2, "", 1)
    assert f"got none: call tokenizer.save_pretrained('{folder}')" in err


def test_a_tokenizer_that_knows_hardly_a_word_is_refused(tmp_path):
    net, tokenizer = saved(tmp_path)
    some = [*["a b x y"] * 4, "c"]  # 8 of 17 tokens are unknown
    assert len(batches_for(net, tokenizer, some, 64, 2)) == 3
    with pytest.raises(DataError, match="got 94% unknown ones"):  # 16 of 17
        batches_for(net, tokenizer, [*["v w x y"] * 4, "c"], 64, 2)


def test_tokenizers_whose_unknown_token_has_another_role_know_everything(tmp_path):
    net, tokenizer = saved(tmp_path)
    tokenizer.eos_token = tokenizer.unk_token
    assert len(batches_for(net, tokenizer, ["x y z"], 64, 2)) == 1
