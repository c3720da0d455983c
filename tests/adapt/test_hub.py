"""Model cards, and the hub: against an API that only remembers what it is asked."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import torchpact as tp
from tests.adapt.networks import BERT, first, randomize, torch_encoder

pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed")


def test_a_card_says_what_was_adapted_and_how_to_load_it(tmp_path):
    net = tp.adapt(BERT.build())
    tp.save_pretrained(net, tmp_path)
    card = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert card.startswith(
        "---\nlibrary_name: transformers\ntags:\n- adaptive-computation\n- torchpact\n---\n"
    )
    assert str(tp.summary(net)) in card
    assert "tp.from_pretrained(" in card


def test_the_head_of_a_card_is_yaml_that_the_hub_reads(tmp_path):
    from huggingface_hub import ModelCard

    net = BERT.build()
    net.config._name_or_path = "somebody/some-bert"
    tp.save_pretrained(tp.adapt(net), tmp_path)
    data = ModelCard.load(tmp_path / "README.md").data
    assert data.base_model == "somebody/some-bert"
    assert data.tags == ["adaptive-computation", "torchpact"]


def test_a_card_that_is_there_stays(tmp_path):
    (tmp_path / "README.md").write_text("mine")
    tp.save_pretrained(tp.adapt(BERT.build()), tmp_path)
    assert (tmp_path / "README.md").read_text() == "mine"


def test_a_network_that_is_not_of_transformers_has_a_card_too(tmp_path):
    tp.save_pretrained(tp.adapt(torch_encoder()), tmp_path)
    card = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert "library_name: torchpact" in card
    assert "net=a_network_of_this_class" in card


class FakeApi:
    """A hub in a folder."""

    place: Path
    asked: list[tuple[str, object]]

    def __init__(self, token=None):
        self.asked.append(("token", token))

    def create_repo(self, repo_id, *, private, exist_ok):
        self.asked.append(("create", (repo_id, private, exist_ok)))
        return SimpleNamespace(repo_id=repo_id)

    def file_exists(self, repo_id, name):
        return (self.place / name).exists()

    def upload_folder(self, *, repo_id, folder_path, commit_message):
        self.asked.append(("commit", commit_message))
        shutil.copytree(folder_path, self.place, dirs_exist_ok=True)
        return SimpleNamespace(commit_url=f"https://hub/{repo_id}/commit/1")


@pytest.fixture
def hub(tmp_path, monkeypatch):
    from torchpact.integrations import huggingface_hub as integration

    FakeApi.place, FakeApi.asked = tmp_path / "hub", []
    FakeApi.place.mkdir()
    monkeypatch.setattr(integration, "HfApi", FakeApi)
    monkeypatch.setattr(integration, "snapshot_download", lambda repo_id, **_: str(FakeApi.place))
    return integration


@pytest.mark.parametrize("card", [None, "mine"])
def test_what_is_pushed_comes_back_and_a_card_that_is_there_stays(hub, card):
    if card is not None:
        (FakeApi.place / "README.md").write_text(card)
    net, inputs = randomize(tp.adapt(BERT.build())), BERT.inputs(2, 5)
    assert hub.push_to_hub(net, "me/net", private=True, token="t") == "https://hub/me/net/commit/1"
    asked = [("token", "t"), ("create", ("me/net", True, True)), ("commit", "Upload an adapted network")]
    assert FakeApi.asked == asked
    found = (FakeApi.place / "README.md").read_text(encoding="utf-8")
    assert found == card if card else "made adaptive" in found
    with torch.no_grad():
        assert torch.equal(first(hub.from_hub("me/net")(**inputs)), first(net(**inputs)))


def test_a_network_that_is_not_adapted_is_refused_before_anything_is_asked(hub):
    with pytest.raises(ValueError, match=r"^expected an adapted network[^\n]*$"):
        hub.push_to_hub(BERT.build(), "me/net")
    assert not FakeApi.asked
