"""Weights of a block as the kernels of the GPU engine want them."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from torchpact.engines.conv.support import as_matrix
from torchpact.specs import ConvHead, ConvUnit


class Unit:
    """The weights of a unit as the kernels want them."""

    def __init__(self, unit: ConvUnit) -> None:
        self.scale, self.shift = (x.flatten().float().contiguous() for x in (unit.scale, unit.shift))
        self.convolutions = [
            (as_matrix(weight), None if bias is None else bias.float(), weight.size(2) * weight.size(3))
            for weight, bias in unit.convolutions
        ]
        self.strides = [*unit.strides[:-1], unit.stride]  # the last has none, but the shortcut has


class Head(NamedTuple):
    """The weights of a halting head, arranged for the kernels."""

    columns: Tensor
    """(channels, a power of two): nine taps, then what it and each head after it has for the mean."""
    bias: Tensor


def pack_heads(heads: Sequence[ConvHead]) -> list[Head]:
    """Return them for the heads of a block."""
    pools, made = [head.mean_weight.T for head in heads], []
    width = max(16, 1 << (8 + len(heads)).bit_length())  # alike for all, or kernels would be compiled anew
    for index, head in enumerate(heads):
        kernel = head.kernel
        assert kernel is not None
        columns = torch.cat([kernel[0].flatten(1), *pools[index:]], 1)
        bias = head.bias.float().flatten().clone()
        made.append(Head(F.pad(columns, (0, width - columns.size(1))).contiguous(), bias))
    return made
