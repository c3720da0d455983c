"""Weights in the order in which the tensor cores' fragments hold them, so that a warp reads them straight."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchpact.engines.conv.support import as_matrix
from torchpact.specs import Conv, ConvHead, ConvUnit, Norm

AHEAD = 6
"""Steps of 16 inputs that the kernel may read ahead, and so beyond the last."""


TAP_UNIT = 2.0**-16
"""What the kernel counts logits in."""


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


def pack_convolutions(units: Sequence[ConvUnit]) -> Tensor:
    """Return the weights of both convolutions of every unit, one after the other, and what is read beyond."""
    convs = [conv for unit in units for conv in unit.convs]
    packed = [fragments(as_matrix(conv.weight)).flatten() for conv in convs]
    return torch.cat([*packed, packed[0].new_zeros(AHEAD * 16 * len(convs[-1].weight))])


def pack_norms(units: Sequence[ConvUnit]) -> Tensor:
    """Return [units][4 · channels]: scale and shift of the first batch norm, then those of the second."""
    channels = units[-1].channels
    rows = []
    for unit in units:
        first, second = unit.norms
        before = F.pad(torch.cat([first.scale, first.shift]), (0, 2 * (channels - len(first.scale))))
        rows.append(torch.cat([before, second.scale, second.shift]))
    return torch.stack(rows).float()


def scaled_taps(head: ConvHead) -> Tensor:
    """Return the taps of a head as multiples of ``TAP_UNIT``; those of float16 as they are.

    That is exact, but infinite beyond 2^112. float16 has too few exponents: there the kernel scales the
    products. A head that decides for images has none, which is to say zeros.
    """
    taps = head.kernel
    if taps is None:
        return head.mean_weight.new_zeros(1, head.channels, 3, 3)
    return taps if taps.dtype == torch.float16 else taps / TAP_UNIT


def pack_heads(heads: Sequence[ConvHead]) -> Tensor:
    """Return [heads][2][channels / 16][32 lanes][8]: fragments of what pixels are multiplied with.

    A column has the taps, or zeros, by which a pixel adds to a neighbour's logit: columns 2 q, 2 q + 1 and
    8 + 2 q to those of row q of four, left to right. The pixel is in row 1; in the second matrix, in row 2.
    Column 9, and there 11, has the weights of the mean. Taps come as multiples of ``TAP_UNIT``, see
    :func:`scaled_taps`.
    """
    packed = []
    for head in heads:
        taps, pool = scaled_taps(head)[0].flip(1, 2), head.mean_weight[0]
        for lower in range(2):
            rows = F.pad(taps, (0, 1, lower, 1 - lower))  # (channels, q, three columns and one more)
            rows[:, lower, 3] = pool
            packed.append(fragments(rows.unflatten(2, (2, 2)).transpose(1, 2).flatten(1)).squeeze(1))
    matrices: Tensor = torch.stack(packed).unflatten(0, (-1, 2))
    return matrices


def pack_pools(heads: Sequence[ConvHead]) -> Tensor:
    """Return [heads][channels + 4]: the weights of the mean, then the bias and three zeros.

    The kernel adds up whole numbers, of which none is NaN: with taps that are not finite once they are
    scaled, the bias is.
    """
    rows = []
    for head in heads:
        known = scaled_taps(head).isfinite().all()
        bias = head.bias.where(known, torch.nan)
        rows.append(torch.cat([head.mean_weight[0], F.pad(bias, (0, 3))]).float())
    return torch.stack(rows)


def pack_stem(stem: Conv) -> Tensor:
    """Return the weights of the stem with four inputs, the last of them zero, and twelve taps."""
    weight = F.pad(stem.weight, (0, 0, 0, 0, 0, 1))
    return fragments(F.pad(as_matrix(weight), (0, 0, 0, 12))).flatten()


def pack_last(norm: Norm, classifier: nn.Linear) -> Tensor:
    """Return scale and shift of the last batch norm, then the classifier."""
    parts = [norm.scale, norm.shift, classifier.weight.detach(), classifier.bias.detach()]
    return torch.cat([part.flatten().float() for part in parts])
