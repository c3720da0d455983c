"""How much memory a call holds at its peak, beyond what was there before."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def peak_memory(call: Callable[[], object], device: torch.device | str = "cpu") -> int:
    """Return the bytes that a call takes at its peak: on a GPU as its allocator counts, else in tensors.

    What it returns is part of it. On a CPU what kernels allocate for themselves is not seen.

    >>> x = torch.zeros(1000)
    >>> peak_memory(lambda: (x + 1) * 2)
    8000
    >>> peak_memory(lambda: x.add_(1).view(10, 100)[0])
    0
    """
    call()  # what is done once is no part of it
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        call()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    live = _Live()
    with live:
        result = call()
    del result
    return live.peak


class _Live(TorchDispatchMode):
    """Adds up the storages that operations make, for as long as they are referenced."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, Tensor):
                self._note(tensor, 0)  # from outside, unless it is known
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._note(tensor, tensor.untyped_storage().nbytes())
        return result

    def _note(self, tensor: Tensor, size: int) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._known:
            self._known.add(key)
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size
