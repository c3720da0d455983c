"""The parts of a ResNet: residual units that heed a mask, and halting heads."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchpact.checks import at_least_single
from torchpact.core.ponder import Ponder
from torchpact.nn.resnet_config import Per


class ResidualUnit(nn.Module):
    """Batch norm, ReLU, 3×3 convolution, twice; what comes out is added where the gate is open (eq. 28).

    A unit of ``stride`` 2 has a shortcut without parameters: the mean over 2×2 pixels (of those there
    are, at an odd edge), with channels of zeros before and after, half of them each.

    >>> ResidualUnit(16, 32, stride=2)(torch.randn(1, 16, 8, 8)).shape
    torch.Size([1, 32, 4, 4])
    """

    gated = True

    def __init__(self, inputs: int, outputs: int, stride: int = 1, group: int = 1) -> None:
        super().__init__()
        self.norm1 = make_norm(inputs)
        self.conv1 = make_conv(inputs, outputs, stride)
        self.norm2 = make_norm(outputs)
        self.conv2 = make_conv(outputs, outputs)
        self.stride = stride
        self.padding = outputs - inputs
        self.group = group

    def forward(self, u: Tensor, gate: Tensor | None = None) -> Tensor:
        """Return u + f(u)·gate, in patches if the unit has a ``group``."""
        u = join_patches(u)
        residual = self.conv1(activated(self.norm1, u))
        residual = self.conv2(activated(self.norm2, residual))
        u = split_patches(shortcut(u, self.stride, self.padding), self.group)
        residual = split_patches(residual, self.group)
        return u + (residual if gate is None else residual * gate)


class Bottleneck(nn.Module):
    """A residual unit of three convolutions, 1×1, 3×3 and 1×1, between a quarter of its channels.

    As in ResNet-50, with batch norm and ReLU before each. The second has the stride; the shortcut has no
    parameters, as that of :class:`ResidualUnit`.

    >>> Bottleneck(64, 256, stride=2)(torch.randn(1, 64, 8, 8)).shape
    torch.Size([1, 256, 4, 4])
    """

    gated = True
    group = 1

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        if outputs % 4:
            raise ValueError(f"expected outputs in multiples of 4, got {outputs}")
        middle = outputs // 4
        self.norm1, self.norm2, self.norm3 = make_norm(inputs), make_norm(middle), make_norm(middle)
        self.conv1, self.conv3 = make_pointwise(inputs, middle), make_pointwise(middle, outputs)
        self.conv2 = make_conv(middle, middle, stride)
        self.stride, self.padding = stride, outputs - inputs

    def forward(self, u: Tensor, gate: Tensor | None = None) -> Tensor:
        """Return u + f(u)·gate."""
        residual: Tensor = self.conv1(activated(self.norm1, u))
        residual = self.conv3(activated(self.norm3, self.conv2(activated(self.norm2, residual))))
        return shortcut(u, self.stride, self.padding) + (residual if gate is None else residual * gate)


def shortcut(u: Tensor, stride: int, padding: int) -> Tensor:
    """Return the mean over stride×stride pixels, with so many channels of zeros, half of them before."""
    if stride > 1:
        u = F.avg_pool2d(u, stride, ceil_mode=True)
    before = padding // 2
    return F.pad(u, (0, 0, 0, 0, before, padding - before)) if padding else u


class HaltingHead(nn.Module):
    """The logits W̃∗u + W·pool(u) + b of the halting map, with a 3×3 convolution W̃ (section 4.1).

    With ``per="image"`` the convolution is left out, which leaves one logit an image. With ``norm``
    batch norm and ReLU come before W̃, and others before W, as in the code of SACT. With a ``group``
    the logits are averaged within patches.

    >>> HaltingHead(16)(torch.zeros(1, 16, 8, 8)).shape
    torch.Size([1, 1, 8, 8])
    """

    def __init__(
        self, channels: int, per: Per = "pixel", group: int = 1, norm: bool = False, bias: float = -3.0
    ) -> None:
        super().__init__()
        local = per == "pixel"
        self.norm = make_norm(channels) if norm and local else None
        self.conv = make_conv(channels, 1) if local else None
        self.pooled_norm = make_norm(channels) if norm else None
        self.linear = make_linear(channels, 1, bias)
        self.group = group

    def forward(self, u: Tensor) -> Tensor:
        """Return logits that broadcast to ``u``."""
        u = join_patches(u)
        if self.conv is not None and self.norm is None and _by_products():
            # pooling is linear: its product rides along with those of the convolution
            products = _project(u, stacked_rows(self.conv, self.linear))
            logits = _gather_taps(products[:, :9]) + products[:, 9:].mean((2, 3), keepdim=True)
            logits = logits + at_least_single(self.linear.bias)
        else:
            pooled = _mean(u)
            if self.pooled_norm is not None:
                pooled = F.relu(self.pooled_norm(pooled))
            logits = at_least_single(self.linear(pooled.flatten(1)))[:, :, None, None]
            if self.conv is not None:
                local = u if self.norm is None else activated(self.norm, u)
                logits = _convolve(local, self.conv) + logits
        return average_patches(logits, self.group)


def _mean(u: Tensor) -> Tensor:
    """Return the mean over all positions, as a map of one position.

    On a GPU rows come first: to add up all positions of a map with channels last at once, it took four times
    the memory of the map.
    """
    if u.is_cuda and not _by_products():
        wide = torch.promote_types(u.dtype, torch.float32)
        return u.mean(3, keepdim=True, dtype=wide).mean(2, keepdim=True).to(u.dtype)
    return u.mean((2, 3), keepdim=True)


# A 3×3 convolution to a single channel leaves a GPU's matrix units idle: cuDNN's takes half as long as a
# whole unit's. One product with all nine taps, added up where they belong, made a relaxed training step of
# ResNet-32 1.29 times the plain one instead of 1.68 times. That is where the compiler makes one kernel of the
# additions: one by one, without gradients, they take longer than the convolution.


def _by_products() -> bool:
    return torch.is_grad_enabled() or torch.compiler.is_compiling()


def _convolve(u: Tensor, conv: nn.Conv2d) -> Tensor:
    """Convolve to a single channel; in single precision."""
    if _by_products():
        return _gather_taps(_project(u, _taps(conv)))
    return at_least_single(conv(u))


def _taps(conv: nn.Conv2d) -> Tensor:
    """The kernel of a convolution to a single channel, a row a tap: on a GPU it lies in memory like this."""
    return conv.weight.permute(0, 2, 3, 1).flatten(0, 2)


def stacked_rows(conv: nn.Conv2d, linear: nn.Linear) -> Tensor:
    """The nine taps of the convolution and the weights of the mean, a row each."""
    return torch.cat([_taps(conv), linear.weight])


def _project(u: Tensor, weight: Tensor) -> Tensor:
    """Multiply an (n, channels) matrix by the channels of ``u`` at every position; in single precision."""
    if u.is_contiguous(memory_format=torch.channels_last) and not u.is_contiguous():
        # rows of zeros, to the eight that half precision on a GPU is fast in multiples of
        rows = weight.size(0)
        wide = F.pad(weight, (0, 0, 0, -rows % 8))
        product = F.linear(u.permute(0, 2, 3, 1), wide)[..., :rows].permute(0, 3, 1, 2)
    else:
        product = (weight @ u.flatten(2)).unflatten(2, u.shape[2:])
    return at_least_single(product)


def _gather_taps(products: Tensor) -> Tensor:
    """Add the nine products of each pixel's 3×3 neighbours, row by row, as the convolution would."""
    height, width = products.shape[2:]
    padded = F.pad(products, (1, 1, 1, 1))
    taps = [(i, j) for i in range(3) for j in range(3)]
    shifted = [padded[:, t : t + 1, i : i + height, j : j + width] for t, (i, j) in enumerate(taps)]
    return torch.stack(shifted).sum(0)


