"""A whole network on the chip, from images to logits: a kernel a block."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from torchpact.core.ponder import Ponder
from torchpact.engines.base import NetworkRunner
from torchpact.engines.conv.onchip.calls import Kernel, Weights
from torchpact.engines.conv.onchip.kernels import Kernels
from torchpact.engines.conv.onchip.pack import pack_last, pack_stem
from torchpact.engines.conv.onchip.plan import Device, Plan, candidates
from torchpact.specs import NetworkSpec
from torchpact.specs.blocks import Bounds


class OnChipNetwork(NetworkRunner):
    """A network; ``load`` makes a kernel of a plan. Threads may share it."""

    def __init__(self, spec: NetworkSpec, load: Callable[[Plan], Kernel], device: Device) -> None:
        self.kernels = _Kernels(spec, load, device)
        # Without a graph, outputs are written where the caller has them; samples are drawn by many kernels.
        self.skip_cuda_graph = not any(weights.draws for weights in self.kernels.weights)

    def tune(self, images: Tensor) -> None:
        """For images of this size, take the kernels that are the fastest with these."""
        self.kernels.choose(images)

    def __call__(
        self, images: Tensor, bounds: Mapping[str, Bounds] | None = None
    ) -> tuple[Tensor, list[Ponder]]:
        """Run the network.

        Raises:
            Unsupported: There is no kernel for images of this size.

        """
        return self.kernels.run(images, bounds)


class _Kernels(Kernels):
    """From images to logits."""

    def __init__(self, spec: NetworkSpec, load: Callable[[Plan], Kernel], device: Device) -> None:
        self.half, self.classes = spec.dtype == torch.float16, spec.classifier.out_features
        self.stem, self.last = pack_stem(spec.stem), pack_last(spec.norm, spec.classifier)
        common = {"stem": self.stem.data_ptr(), "last": self.last.data_ptr()}
        super().__init__([Weights(block, common) for block in spec.blocks], load, device)
        self.candidates(spec.image_size, spec.image_size, 1)  # which may fail

    def candidates(self, height: int, width: int, batch: int) -> list[list[Plan]]:
        """Return ways to run each block for so many images of this size, the likeliest first."""
        channels = tuple(weights.channels for weights in self.weights)
        adaptive = any(weights.adaptive for weights in self.weights)
        return candidates(channels, height, width, self.classes, self.half, adaptive, batch, self.device)
