"""Loading and launching compiled blocks by the CUDA driver, on PyTorch's current stream."""

import ctypes
from ctypes import POINTER, Structure, byref, c_char_p, c_int, c_uint, c_void_p
from functools import cache

import torch

from torchpact.engines.base import Unsupported
from torchpact.engines.conv.onchip.calls import Args
from torchpact.engines.conv.onchip.nvrtc import compile_block
from torchpact.engines.conv.onchip.plan import Plan

# of cuda.h
_SHARED_LIMIT = 97  # CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
_LOCAL_BYTES, _REGISTERS = 3, 4  # CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES, _NUM_REGS
_DYNAMIC_SHARED, _CARVEOUT = 8, 9  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, _PREFERRED_…
_OVERLAP = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
_CLUSTER = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
_OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY
_NO_CONTEXT = (201, 400)  # CUDA_ERROR_INVALID_CONTEXT, CUDA_ERROR_INVALID_HANDLE
_OVERLAP_SINCE = 12040  # the driver's version: earlier ones cannot capture such launches


class Attribute(Structure):
    """CUlaunchAttribute."""

    _fields_ = (("id", c_uint), ("pad", c_uint), ("value", c_uint * 16))


class Config(Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", c_uint * 3),
        ("block", c_uint * 3),
        ("shared_bytes", c_uint),
        ("stream", c_void_p),
        ("attributes", POINTER(Attribute)),
        ("count", c_uint),
    )


def load(plan: Plan, device: torch.device) -> "LoadedBlock":
    """Return a block compiled for a device and loaded on it."""
    major, minor = torch.cuda.get_device_capability(device)
    return LoadedBlock(plan, compile_block(plan, f"sm_{major}{minor}"), device)


def shared_limit(device: torch.device) -> int:
    """Return the bytes of shared memory that a CTA may have."""
    limit = c_int()
    _check(driver().cuDeviceGetAttribute(byref(limit), _SHARED_LIMIT, _index(device)))
    return limit.value


def clusters_at_once(function: c_void_p, ctas: int, threads: int, shared_bytes: int) -> int:
    """Return how many clusters of so many CTAs a kernel can run at a time."""
    attribute = Attribute(id=_CLUSTER, value=(ctas, 1, 1))
    config = Config(
        grid=(ctas, 1, 1),
        block=(threads, 1, 1),
        shared_bytes=shared_bytes,
        attributes=ctypes.pointer(attribute),
        count=1,
    )
    found = c_int()
    _check(driver().cuOccupancyMaxActiveClusters(byref(found), function, byref(config)))
    return found.value


