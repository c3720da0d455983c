"""Halting heads for networks that were made adaptive: they start by never halting."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchpact.core.criterion import PoolingHead
from torchpact.specs import ConvHead, RowHead, register_head


class TokenHead(nn.Module):
    """The halting logit of each token: w·u + b, of a normalised state if ``normalize``.

    The weight starts at zero, so that at first all tokens have the same halting probability σ(b).

    Args:
        width: The features of a token.
        bias: b at the start.
        normalize: Whether the state is normalised first, for layers that leave it to the next one.

    Example:
        >>> TokenHead(8)(torch.randn(2, 5, 8)).unique()
        tensor([-5.], grad_fn=<Unique2Backward0>)

    """

    def __init__(self, width: int, bias: float = -5.0, normalize: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, width))
        self.bias = nn.Parameter(torch.full((1,), float(bias)))
        self.normalize = normalize

    def extra_repr(self) -> str:
        """Return the settings for ``print``."""
        return f"{self.weight.size(1)}, normalize={self.normalize}"

    def forward(self, u: Tensor) -> Tensor:
        """Return the logits, (…, 1), of states (…, width)."""
        if self.normalize:
            u = F.layer_norm(u, (u.size(-1),))
        return F.linear(u, self.weight, self.bias)


class ExampleHead(TokenHead, PoolingHead):
    """The halting logit of each example: that of the mean over its tokens, padding excluded.

    Args:
        width: The features of a token.
        bias: b at the start.
        normalize: Whether tokens are normalised before the mean.
        batch_dim: The dimension of the state that is the batch.

    Example:
        >>> ExampleHead(8)(torch.randn(2, 5, 8)).shape
        torch.Size([2, 1, 1])

    """

    def __init__(self, width: int, bias: float = -5.0, normalize: bool = False, batch_dim: int = 0) -> None:
        super().__init__(width, bias, normalize)
        self.batch_dim = batch_dim

    def forward(self, u: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return one logit an example.

        Args:
            u: States of tokens, of three dimensions, or of examples, (batch, width).
            weights: How much each token counts, of a shape that broadcasts to the state; None for all alike.

        """
        length = 1 - self.batch_dim
        if self.normalize:
            u = F.layer_norm(u, (u.size(-1),))
        if u.dim() == 2:
            return F.linear(u, self.weight, self.bias)
        if weights is None:
            mean = u.mean(length, keepdim=True)
        else:
            real = (weights > 0).to(u.dtype)
            mean = (u * real).sum(length, keepdim=True) / real.sum(length, keepdim=True).clamp(min=1)
        return F.linear(mean, self.weight, self.bias)


class PixelHead(nn.Module):
    """The halting logit of each pixel of a map by a 1×1 convolution, or of each example by the mean map.

    Args:
        channels: The channels of the map.
        bias: b at the start.
        per_example: Whether there is one logit an example.

    Example:
        >>> maps = torch.randn(2, 8, 4, 4)
        >>> PixelHead(8)(maps).shape, PixelHead(8, per_example=True)(maps).shape
        (torch.Size([2, 1, 4, 4]), torch.Size([2, 1, 1, 1]))

    """

    def __init__(self, channels: int, bias: float = -5.0, per_example: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, channels, 1, 1))
        self.bias = nn.Parameter(torch.full((1,), float(bias)))
        self.per_example = per_example

    def forward(self, u: Tensor) -> Tensor:
        """Return the logits of maps (batch, channels, height, width)."""
        return F.conv2d(u.mean((2, 3), keepdim=True) if self.per_example else u, self.weight, self.bias)


@register_head(TokenHead)
def _token_head(head: TokenHead) -> RowHead:
    return RowHead(head.weight, head.bias, head.normalize, head)


@register_head(PixelHead)
def _pixel_head(head: PixelHead) -> ConvHead:
    weight, bias = head.weight.detach(), head.bias.detach()
    if head.per_example:
        return ConvHead(None, weight.flatten(1), bias, module=head)
    return ConvHead(weight, None, bias, module=head)
