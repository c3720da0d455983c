"""How blocks are launched, by a driver that only notes what it is told."""

import ctypes
import subprocess
from dataclasses import replace

import pytest
import torch

from tests.engines.onchip.emulation import needs_compiler, plans
from torchpact.engines import Unsupported
from torchpact.engines.conv.onchip import Args, driver

SOURCE = """
extern "C" {
// as in cuda.h
union Value { char room[64]; int programmatic; struct { unsigned x, y, z; } cluster; };
struct Attribute { int id; char pad[4]; Value value; };
struct Config { unsigned grid[3], block[3], shared; void* stream; Attribute* attributes; unsigned count; };
int version = 13000, pushed, launches, first_fails, clusters = 1;
unsigned seen[10];
long long input;

int cuInit(unsigned) { return 0; }
int cuDriverGetVersion(int* out) { *out = version; return 0; }
int cuDeviceGetAttribute(int* out, int, int) { *out = 227 * 1024; return 0; }
int cuDevicePrimaryCtxRetain(void** out, int) { *out = &pushed; return 0; }
int cuCtxSetCurrent(void*) { return 0; }
int cuModuleLoadData(void** out, const void*) { *out = &seen; return 0; }
int cuModuleGetFunction(void** out, void*, const char*) { *out = &input; return 0; }
int cuFuncSetAttribute(void*, int, int) { return 0; }
int cuFuncGetAttribute(int* out, int, void*) { *out = 0; return 0; }
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int*, void*, int, unsigned long) { return 0; }
int cuOccupancyMaxActiveClusters(int* out, void*, const Config* c) {
    const Attribute& a = *c->attributes;
    *out = c->count == 1 && a.id == 4 && a.value.cluster.x == c->grid[0] ? clusters : 0;
    return clusters < 0;
}
int cuCtxPushCurrent_v2(void* context) { return context == &pushed ? (++pushed, 0) : 1; }
int cuCtxPopCurrent_v2(void**) { return 0; }
int cuLaunchKernel() { return 1; }
int cuGetErrorString(int, const char** out) { *out = "told to"; return 0; }
int cuLaunchKernelEx(const Config* c, void* function, void** parameters, void** extra) {
    ++launches;
    if (first_fails && !pushed) return first_fails;
    if (function != &input || extra) return 2;
    unsigned now[10] = {
        c->grid[0], c->grid[1] * c->grid[2], c->block[0], c->block[1] * c->block[2], c->shared,
        (unsigned)(unsigned long long)c->stream, c->count, c->count ? (unsigned)c->attributes->id : 0,
        c->count ? (unsigned)c->attributes->value.programmatic : 0, 0};
    for (int i = 0; i < 10; ++i) seen[i] = now[i];
    input = *(long long*)parameters[0];
    return 0;
}
}
"""


@pytest.fixture
def cuda(tmp_path, monkeypatch):
    """A driver of our own, in the place of CUDA's."""
    (tmp_path / "cuda.cpp").write_text(SOURCE)
    built = tmp_path / "libcuda.so"
    subprocess.run(["g++", "-shared", "-fPIC", str(tmp_path / "cuda.cpp"), "-o", str(built)], check=True)
    load = ctypes.CDLL
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: load(str(built)))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 77 + index, raising=False)
    driver.driver.cache_clear()
    yield driver.driver()
    driver.driver.cache_clear()


def _loaded(**changes):
    plan = replace(plans((16, 32, 64), 32, 32, 10, True)[1], **changes)
    return plan, driver.LoadedBlock(plan, b"code", torch.device("cuda", 3))


def _seen(cuda):
    return list((ctypes.c_uint * 10).in_dll(cuda, "seen"))[:9]


@needs_compiler
@pytest.mark.parametrize(
    ("overlap", "version"), [(True, 13000), (True, 12040), (True, 12030), (False, 13000)]
)
def test_says_how_large_where_and_whether_it_may_begin_early(cuda, overlap, version):
    ctypes.c_int.in_dll(cuda, "version").value = version
    plan, block = _loaded(overlap=overlap)
    block(Args(input=1234567890123), 5)
    early = [1, 6, 1] if overlap and version >= 12040 else [0, 0, 0]
    assert _seen(cuda) == [5, 1, 32 * plan.warps, 1, plan.shared_bytes, 80, *early]
    assert ctypes.c_longlong.in_dll(cuda, "input").value == 1234567890123
    assert ctypes.c_int.in_dll(cuda, "pushed").value == 0


@needs_compiler
def test_a_thread_without_the_device_s_context_is_given_it_for_the_launch(cuda):
    ctypes.c_int.in_dll(cuda, "first_fails").value = 201
    plan, block = _loaded()
    block(Args(), 2)
    assert _seen(cuda)[:3] == [2, 1, 32 * plan.warps]
    assert [ctypes.c_int.in_dll(cuda, name).value for name in ("pushed", "launches")] == [1, 2]


@needs_compiler
def test_says_what_the_driver_said(cuda):
    _, block = _loaded()
    ctypes.c_int.in_dll(cuda, "first_fails").value = 700
    with pytest.raises(RuntimeError, match="the CUDA driver said 700, told to"):
        block(Args(), 2)


@needs_compiler
@pytest.mark.parametrize("clusters", [0, -1])
def test_a_device_without_room_for_clusters_says_so_when_they_are_loaded(cuda, clusters):
    _loaded(cluster=4)
    ctypes.c_int.in_dll(cuda, "clusters").value = clusters
    with pytest.raises(Unsupported, match="onchip: no room for clusters of 4"):
        _loaded(cluster=4)
    _loaded()
