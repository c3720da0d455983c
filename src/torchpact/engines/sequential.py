"""A network for images as a sequence of block runners, without the modules around them."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from torchpact.core.ponder import Ponder, is_unknown, unknown, without_details
from torchpact.engines.base import NO_CONTEXT, NetworkRunner, Runner, Unsupported
from torchpact.engines.threads import calm
from torchpact.nn.conv_units import join_patches, join_ponder
from torchpact.specs import NetworkSpec
from torchpact.specs.blocks import Bounds


class BlockByBlock(NetworkRunner):
    """A network run by one engine for each block; of blocks without ``details`` only decisions are kept.

    Args:
        spec: What the network is.
        runners: One for each block.

    """

    def __init__(self, spec: NetworkSpec, runners: Sequence[Runner]) -> None:
        self.blocks, self.runners = spec.blocks, list(runners)
        self._stem_weight = spec.stem.weight.detach().to(memory_format=torch.channels_last, copy=True)
        dtype = spec.stem.weight.dtype
        self._norm = [x[:, None, None].to(dtype) for x in (spec.norm.scale, spec.norm.shift)]
        self._classifier = [x.detach().clone() for x in (spec.classifier.weight, spec.classifier.bias)]
        self.host_sync = any(run.host_sync for run in self.runners)

    @calm
    def __call__(
        self, images: Tensor, bounds: Mapping[str, Bounds] | None = None
    ) -> tuple[Tensor, list[Ponder]]:
        """Return the logits of the classes, and what each adaptive block did."""
        u = self.stem(images)
        ponders, nan = [], None
        for run, block in zip(self.runners, self.blocks, strict=True):
            own = block.bounds if bounds is None else bounds.get(block.name)
            state, ponder = run(u, NO_CONTEXT, own)
            assert isinstance(state, Tensor)
            u = join_patches(state)
            if ponder is None:
                continue
            ponder = join_ponder(ponder)
            if not block.keeps_details and not is_unknown(ponder.probs):
                nan = unknown(images.device) if nan is None else nan
                ponder = without_details(ponder, nan)
            ponders.append(ponder._replace(name=block.label, price=block.price))
        scale, shift = self._norm
        pooled = torch.addcmul(shift, u, scale).relu_().mean((2, 3))
        return F.linear(pooled, *self._classifier), ponders

    def stem(self, images: Tensor) -> Tensor:
        """Return what the first block is given."""
        return F.conv2d(images.contiguous(memory_format=torch.channels_last), self._stem_weight, padding=1)


class Whole(NetworkRunner):
    """A network run by one engine, and by another way where that cannot run images of a size.

    Args:
        network: What runs it.
        otherwise: What runs the other sizes.

    """

    def __init__(self, network: NetworkRunner, otherwise: NetworkRunner) -> None:
        self.network, self.otherwise = network, otherwise
        self.skip_cuda_graph = network.skip_cuda_graph
        self.host_sync = network.host_sync or otherwise.host_sync

    def __call__(
        self, images: Tensor, bounds: Mapping[str, Bounds] | None = None
    ) -> tuple[Tensor, list[Ponder]]:
        """Return the logits of the classes, and what each adaptive block did."""
        try:
            return self.network(images, bounds)
        except Unsupported:
            return self.otherwise(images, bounds)
