"""What a run costs, in floating-point operations."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torchpact.core.call_args import call_args, first_tensor
from torchpact.core.callables import uncompiled
from torchpact.core.frozen import FrozenModule
from torchpact.core.halting_module import check_module
from torchpact.core.ponder import Ponder
from torchpact.flops.blocks import block_costs
from torchpact.flops.conv import conv_block_flops
from torchpact.specs import NetworkSpec, network_spec


@dataclass(frozen=True, repr=False)
class FlopCount:
    """The FLOPs of a batch, image by image, or example by example.

    >>> count = FlopCount(blocks=torch.tensor([[5, 2], [3, 2]]), rest=1)
    >>> count.total, count.mean.item(), count.std.item()
    (tensor([8, 6]), 7.0, 1.0)
    >>> count
    FlopCount(mean=7, std=1, mean of blocks=[4, 2], rest=1, examples=2)
    >>> FlopCount(blocks=torch.tensor([[5], [3]]), rest=1, plain=8.0)
    FlopCount(mean=5, share=0.625, std=1, mean of blocks=[4], rest=1, examples=2)
    """

    blocks: Tensor
    """Those of each block: integers of shape (batch, number of blocks)."""
    rest: int
    """Those of all else, the same for every image."""
    plain: float = math.nan
    """Those of an example in the mean, all else included, if every step runs and nothing is decided."""

    def __repr__(self) -> str:
        blocks = ", ".join(f"{mean:,.0f}" for mean in self.blocks.double().mean(0).tolist())
        share = "" if math.isnan(self.plain) else f"share={float(self.share):.3f}, "
        return (
            f"FlopCount(mean={float(self.mean):,.0f}, {share}std={float(self.std):,.0f}, "
            f"mean of blocks=[{blocks}], rest={self.rest:,}, examples={len(self.blocks)})"
        )

    @property
    def total(self) -> Tensor:
        """All FLOPs of each image: integers of shape (batch,)."""
        return self.blocks.sum(1) + self.rest

    @property
    def mean(self) -> Tensor:
        """The mean of the total over images."""
        return self.total.double().mean()

    @property
    def share(self) -> Tensor:
        """The mean as a share of what the network takes without decisions, as in budgets."""
        return self.mean / self.plain

    @property
    def std(self) -> Tensor:
        """The standard deviation of the total over images, these being all there are."""
        return self.total.double().std(correction=0)


def count_flops(model: nn.Module, inputs: Any, *, kwargs: Mapping[str, Any] | None = None) -> FlopCount:
    """Count the FLOPs of ``model`` on each example; a multiply-add is two, and only they are counted.

    The model is run in its present halting mode, see :class:`use_mode`, as in evaluation and without
    gradients; batch norm statistics stay as they are. While it counts, no other thread may call the model.

    A block of convolutional units is charged as :func:`flops_from_ponders` says, a transformer layer for the
    queries, output projection and MLP of active tokens and the keys and values of all. Other steps and heads
    are metered where nothing halts, and charged for the share of an example's positions that ran them. Of
    recurrent layers every time step is charged for its iterations. Positions of weight 0, such as padding,
    cost nothing (pixels of weight 0 in an image that counts cost what the first unit does). Everything else
    is the same for all examples.

    Args:
        model: Any network.
        inputs: What it is called with: a mapping by name, a tuple by position, or the only argument; the
            first dimension of the first tensor is the batch.
        kwargs: Keyword arguments besides.

    Returns:
        The FLOPs of each example: of each adaptive block, and of the rest.

    Raises:
        TypeError: The model is a deployed one, or no module.
        ValueError: A block does not decide for the examples of the batch.

    Example:
        >>> from torchpact.models import resnet32
        >>> count_flops(resnet32(), torch.randn(2, 3, 32, 32)).total
        tensor([137725184, 137725184])
        >>> count_flops(nn.Conv2d(3, 16, 3, padding=1), torch.randn(2, 3, 32, 32)).rest
        884736
        >>> step, head = nn.Linear(8, 8), lambda u: u[:, :1]
        >>> block = tp.AdaptiveBlock(step, head, max_steps=4, mode="thresholded")
        >>> _ = nn.init.eye_(step.weight), nn.init.ones_(step.bias)  # it counts
        >>> count_flops(block, torch.tensor([[-2.5], [-0.5]]).expand(2, 8)).total // (2 * 8 * 8)
        tensor([3, 1])

    """
    check_module(model)
    net = uncompiled(model)
    given = call_args(inputs, kwargs)
    first = first_tensor(given)
    for module in net.modules():
        if isinstance(module, FrozenModule):
            raise TypeError(
                f"expected the model itself, got a {type(module).__name__}: count before it is deployed"
            )
    with evaluating(net):
        costs, rest = block_costs(net, given)
    plain = rest + sum(each.plain for each in costs.values())
    if costs:
        return FlopCount(torch.stack([each.flops for each in costs.values()], 1), rest, plain)
    return FlopCount(torch.zeros(len(first), 0, dtype=torch.long, device=first.device), rest, plain)


def flops_from_ponders(model: nn.Module, ponders: Sequence[Ponder], image_shape: Sequence[int]) -> FlopCount:
    """Count the FLOPs of a ResNet from the ponders of a run on images of shape (batch, 3, height, width).

    The first unit of a block is charged in full. Unit l > 1 is charged where it ran: its second
    convolution at the active positions, its first at those and their eight neighbours, which the
    second needs. The halting head after unit l < L is charged where unit l ran, so after the first
    unit everywhere: its convolution at these positions, its linear layer for an image that has any.
    The last unit has no head. Relaxed masks count where they are above zero; a position of a grouped
    network is all pixels of its patch, and that of a network per image the whole map.

    Args:
        model: A ResNet of :mod:`torchpact.models`, or a network of another class that has a provider.
        ponders: Those of its adaptive blocks; none of a plain network.
        image_shape: (batch, 3, height, width).

    Returns:
        The FLOPs of each image.

    Raises:
        TypeError: There is no provider for networks of this class.
        ValueError: There are too many or too few ponders, or they are of another batch.

    Example:
        >>> from torchpact.models import psact_resnet32
        >>> model = psact_resnet32(mode="thresholded", halting_bias=50)
        >>> images = torch.zeros(1, 3, 32, 32)
        >>> logits, ponders = model(images)
        >>> count = flops_from_ponders(model, ponders, images.shape)
        >>> count.blocks, count.rest
        (tensor([[9732128, 7225408, 7151744]]), 886016)

    """
    net = _network(model)
    if len(image_shape) != 4:
        raise ValueError(f"expected a shape of (batch, 3, height, width), got {tuple(image_shape)}")
    batch, _, height, width = image_shape
    expected = sum(bool(block.heads) for block in net.blocks)
    if len(ponders) != expected:
        raise ValueError(f"expected {expected} ponders for {expected} adaptive blocks, got {len(ponders)}")
    given = iter(ponders)
    steps = [next(given).steps if block.heads else _all_steps(net, batch, net.device) for block in net.blocks]
    for each in steps:
        if len(each) != batch:
            raise ValueError(f"expected ponders of {batch} images, got {len(each)}")
    return _count(net, steps, height, width)


def max_flops(model: nn.Module, image_shape: Sequence[int] | None = None) -> int:
    """Return the FLOPs of a ResNet on one image when nothing halts, halting heads included.

    Args:
        model: As in :func:`flops_from_ponders`.
        image_shape: Ends with the height and the width; by default images have the configured size.

    Example:
        >>> from torchpact.models import psact_resnet32, resnet32
        >>> max_flops(resnet32()), max_flops(psact_resnet32())
        (137725184, 139790464)

    """
    net = _network(model)
    height, width = (net.image_size, net.image_size) if image_shape is None else image_shape[-2:]
    return int(_count(net, [_all_steps(net, 1, torch.device("cpu"))] * len(net.blocks), height, width).total)


def _count(net: NetworkSpec, steps: Sequence[Tensor], height: int, width: int) -> FlopCount:
    blocks, rest = [], net.stem.price * height * width + 2 * net.classifier.weight.numel()
    for block, each in zip(net.blocks, steps, strict=True):
        assert block.conv_units is not None
        stride = block.conv_units[0].stride
        height, width = -(-height // stride), -(-width // stride)
        blocks.append(conv_block_flops(block, each, height, width))
    return FlopCount(torch.stack(blocks, 1), rest)


def _all_steps(net: NetworkSpec, batch: int, device: torch.device) -> Tensor:
    return torch.full((batch, 1, 1, 1), net.blocks[0].max_steps, device=device)


def _network(model: nn.Module) -> NetworkSpec:
    net = uncompiled(model)
    spec = network_spec(net)
    if spec is None:
        raise TypeError(f"expected a torchpact ResNet, got {type(net).__name__}")
    return spec


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluate without gradients, then put the modules back into training where they were.

    Args:
        model: The network.

    """
    before = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in before:
            module.training = training
