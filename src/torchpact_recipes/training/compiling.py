"""What a compiled and captured iteration asks of torch."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from torchpact.engines.build_cache import protect_compiler_caches


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function for these very shapes; small kernels independent of each other run as one."""
    protect_compiler_caches()
    known = torch._inductor.list_options()
    options: dict[str, Any] = {name: True for name in ("combo_kernels",) if name in known}
    return torch.compile(function, fullgraph=True, dynamic=False, options=options)


def default_generator(device: torch.device) -> torch.Generator:
    """The generator that the noise of a GPU comes from where none is named."""
    torch.cuda.init()
    index = torch.cuda.current_device() if device.index is None else device.index
    generator: torch.Generator = torch.cuda.default_generators[index]
    return generator


def many_kinds() -> AbstractContextManager[Any]:
    """Let the compiler keep a version of the iteration for every kind of network trained in this process."""
    limits = {"recompile_limit": 100, "accumulated_recompile_limit": 1000}
    context: AbstractContextManager[Any] = torch._dynamo.config.patch(limits)
    return context
