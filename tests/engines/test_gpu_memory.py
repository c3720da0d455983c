"""What the sparse GPU engine keeps; its kernels run in Triton's interpreter, or need not run."""

from collections import defaultdict
from dataclasses import replace

import pytest
import torch

from tests.engines.networks import block_of
from torchpact.core.ponder import is_unknown
from torchpact.specs import block_spec
from torchpact_recipes.bench.memory import peak_memory

pytest.importorskip("triton", reason="needs Triton")

from torchpact.engines.conv.triton import gpu_kernels
from torchpact.engines.conv.triton import lists as gpu_lists
from torchpact.engines.conv.triton.block import Run, SparseGPUBlock

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def brief_spec(block):
    return replace(block_spec(block), details=False)


def test_without_details_only_decisions_are_kept():
    block, u = block_of(16, 5, 4, 2)
    block, u = block.to(DEVICE), u.to(DEVICE)
    expected, reference = SparseGPUBlock(block_spec(block))(u)
    output, ponder = SparseGPUBlock(brief_spec(block))(u)
    assert reference is not None
    assert ponder is not None
    assert isinstance(output, torch.Tensor)
    assert isinstance(expected, torch.Tensor)
    assert torch.equal(output, expected)
    assert torch.equal(ponder.steps, reference.steps)
    assert torch.equal(ponder.cost, reference.cost)
    for unkept, kept in ((ponder.probs, reference.probs), (ponder.expected_steps, reference.expected_steps)):
        assert unkept.shape == kept.shape
        assert is_unknown(unkept)


@pytest.mark.parametrize(
    ("channels", "size", "batch", "most"),
    [
        (16, 32, 2, 1.55),
        (32, 16, 2, 1.15),
        (32, 16, 100, 1.01),  # images enough for all multiprocessors
        (64, 56, 2, 1.0),
        (64, 14, 2, 1.0),
        (256, 14, 2, 1.0),
    ],
)
@torch.no_grad()
def test_memory_of_decisions_alone_against_the_plain_network(channels, size, batch, most, monkeypatch):
    """In half precision, with the multiprocessors of an H200; kernels allocate nothing, and need not run."""
    for module, kernel in ((gpu_kernels, "survey_all"), (gpu_kernels, "convolve"), (gpu_lists, "advance")):
        monkeypatch.setattr(module, kernel, defaultdict(lambda: lambda *_, **__: None))
    block, u = block_of(channels, size, size, batch)
    block, u = block.bfloat16(), u.bfloat16().contiguous(memory_format=torch.channels_last)
    plain = torch.nn.Sequential(*block.steps)
    sparse = SparseGPUBlock(brief_spec(block))
    sparse.processors = 132
    assert peak_memory(lambda: sparse(u)) <= most * peak_memory(lambda: plain(u))


@pytest.mark.parametrize(
    ("channels", "size", "batch", "dtype", "expected"),
    [
        (64, 14, 200, torch.bfloat16, 36),
        (64, 14, 2, torch.bfloat16, 72),
        (64, 20, 200, torch.bfloat16, 36),
        (64, 40, 200, torch.bfloat16, 72),  # not decided by one program
        (256, 14, 200, torch.bfloat16, 72),
        (256, 14, 2, torch.bfloat16, 144),
        (128, 14, 200, torch.float32, 72),
    ],
)
def test_bytes_a_pixel_that_are_kept_for_the_next_decision(
    channels, size, batch, dtype, expected, monkeypatch
):
    for module, kernel in ((gpu_kernels, "survey_all"), (gpu_kernels, "convolve")):
        monkeypatch.setattr(module, kernel, defaultdict(lambda: lambda *_, **__: None))
    block, _ = block_of(channels, 1, 1, 1)
    sparse = SparseGPUBlock(brief_spec(block.to(dtype)))
    sparse.processors = 132
    run = Run(sparse, torch.zeros(batch, channels, size, size, dtype=dtype))
    kept = {products.data_ptr(): products.nbytes for products in run.products}
    assert sum(kept.values()) == expected * batch * size * size
