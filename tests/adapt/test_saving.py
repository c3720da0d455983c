"""Adapted networks in folders: what is written, what reads it, and damaged files."""

import json
import warnings

import pytest
import torch
from torch import nn

import torchpact as tp
from tests.adapt.networks import BERT, LLAMA, UNFAMILIAR, VIT, first, randomize, torch_encoder
from torchpact.adapt import AdaptConfig

core = pytest.mark.parametrize("case", [BERT, LLAMA, VIT], ids=str)


@core
def test_a_network_of_transformers_comes_back_with_heads_and_thresholds(case, tmp_path):
    net, inputs = randomize(tp.adapt(case.build())), case.inputs(3, 5)
    tp.use_thresholds(net, tp.Thresholds([["never", 0.25, "always"]]))
    tp.save_pretrained(net, tmp_path / "net")
    again = tp.from_pretrained(tmp_path / "net")
    assert type(again) is type(net)
    assert again.torchpact.config == net.torchpact.config
    with torch.no_grad(), tp.collect(net) as ponders, tp.collect(again) as others:
        assert torch.equal(first(again(**inputs)), first(net(**inputs)))
    assert torch.equal(ponders[0].steps, others[0].steps)
    assert ponders[0].steps.max() == 3
    assert not again.training
    assert sorted(again.state_dict()) == sorted(net.state_dict())
    assert [p.name for p in tmp_path.iterdir()] == ["net"]  # nothing beside it


@core
def test_the_plain_class_loads_the_backbone_without_complaint(case, tmp_path, caplog):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    net, inputs = randomize(tp.adapt(case.build())), case.inputs(3, 5)
    tp.save_pretrained(net, tmp_path)
    transformers.logging.enable_propagation()
    with warnings.catch_warnings(record=True) as caught, caplog.at_level("WARNING", logger="transformers"):
        warnings.simplefilter("always")
        plain = type(net).from_pretrained(tmp_path)
        transformers.AutoModel.from_pretrained(tmp_path)
    about_keys = [r.getMessage() for r in caplog.records if "torchpact" in r.getMessage()]
    assert not about_keys
    assert not [str(w.message) for w in caught if "torchpact" in str(w.message)]
    if case is VIT:
        assert not caplog.records
    with torch.no_grad():
        assert torch.equal(first(plain.eval()(**inputs)), first(case.build()(**inputs)))
    assert not hasattr(plain, "torchpact")


def test_tied_weights_stay_tied(tmp_path):
    net = tp.adapt(LLAMA.build())
    tp.save_pretrained(net, tmp_path)
    again = tp.from_pretrained(tmp_path)
    assert again.lm_head.weight is again.model.embed_tokens.weight
    before = sum(p.numel() for p in net.parameters())
    assert sum(p.numel() for p in again.parameters()) == before


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.encoder, self.out = nn.Embedding(9, 16), torch_encoder(), nn.Linear(16, 9)
        self.out.weight = self.embed.weight

    def forward(self, ids):
        return self.out(self.encoder(self.embed(ids)))


@pytest.mark.parametrize("build", [torch_encoder, UNFAMILIAR.build, Tied])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_plain_network_comes_back_into_one_like_it(build, frozen, tmp_path):
    net = randomize(tp.adapt(build(), frozen=frozen)).eval()
    inputs = {"torch_encoder": torch.randn(2, 5, 16), "Tied": torch.arange(8).view(2, 4)}
    x = inputs.get(build.__name__, torch.randn(2, 5, 3))
    tp.save_pretrained(net, tmp_path)
    again = tp.from_pretrained(tmp_path, net=build())
    with torch.no_grad():
        assert torch.equal(again(x), net(x))
    trained = {name for name, p in again.named_parameters() if p.requires_grad}
    assert trained == {name for name, p in net.named_parameters() if p.requires_grad}


def test_heads_of_ones_own_need_their_factory_again(tmp_path):
    def heads(_layer, width):
        return nn.Sequential(nn.Linear(width, 4), nn.Tanh(), nn.Linear(4, 1))

    net, x = tp.adapt(torch_encoder(), heads=heads), torch.randn(2, 5, 16)
    tp.save_pretrained(net, tmp_path)
    assert torch.equal(tp.from_pretrained(tmp_path, net=torch_encoder(), heads=heads)(x), net(x))
    with pytest.raises(ValueError, match=r"^expected heads=, which made the heads of this network"):
        tp.from_pretrained(tmp_path, net=torch_encoder())


