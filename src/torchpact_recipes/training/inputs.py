"""How images enter a network, in training and in evaluation alike."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from torchpact_recipes.data import standardize


def as_input(images: Tensor) -> Tensor:
    """Standardise raw images, and lay them out as a GPU likes them."""
    x = standardize(images)
    return x.contiguous(memory_format=torch.channels_last) if x.is_cuda else x


def casting(device: torch.device, precision: str) -> AbstractContextManager[Any]:
    """Return the context in which to run a network at a precision."""
    return torch.autocast(device.type, dtype=torch.bfloat16) if precision == "bf16" else nullcontext()
