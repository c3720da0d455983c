"""What the host prepares for the kernel: fragments, norms, and machine code."""

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from tests.engines.networks import lively
from tests.engines.onchip.emulation import H200, plans
from torchpact.engines import Unsupported
from torchpact.engines.conv.onchip import nvrtc, pack
from torchpact.engines.conv.onchip.plan import Device, candidates
from torchpact.specs import block_spec
from torchpact.specs.providers import head_spec


def unpacked(packed, k, n):
    """The matrix of fragments, number by number, from the table of the PTX manual for mma.m16n8k16."""
    matrix = torch.empty(k, n)
    for a in range(k // 16):
        for e in range(n // 16):
            for lane in range(32):
                group, thread = divmod(lane, 4)
                for tile in range(2):
                    for register in range(2):
                        for low in range(2):
                            row = a * 16 + thread * 2 + low + 8 * register
                            column = e * 16 + tile * 8 + group
                            matrix[row, column] = packed[a, e, lane, tile * 4 + register * 2 + low]
    return matrix


def test_fragments_are_those_of_the_manual():
    matrix = torch.randn(48, 32)
    packed = pack.fragments(matrix)
    assert packed.shape == (3, 2, 32, 8)
    assert torch.equal(unpacked(packed, 48, 32), matrix)


def test_convolutions_are_packed_tap_by_tap():
    block = lively(units=2).blocks[1]
    packed = pack.pack_convolutions(block_spec(block).conv_units or ())
    first = unpacked(packed[: 9 * 16 * 32].view(9, 2, 32, 8), 9 * 16, 32)
    u = torch.randn(1, 16, 8, 8)
    columns = F.unfold(u, 3, padding=1, stride=2).view(16, 9, 16).permute(2, 1, 0).flatten(1)
    expected = F.conv2d(u, block.steps[0].conv1.weight, stride=2, padding=1).detach()
    assert torch.allclose((columns @ first).t().reshape(1, 32, 4, 4), expected, atol=1e-4)
    assert packed.numel() == 9 * 32 * (16 + 3 * 32) + pack.AHEAD * 16 * 32


def specs_of(heads):
    return [head_spec(head) for head in heads]


def test_heads_have_a_column_for_every_neighbour_of_a_pixel_and_one_for_the_mean():
    heads = list(lively(units=3).blocks[1].halting)[:2]
    packed = pack.pack_heads(specs_of(heads))
    assert packed.shape == (2, 2, 2, 32, 8)
    u = torch.randn(32)
    one = torch.zeros(1, 32, 6, 5)
    for lower in range(2):
        products = u @ unpacked(packed[1, lower].unsqueeze(1), 32, 16)
        one[0, :, 2 + lower, 2] = u  # as one of rows 2 and 3, which add to rows 1 to 4
        expected = F.conv2d(one, heads[1].conv.weight, padding=1)[0, 0]
        for q in range(4):
            columns = [2 * q, 2 * q + 1, 8 + 2 * q]
            assert torch.allclose(products[columns] * pack.TAP_UNIT, expected[1 + q, 1:4], atol=1e-5)
        means = [products[9 + 2 * q].item() for q in range(4)]
        assert means[lower] == pytest.approx((heads[1].linear.weight.detach()[0] @ u).item(), abs=1e-5)
        assert means[:lower] + means[lower + 1 :] == [0, 0, 0]
        one.zero_()


def test_taps_that_are_not_numbers_are_told_to_the_bias():
    heads = list(lively(units=3).blocks[1].halting)[:2]
    with torch.no_grad():
        heads[0].conv.weight[0, 3, 0, 1] = torch.nan
    pools = pack.pack_pools(specs_of(heads))
    assert pools.shape == (2, 36)
    assert pools[0, 32].isnan()
    assert pools[1, 32] == heads[1].linear.bias
    assert torch.equal(pools[1, :32], heads[1].linear.weight[0])


@pytest.mark.parametrize(("dtype", "unit"), [(torch.bfloat16, 2.0**16), (torch.float16, 1.0)])
def test_taps_are_scaled_exactly_where_the_exponents_suffice(dtype, unit):
    heads = [head.to(dtype) for head in list(lively(units=3).blocks[0].halting)[:1]]
    matrix = unpacked(pack.pack_heads(specs_of(heads))[0, 0].unsqueeze(1).float(), 16, 16)
    taps = heads[0].conv.weight.detach()[0].float()
    # its own row, to the left: by the tap on the right
    assert torch.equal(matrix[:, 2], unit * taps[:, 1, 2])
    assert torch.equal(matrix[:, 9], heads[0].linear.weight.detach()[0].float())
    with torch.no_grad():
        heads[0].conv.weight[0, 3, 0, 1] = 6e4 if dtype == torch.float16 else 3e38
    assert pack.pack_pools(specs_of(heads))[0, 16].isnan() == (dtype == torch.bfloat16)


def test_norms_have_a_row_for_every_unit():
    block = lively(units=2).blocks[1]
    units = list(block.steps)
    norms = pack.pack_norms(block_spec(block).conv_units or ())
    assert norms.shape == (2, 128)
    u = torch.randn(1, 16, 1, 1)
    expected = units[0].norm1(u).flatten()
    assert torch.allclose(u.flatten() * norms[0, :16] + norms[0, 16:32], expected, atol=1e-5)
    v = torch.randn(1, 32, 1, 1)
    assert torch.allclose(
        v.flatten() * norms[1, 64:96] + norms[1, 96:], units[1].norm2(v).flatten(), atol=1e-5
    )


@pytest.mark.parametrize(
    ("arch", "device", "adaptive"),
    [("sm_80", Device(163 * 1024, 108), True), ("sm_90", H200, True), ("sm_90", H200, False)],
)
def test_compiles_without_a_gpu(arch, device, adaptive, tmp_path, monkeypatch):
    try:
        nvrtc.compiler()
    except Unsupported as reason:
        pytest.skip(str(reason))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for plan in plans((16, 32, 64), 32, 32, 10, half=adaptive, adaptive=adaptive, device=device):
        code = nvrtc.compile_block(plan, arch)
        assert code[:4] == b"\x7fELF"
        assert nvrtc.compile_block(plan, arch) == code
    assert len(list(tmp_path.glob("torchpact/compiled/onchip-*.cubin"))) == 3


@pytest.mark.slow
def test_what_else_may_be_tried_compiles(tmp_path, monkeypatch):
    try:
        nvrtc.compiler()
    except Unsupported as reason:
        pytest.skip(str(reason))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    shape: dict[str, Any] = {
        "channels": (16, 32, 64),
        "height": 32,
        "width": 32,
        "classes": 10,
        "half": False,
    }
    single, many = (candidates(**shape, adaptive=True, batch=batch, device=H200) for batch in (1, 1024))
    others = [plan for each in single for plan in each] + [plan for each in many for plan in each[1:]]
    assert len({*others} - {*plans(**shape)}) == 17
    others.append(replace(many[0][0], entry_stride=0))  # by itself
    for plan in others:
        if plan.cluster in (2, 4):  # as those of 8
            continue
        assert nvrtc.compile_block(plan, "sm_90")[:4] == b"\x7fELF"


@pytest.fixture
def found_anew():
    nvrtc._compiler.cache_clear()
    yield
    nvrtc._compiler.cache_clear()


class _Slow(ModuleType):
    """A package that is being imported: two threads in it at once are one too many."""

    inside = most = 0

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        type(self).inside += 1
        type(self).most = max(self.most, self.inside)
        time.sleep(0.02)
        type(self).inside -= 1
        return name


def _installed(monkeypatch, core):
    bindings: Any = ModuleType("cuda.bindings")
    bindings.nvrtc = SimpleNamespace(nvrtcVersion=lambda: (0, 13, 0))
    for name, module in {"cuda": ModuleType("cuda"), "cuda.bindings": bindings, "cuda.core": core}.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)


def test_threads_import_cuda_core_one_after_the_other(monkeypatch, found_anew):
    _installed(monkeypatch, _Slow("cuda.core"))
    with ThreadPoolExecutor(4) as pool:
        found = [each.result() for each in [pool.submit(nvrtc.compiler) for _ in range(4)]]
    assert _Slow.most == 1
    assert {version for _, version in found} == {"cuda.core, NVRTC 13.0"}
    assert {getattr(route, "args", None) for route, _ in found} == {("Program", "ProgramOptions")}


def test_a_cuda_core_without_programs_leaves_it_to_the_library(monkeypatch, found_anew):
    _installed(monkeypatch, ModuleType("cuda.core"))
    monkeypatch.setattr(nvrtc, "_library", lambda: SimpleNamespace(nvrtcVersion=lambda *_: 0))
    assert nvrtc.compiler() == (nvrtc._by_library, "NVRTC 0.0")


def test_a_compiler_that_fails_says_why():
    try:
        route, _ = nvrtc.compiler()
    except Unsupported as reason:
        pytest.skip(str(reason))
    with pytest.raises(Unsupported, match=r"NVRTC failed for sm_90 .*error"):
        route("nonsense", {"SIZE": 1}, "sm_90")