def test_a_checkpoint_as_trainers_write_it_comes_back(tmp_path):
    net, inputs = randomize(tp.adapt(BERT.build())), BERT.inputs(2, 5)
    net.save_pretrained(tmp_path)  # heads are among the weights then
    again = tp.from_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(first(again(**inputs)), first(net(**inputs)))


def test_a_checkpoint_in_several_files_comes_back(tmp_path):
    net, inputs = randomize(tp.adapt(BERT.build())), BERT.inputs(2, 5)
    net.save_pretrained(tmp_path, max_shard_size="5KB")
    files = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(files) > 1
    again = tp.from_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(first(again(**inputs)), first(net(**inputs)))
    files[0].unlink()
    with pytest.raises(
        FileNotFoundError, match=rf"^expected {files[0].name}, which model.safetensors.index.json"
    ):
        tp.from_pretrained(tmp_path)


@pytest.mark.parametrize("name", ["../other.safetensors", "model.bin", 3])
def test_an_index_that_names_other_files_is_refused(name, tmp_path):
    tp.adapt(BERT.build()).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    index = tmp_path / "model.safetensors.index.json"
    for places in ({"weight": name}, {}, [name]):
        index.write_text(json.dumps({"weight_map": places}), encoding="utf-8")
        with pytest.raises(ValueError, match=r'^expected "weight_map" with the names of files in [^\n]*$'):
            tp.from_pretrained(tmp_path)


@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_a_checkpoint_as_trainers_write_it_keeps_its_precision_or_gets_another(dtype, tmp_path):
    net = randomize(tp.adapt(BERT.build())).bfloat16()
    net.save_pretrained(tmp_path)
    again = tp.from_pretrained(tmp_path, **({} if dtype is None else {"dtype": dtype}))
    assert {parameter.dtype for parameter in again.parameters()} == {dtype or torch.bfloat16}
    for ours, theirs in zip(again.parameters(), net.parameters(), strict=True):
        assert torch.equal(ours.bfloat16(), theirs)


def test_the_record_tells_names_kinds_and_widths(tmp_path):
    tp.save_pretrained(tp.adapt(BERT.build(), per="example"), tmp_path)
    record = json.loads((tmp_path / "torchpact.json").read_text())
    assert record["adapt"]["runs"] == [
        {"name": "bert.encoder.layer", "layers": 4, "per": "example", "width": 16, "is_map": False}
    ]


def damaged(folder, file, content):
    path = folder / file
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("torchpact.json", None),
        ("torchpact.json", b""),
        ("torchpact.json", b"{"),
        ("torchpact.json", b"[1]"),
        ("torchpact.json", b"\xff\xfe"),
        ("torchpact.json", b'{"adapt": 3}'),
        ("torchpact.json", b'{"adapt": {"runs": [{"name": "layers"}]}}'),
        ("torchpact.json", b'{"adapt": {"runs": [], "format": 7}}'),
        ("torchpact.json", b'{"adapt": {"runs": []}}'),
        (
            "torchpact.json",
            b'{"adapt": {"runs": [{"name": "no", "layers": 4, "per": "token", "width": 16}]}}',
        ),
        (
            "torchpact.json",
            b'{"adapt": {"runs": [{"name": "layers", "layers": 4, "per": "pixel", "width": 16}]}}',
        ),
        (
            "torchpact.json",
            b'{"adapt": {"runs": [{"name": "layers", "layers": 5, "per": "token", "width": 16}]}}',
        ),
        (
            "torchpact.json",
            b'{"adapt": {"runs": [{"name": "layers", "layers": 4, "per": "token", "width": 16}]},'
            b' "bounds": {"layers": [0.0]}}',
        ),
        (
            "torchpact.json",
            b'{"adapt": {"runs": [{"name": "layers", "layers": 4, "per": "token", "width": 16}]},'
            b' "bounds": {"layers": "x"}}',
        ),
        ("torchpact.safetensors", None),
        ("torchpact.safetensors", b"not tensors"),
        ("model.safetensors", None),
        ("model.safetensors", b"not tensors"),
    ],
)
def test_damaged_files_give_one_clear_line(file, content, tmp_path):
    tp.save_pretrained(tp.adapt(torch_encoder()), tmp_path)
    damaged(tmp_path, file, content)
    with pytest.raises((ValueError, FileNotFoundError)) as caught:
        tp.from_pretrained(tmp_path, net=torch_encoder())
    message = str(caught.value)
    assert message.startswith("expected ")
    assert "\n" not in message
    assert str(tmp_path) in message


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("config.json", None),
        ("config.json", b"{"),
        ("config.json", b'{"architectures": ["os"]}'),
        ("config.json", b"[]"),
    ],
)
def test_damaged_configurations_give_one_clear_line(file, content, tmp_path):
    tp.save_pretrained(tp.adapt(BERT.build()), tmp_path)
    damaged(tmp_path, file, content)
    with pytest.raises((ValueError, FileNotFoundError), match=r"^expected [^\n]*$"):
        tp.from_pretrained(tmp_path)


