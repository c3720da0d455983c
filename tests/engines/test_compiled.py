"""The dense engine by torch.compile; here it is traced but not compiled, which takes long."""

import pytest
import torch

import torchpact as tp
from tests.engines.networks import lively
from torchpact.engines import FoldedBlock, Unsupported, deploy, registry
from torchpact.engines.generic import compiled


@pytest.fixture
def traced(monkeypatch):
    """What was given to torch.compile."""
    given, compile_ = [], torch.compile

    def compile_less(function, **options):
        given.append(options)
        return compile_(function, backend="eager", dynamic=options["dynamic"])

    monkeypatch.setattr(torch, "compile", compile_less)
    torch.compiler.reset()
    yield given
    torch.compiler.reset()


def test_gives_what_the_model_does_and_is_made_only_if_asked_for(traced):
    model, images = lively(units=2), torch.randn(2, 3, 8, 8)
    deploy(model, images)
    assert not traced
    fast = deploy(model, images, engines=["compiled"])
    assert [each.engine for each in fast.report.measurements] == ["compiled"] * 3 + ["blocks"]
    assert traced == [{"mode": None, "dynamic": False}] * 3
    with torch.no_grad():
        expected, references = model(images)
    logits, ponders = fast(images)
    assert torch.allclose(logits, expected, rtol=1e-4, atol=1e-4)
    for ponder, wanted in zip(ponders, references, strict=True):
        assert torch.equal(ponder.steps, wanted.steps)


@torch.no_grad()
def test_what_would_be_compiled_anew_runs_as_it_is(monkeypatch):
    calls = []

    def noting(run, **_):
        def noted(u):
            calls.append(u.shape)
            return run(u)

        return noted

    monkeypatch.setattr(torch, "compile", noting)
    block = lively(units=2).blocks[0]
    run, u = compiled.build(FoldedBlock(block)), torch.randn(2, 16, 4, 4)
    for given in (u, u[:1], u.contiguous(memory_format=torch.channels_last)):
        output, _ = run(given)
        assert torch.allclose(output, block(given)[0], atol=1e-5)
    with torch.inference_mode():
        output, _ = run(u.clone())
        assert torch.allclose(output, block(u)[0], atol=1e-5)
    assert calls == [u.shape] * 2


def test_draws_no_samples():
    block = lively(units=2).blocks[0]
    with pytest.raises(Unsupported, match="compiled: expected a mode that draws nothing"):
        registry.ENGINES["compiled"](FoldedBlock(block, tp.Discrete()))
