"""The engine ``stream``: what the block returns, of batches that are larger than what runs at a time."""

import pytest
import torch
from torch import nn

import torchpact as tp
from torchpact.core.call_args import CallArgs
from torchpact.engines.generic.stream_engine import StreamRunner


def block_of(positions=False, mode="thresholded"):
    torch.manual_seed(0)
    step = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
    nn.init.normal_(step.get_parameter("0.weight"), 0, 1)
    head = nn.Linear(6, 1)
    nn.init.normal_(head.weight, 0, 2)
    return tp.AdaptiveBlock(step, head, max_steps=7, mode=mode).double()


@pytest.mark.parametrize("mode", ["thresholded", "act"])
@pytest.mark.parametrize("shape", [(140, 6), (20, 9, 6)])
def test_a_deployed_block_streams_a_large_batch_and_returns_the_same(mode, shape):
    block, u = block_of(mode=mode), torch.randn(*shape, dtype=torch.double)
    fast = tp.deploy(block, u, engines=["stream"])
    assert fast.report.measurements[0].engine == "stream"
    for batch in (u, u[:5]):
        output, ponder = fast(batch)
        with torch.no_grad():
            expected, own = block(batch)
        assert torch.allclose(output, expected, atol=1e-9)
        assert torch.equal(ponder.steps, own.steps)
        assert torch.allclose(ponder.probs, own.probs, atol=1e-9)
    if mode == "thresholded":
        output, ponder = fast(u, thresholds=0.9)
        with torch.no_grad():
            assert torch.equal(ponder.steps, block(u, thresholds=0.9)[1].steps)


def test_context_by_example_and_tables_that_all_share():
    block = tp.AdaptiveBlock(
        lambda u, table, own: torch.tanh(u + table.sum(0) * own), nn.Linear(4, 1), max_steps=6, mode="act"
    )
    u, table, own = torch.randn(30, 4), torch.randn(3, 4), torch.randn(30, 1)
    with torch.no_grad():
        expected, ponder = block(u, table, own)
    output, got = StreamRunner(block, width=7)(u, CallArgs((table, own)))
    assert isinstance(output, torch.Tensor)
    assert torch.allclose(output, expected, atol=1e-5)
    assert torch.equal(got.steps, ponder.steps)


def test_small_batches_and_steps_of_their_own_are_not_for_it():
    fast = tp.deploy(block_of(), torch.randn(60, 6, dtype=torch.double), engines=["compact", "stream"])
    assert any("expected more than 128 examples, got 60" in note for note in fast.report.notes)
    lists = tp.AdaptiveBlock([nn.Linear(6, 6) for _ in range(3)], nn.Linear(6, 1), mode="thresholded")
    with pytest.warns(UserWarning, match="expected one step that all iterations share|stream"):
        tp.deploy(lists, torch.randn(200, 6), engines=["stream"])
