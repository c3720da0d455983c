"""The way to the Hugging Face hub and back, without a network."""

import json

import pytest
import torch

from tests.viz.networks import network

hub = pytest.importorskip("torchpact.models.hub", reason="needs huggingface_hub", exc_type=ImportError)


def test_a_network_saved_and_read_back_gives_the_same_answers(tmp_path):
    model = network("thresholded", units=2, group=4, halting_bias=-1.0)
    hub.HubResNet.of(model).save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    assert (settings["units"], settings["group"], settings["mode"]) == (2, 4, "thresholded")
    again = hub.HubResNet.from_pretrained(tmp_path)
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        (ours, ponders), (theirs, others) = model(images), again.eval()(images)
    assert torch.equal(ours, theirs)
    assert all(torch.equal(a.steps, b.steps) for a, b in zip(ponders, others, strict=True))


def test_a_plain_network_needs_no_mode(tmp_path):
    model = network(adaptive=False, units=1)
    hub.HubResNet.of(model).save_pretrained(tmp_path)
    again = hub.HubResNet.from_pretrained(tmp_path)
    assert again.config == model.config
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