# Decisions are made per patch by way of views. A state (B, C, H, W) seen as (B, C, H/n, n, W/n, n) has
# patches as positions: logits of (B, 1, H/n, 1, W/n, 1) broadcast to it, which is all a block asks.


def split_patches(x: Tensor, group: int) -> Tensor:
    """View maps as patches of group×group pixels."""
    if group == 1:
        return x
    rows, columns = x.size(2) // group, x.size(3) // group
    patches: Tensor = x.unflatten(3, (columns, group)).unflatten(2, (rows, group))
    return patches


def average_patches(logits: Tensor, group: int) -> Tensor:
    """Average within patches, which have one logit then."""
    return logits if group == 1 else split_patches(logits, group).mean((3, 5), keepdim=True)


def join_patches(x: Tensor) -> Tensor:
    """View patches as maps again; maps stay as they are."""
    return x.flatten(4).flatten(2, 3) if x.dim() == 6 else x


class FusibleNorm(nn.BatchNorm2d):
    """The base of batch norms that compute their ReLU in the same kernel."""

    def activated(self, x: Tensor) -> Tensor:
        """Normalise and rectify."""
        return F.relu(self(x))


def activated(norm: nn.BatchNorm2d, u: Tensor) -> Tensor:
    """Normalise and rectify, in one kernel where the norm has one."""
    return norm.activated(u) if isinstance(norm, FusibleNorm) else F.relu(norm(u))


def make_norm(channels: int) -> nn.BatchNorm2d:
    """Batch norm with the settings of SACT."""
    return nn.BatchNorm2d(channels, eps=1e-3, momentum=0.1)


def make_conv(inputs: int, outputs: int, stride: int = 1) -> nn.Conv2d:
    """A 3×3 convolution without bias, drawn by He's variance scaling."""
    conv = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
    nn.init.kaiming_normal_(conv.weight, nonlinearity="relu")
    return conv


def make_pointwise(inputs: int, outputs: int) -> nn.Conv2d:
    """A 1×1 convolution without bias, drawn by He's variance scaling."""
    conv = nn.Conv2d(inputs, outputs, 1, bias=False)
    nn.init.kaiming_normal_(conv.weight, nonlinearity="relu")
    return conv


def make_linear(inputs: int, outputs: int, bias: float = 0.0) -> nn.Linear:
    """A linear layer, drawn by He's variance scaling, with a bias to start from."""
    linear = nn.Linear(inputs, outputs)
    nn.init.kaiming_normal_(linear.weight, nonlinearity="relu")
    nn.init.constant_(linear.bias, bias)
    return linear


def join_ponder(ponder: Ponder) -> Ponder:
    """Take the in-patch dimensions, which are of size 1, out of the positions of a ponder of patches."""
    return ponder.map(lambda x: x.squeeze(-1).squeeze(-2)) if ponder.steps.dim() == 6 else ponder


def split_ponder(ponder: Ponder, group: int) -> Ponder:
    """Put the in-patch dimensions, of size 1, into the positions of a ponder of patches."""
    return ponder if group == 1 else ponder.map(lambda x: x.unsqueeze(-1).unsqueeze(-3))
