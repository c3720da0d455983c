"""Weights in the order in which the tensor cores' fragments hold them, so that a warp reads them straight."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchpact.engines.folding import as_matrix, fold_norm
from torchpact.models.units import HaltingHead, ResidualUnit

AHEAD = 6
"""Steps of 16 inputs that the kernel may read ahead, and so beyond the last."""


def fragments(matrix: Tensor) -> Tensor:
    """Return a (k, n) matrix as [k / 16][n / 16][32 lanes][8]: two m16n8k16 fragments for every lane.

    A lane's numbers are those of column lane / 4 and of rows 2 · (lane % 4) + {0, 1, 8, 9}; then the same
    eight columns further on.

    >>> fragments(torch.arange(16 * 16).view(16, 16))[0, 0, 5].tolist()
    [33, 49, 161, 177, 41, 57, 169, 185]
    """
    k, n = matrix.shape
    # k = 16 a + 8 b + 2 c + d, n = 16 e + 8 f + g: a, e, then the lane g, c, then f, b, d
    split = matrix.reshape(k // 16, 2, 4, 2, n // 16, 2, 8)
    packed: Tensor = split.permute(0, 4, 6, 2, 5, 1, 3)
    return packed.reshape(k // 16, n // 16, 32, 8).contiguous()


def pack_convolutions(units: Sequence[ResidualUnit]) -> Tensor:
    """Return the weights of both convolutions of every unit, one after the other, and what is read beyond."""
    convs = [conv for unit in units for conv in (unit.conv1, unit.conv2)]
    packed = [fragments(as_matrix(conv.weight.detach())).flatten() for conv in convs]
    return torch.cat([*packed, packed[0].new_zeros(AHEAD * 16 * len(convs[-1].weight))])


def pack_norms(units: Sequence[ResidualUnit]) -> Tensor:
    """Return [units][4 · channels]: scale and shift of the first batch norm, then those of the second."""
    channels = units[-1].conv2.weight.size(0)
    rows = []
    for unit in units:
        first = F.pad(torch.cat(fold_norm(unit.norm1)), (0, 2 * (channels - unit.norm1.num_features)))
        rows.append(torch.cat([first, *fold_norm(unit.norm2)]))
    return torch.stack(rows).float()


def pack_heads(heads: Sequence[HaltingHead]) -> Tensor:
    """Return [heads][5][3][4 lanes][channels / 4]: three rows of taps between rows of zeros.

    A lane's numbers are those of channels 16 k + 2 · lane + {0, 1, 8, 9}, for every k.
    """
    packed = []
    for head in heads:
        assert head.conv is not None
        taps = head.conv.weight.detach()[0].permute(1, 2, 0)
        lanes = taps.reshape(3, 3, -1, 2, 4, 2).permute(0, 1, 4, 2, 3, 5).reshape(3, 3, 4, -1)
        packed.append(F.pad(lanes, (0, 0, 0, 0, 0, 0, 1, 1)))
    return torch.stack(packed)


def pack_pools(heads: Sequence[HaltingHead]) -> Tensor:
    """Return [heads][channels + 4]: the weights of the mean, then the bias and three zeros."""
    rows = [[head.linear.weight.detach()[0], F.pad(head.linear.bias.detach(), (0, 3))] for head in heads]
    return torch.stack([torch.cat(row).float() for row in rows])


def pack_stem(stem: nn.Conv2d) -> Tensor:
    """Return the weights of the stem with four inputs, the last of them zero, and twelve taps."""
    weight = F.pad(stem.weight.detach(), (0, 0, 0, 0, 0, 1))
    return fragments(F.pad(as_matrix(weight), (0, 0, 0, 12))).flatten()


def pack_last(norm: nn.BatchNorm2d, classifier: nn.Linear) -> Tensor:
    """Return scale and shift of the last batch norm, then the classifier."""
    parts = [*fold_norm(norm), classifier.weight.detach(), classifier.bias.detach()]
    return torch.cat([part.flatten().float() for part in parts])