class LoadedBlock:
    """A block on a device; call it with its argument and the number of CTAs."""

    def __init__(self, plan: Plan, code: bytes, device: torch.device) -> None:
        self.plan, self.index, self.threads = plan, _index(device), 32 * plan.warps
        self.config = self._config()
        self.context, self.module, self.function = c_void_p(), c_void_p(), c_void_p()
        cuda = driver()
        _check(cuda.cuDevicePrimaryCtxRetain(byref(self.context), self.index))
        _check(cuda.cuCtxSetCurrent(self.context))
        _check(cuda.cuModuleLoadData(byref(self.module), code))
        _check(cuda.cuModuleGetFunction(byref(self.function), self.module, b"onchip_block"))
        _check(cuda.cuFuncSetAttribute(self.function, _DYNAMIC_SHARED, plan.shared_bytes))
        self.leave_to_shared(
            -(-100 * plan.ctas * (plan.shared_bytes + 1024) // (shared_limit(device) + 1024))
        )
        if plan.cluster > 1 and not self._has_room():
            raise Unsupported(f"onchip: no room for clusters of {plan.cluster}")

    def leave_to_shared(self, percent: int) -> None:
        """Say how much of a multiprocessor's memory is to be shared memory; the rest caches weights."""
        _check(driver().cuFuncSetAttribute(self.function, _CARVEOUT, min(percent, 100)))

    def __call__(self, args: Args, ctas: int) -> None:
        """Launch the block on the current stream of its device."""
        config = Config.from_buffer_copy(self.config)
        config.grid[0] = ctas
        config.stream = torch._C._cuda_getCurrentRawStream(self.index)
        what = byref(config), self.function, byref(c_void_p(ctypes.addressof(args))), None
        launch = driver().cuLaunchKernelEx
        status = launch(*what)
        if status in _NO_CONTEXT:  # the thread has used another device, or none; and it goes on with that one
            cuda = driver()
            _check(cuda.cuCtxPushCurrent_v2(self.context))
            status = launch(*what)
            _check(cuda.cuCtxPopCurrent_v2(byref(c_void_p())))
        if status:
            _check(status)

    def _config(self) -> Config:
        """Return what all launches have in common.

        A block that follows another begins while that one ends, and waits where it reads what that one wrote.
        """
        version = c_int()
        _check(driver().cuDriverGetVersion(byref(version)))
        config = Config(grid=(1, 1, 1), block=(self.threads, 1, 1), shared_bytes=self.plan.shared_bytes)
        if self.plan.overlap and version.value >= _OVERLAP_SINCE:
            self.attribute = Attribute(id=_OVERLAP, value=(1,))
            config.attributes, config.count = ctypes.pointer(self.attribute), 1
        return config

    def _has_room(self) -> bool:
        plan = self.plan
        try:
            return clusters_at_once(self.function, plan.cluster, self.threads, plan.shared_bytes) > 0
        except RuntimeError:
            return False

    def describe(self) -> dict[str, int]:
        """Return what the block takes of a multiprocessor."""
        found = {}
        for name, attribute in (("registers", _REGISTERS), ("local_bytes", _LOCAL_BYTES)):
            value = c_int()
            _check(driver().cuFuncGetAttribute(byref(value), attribute, self.function))
            found[name] = value.value
        value = c_int()
        occupancy = driver().cuOccupancyMaxActiveBlocksPerMultiprocessor
        _check(occupancy(byref(value), self.function, 32 * self.plan.warps, self.plan.shared_bytes))
        return found | {"ctas": value.value, "shared_bytes": self.plan.shared_bytes}


@cache
def driver() -> ctypes.CDLL:
    """Return the CUDA driver."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise Unsupported(f"onchip: expected the CUDA driver, found none ({error})") from error
    cuda.cuModuleLoadData.argtypes = [c_void_p, c_char_p]
    cuda.cuModuleGetFunction.argtypes = [c_void_p, c_void_p, c_char_p]
    cuda.cuFuncSetAttribute.argtypes = [c_void_p, c_int, c_int]
    cuda.cuFuncGetAttribute.argtypes = [c_void_p, c_int, c_void_p]
    cuda.cuCtxSetCurrent.argtypes = [c_void_p]
    cuda.cuCtxPushCurrent_v2.argtypes = [c_void_p]
    cuda.cuCtxPopCurrent_v2.argtypes = [c_void_p]
    cuda.cuOccupancyMaxActiveBlocksPerMultiprocessor.argtypes = [c_void_p, c_void_p, c_int, ctypes.c_size_t]
    cuda.cuLaunchKernel.argtypes = [c_void_p, *[c_uint] * 7, c_void_p, c_void_p, c_void_p]
    cuda.cuLaunchKernelEx.argtypes = [c_void_p] * 4
    cuda.cuOccupancyMaxActiveClusters.argtypes = [c_void_p] * 3
    _check(cuda.cuInit(0), cuda)
    return cuda


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def _check(status: int, cuda: ctypes.CDLL | None = None) -> None:
    if status:
        text = c_char_p()
        (cuda or driver()).cuGetErrorString(status, byref(text))
        message = (text.value or b"unknown").decode()
        kind = torch.OutOfMemoryError if status == _OUT_OF_MEMORY else RuntimeError
        raise kind(f"the CUDA driver said {status}, {message}")