def test_heads_of_another_network_are_refused(tmp_path):
    tp.save_pretrained(tp.adapt(torch_encoder()), tmp_path)
    with pytest.raises(ValueError, match=r"^expected weights of a TransformerEncoder in [^\n]*$"):
        tp.from_pretrained(tmp_path, net=torch_encoder(norm_first=True, bias=False))


def test_a_network_that_is_not_adapted_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"^expected an adapted network, got a plain TransformerEncoder"):
        tp.save_pretrained(torch_encoder(), tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_deployed_networks_and_blocks_are_not_told_to_be_adapted():
    net = tp.adapt(torch_encoder()).eval()
    fast = tp.deploy(net, torch.randn(2, 5, 16))
    with pytest.raises(ValueError, match=r"got a deployed one: pass the network that tp\.deploy was given$"):
        tp.save_pretrained(fast, "x")
    block = nn.Sequential(tp.AdaptiveBlock(nn.Tanh(), nn.Linear(8, 1), max_steps=3))
    with pytest.raises(ValueError, match=r"got a Sequential with adaptive blocks of its own"):
        tp.summary(block)


def test_a_network_to_load_into_is_plain(tmp_path):
    tp.save_pretrained(tp.adapt(torch_encoder()), tmp_path)
    with pytest.raises(ValueError, match=r"^expected a plain network as net=, got a Transf"):
        tp.from_pretrained(tmp_path, net=tp.adapt(torch_encoder()))


def test_a_file_is_no_folder(tmp_path):
    net, file = tp.adapt(torch_encoder()), tmp_path / "file"
    file.write_text("text")
    with pytest.raises(FileExistsError, match=r"^expected the name of a folder, got a file: [^\n]*file$"):
        tp.save_pretrained(net, file)
    with pytest.raises(TypeError, match=r"^expected the name of a folder, got a int$"):
        tp.save_pretrained(net, 5)  # type: ignore[arg-type]
    assert file.read_text() == "text"


@pytest.mark.parametrize("name", ["thresholds", "bounds"])
def test_thresholds_of_older_records_are_read(name, tmp_path):
    net = tp.adapt(torch_encoder())
    tp.use_thresholds(net, tp.Thresholds([["never", 0.25, "always"]]))
    tp.save_pretrained(net, tmp_path)
    file = tmp_path / "torchpact.json"
    record = json.loads(file.read_text())
    record[name] = record.pop("thresholds")
    file.write_text(json.dumps(record))
    again = tp.from_pretrained(tmp_path, net=torch_encoder())
    assert again.torchpact.runs[0].bounds == (float("inf"), 0.25, -float("inf"))


def test_an_interrupted_save_leaves_the_earlier_files(tmp_path, monkeypatch):
    net = tp.adapt(torch_encoder())
    tp.save_pretrained(net, tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    monkeypatch.setattr(
        "safetensors.torch.save_file", lambda *_, **__: (_ for _ in ()).throw(OSError("full"))
    )
    with pytest.raises(OSError, match="full"):
        tp.save_pretrained(randomize(net), tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert net.torchpact is not None


@pytest.mark.parametrize(
    ("field", "value", "called"),
    [
        ("bias", "x", "a number"),
        ("heads", 3, "a name"),
        ("frozen", 1, "true or false"),
        ("criterion", 2, "an object or null"),
    ],
)
def test_a_record_with_another_type_is_refused(field, value, called):
    text = json.dumps({"runs": [], field: value})
    with pytest.raises(
        ValueError, match=f"^expected '{field}' of an AdaptConfig to be {called}, got {value!r}$"
    ):
        AdaptConfig.from_json(text)
