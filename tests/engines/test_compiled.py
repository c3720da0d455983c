"""The dense engine by torch.compile; here it is traced but not compiled, which takes long."""

from typing import Any

import pytest
import torch
from torch import nn

import torchpact as tp
from tests.engines.networks import lively
from torchpact.core.call_args import CallArgs
from torchpact.engines import Unsupported, deploy
from torchpact.engines.generic.compiled import COMPILED
from torchpact.specs import block_spec


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
        def noted(u, bounds):
            calls.append(u.shape)
            return run(u, bounds)

        return noted

    monkeypatch.setattr(torch, "compile", noting)
    block = lively(units=2).blocks[0]
    run: Any = COMPILED.build(block_spec(block))
    u = torch.randn(2, 16, 4, 4)
    for given in (u, u[:1], u.contiguous(memory_format=torch.channels_last)):
        output, _ = run(given)
        assert torch.allclose(output, block(given)[0], atol=1e-5)
    with torch.inference_mode():
        output, _ = run(u.clone())
        assert torch.allclose(output, block(u)[0], atol=1e-5)
    output, _ = run(u, bounds=(0.3,))
    assert torch.allclose(output, block(u, thresholds=tp.Thresholds(0.3))[0], atol=1e-5)
    assert calls == [u.shape] * 2


@torch.no_grad()
def test_blocks_of_any_steps_are_compiled_and_calls_with_a_context_run_as_they_are(traced):
    torch.manual_seed(0)
    step = torch.nn.Linear(6, 6)
    block = tp.AdaptiveBlock(
        lambda u, shift=0.0: torch.tanh(step(u)) + shift,
        torch.nn.Linear(6, 1),
        max_steps=4,
        mode="thresholded",
    )
    run: Any = COMPILED.build(block_spec(block))
    u = torch.randn(5, 6)
    for context in (CallArgs(), CallArgs((0.5,)), CallArgs((), {"shift": 0.5}), CallArgs()):
        output, ponder = run(u, context)
        expected, reference = block(u, *context.args, **context.kwargs)
        assert torch.allclose(output, expected, atol=1e-5)
        assert torch.equal(ponder.steps, reference.steps)
    assert len(traced) == 1


def test_what_cannot_be_compiled_is_said_in_a_line(monkeypatch):
    def broken(run, **_):
        def fail(u, bounds):
            raise RuntimeError("no\nbackend")

        return fail

    monkeypatch.setattr(torch, "compile", broken)
    run = COMPILED.build(block_spec(lively(units=2).blocks[0]))
    with pytest.raises(Unsupported, match=r"^compiled: no backend$"):
        run.tune(torch.randn(2, 16, 4, 4), CallArgs())


@pytest.mark.parametrize("mode", ["discrete", "relaxed"])
def test_draws_no_samples(mode):
    block = lively(units=2, mode=mode).blocks[0]
    with pytest.raises(Unsupported, match="compiled: expected a mode that draws nothing"):
        COMPILED.build(block_spec(block))


@torch.no_grad()
def test_collect_sees_each_call_of_a_compiled_block_once(traced):
    block = tp.AdaptiveBlock(nn.Linear(8, 8), nn.Linear(8, 1), max_steps=3, mode="thresholded")
    u = torch.randn(4, 8)
    fast = deploy(block, u, engines=["compiled"])
    for _ in range(2):
        with tp.collect(fast) as ponders:
            _, ponder = fast(u)
        assert len(ponders) == 1
        assert torch.equal(ponders[0].steps, ponder.steps)


@torch.no_grad()
def test_layers_that_a_network_calls_one_by_one_are_refused_in_a_line():
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    net = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    ada, u = tp.adapt(net).eval(), torch.randn(2, 5, 16)
    with pytest.warns(UserWarning, match="dense engine runs"):
        fast = deploy(ada, u, engines=["compiled"])
    *_, note = fast.explain().splitlines()
    assert note == "compiled: expected a block, got layers that a network calls one by one"
    assert COMPILED.supports(block_spec(ada.torchpact.runs[0]), CallArgs()) == note
    assert torch.equal(fast(u), ada(u))
