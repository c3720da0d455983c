"""The dense alternatives: the same units, all of them run everywhere, without a decision."""

from collections.abc import Callable
from copy import deepcopy

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchpact.engines.conv.folded import folded_units
from torchpact.engines.graphs import Recording, repeatable
from torchpact.models import ResNet, ResNetConfig, build
from torchpact.specs import block_spec


class FoldedNet(nn.Module):
    """A plain network with its batch norms folded, for torch.compile."""

    def __init__(self, net: ResNet) -> None:
        super().__init__()
        self.stem, self.norm, self.classifier = net.stem, net.norm, net.classifier
        self.units = nn.Sequential(
            *(unit for block in net.blocks for unit in folded_units(block_spec(block)))
        )

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits."""
        u = F.relu(self.norm(self.units(self.stem(images))))
        logits: Tensor = self.classifier(u.mean((2, 3)))
        return logits


def plain_config(config: ResNetConfig) -> ResNetConfig:
    """Return what decides how fast a plain network of equal depth and width is."""
    sizes = {name: getattr(config, name) for name in ("units", "width", "classes", "image_size")}
    return ResNetConfig(adaptive=False, **sizes)


def plain_net(config: ResNetConfig) -> ResNet:
    """Return the network of equal depth and width that is not adaptive.

    >>> plain_net(ResNetConfig(units=2, width=2)).config.adaptive
    False
    """
    torch.manual_seed(0)
    return build(plain_config(config)).eval()


@torch.no_grad()
def dense_alternatives(
    plain: nn.Module, folded: nn.Module, example: Tensor, compiling: bool, called: bool = False
) -> dict[str, Callable[[], object]]:
    """Return ways to run a plain network on the example; on a GPU, each in a CUDA graph.

    Eager, channels last, with batch norms folded and, if ``compiling``, by torch.compile: on a GPU with
    max-autotune, on a CPU as it is and with frozen weights. If they are to be ``called`` as a
    deployed network is, with images that come from elsewhere, these are first copied to where the graph reads
    them; outputs stay where it leaves them, to be overwritten by the next call.

    >>> unit = tp.models.ResidualUnit(16, 16).eval()
    >>> list(dense_alternatives(unit, unit, torch.zeros(1, 16, 4, 4), compiling=False))
    ['eager', 'channels_last', 'folded']
    """
    last = example.contiguous(memory_format=torch.channels_last)
    folded = folded.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    ways: dict[str, tuple[Callable[[Tensor], object], Tensor]] = {
        "eager": (plain, example.contiguous()),
        "channels_last": (deepcopy(plain).to(memory_format=torch.channels_last), last),  # type: ignore[call-overload]
        "folded": (folded, last),
    }
    if compiling:
        torch.compiler.reset()
        if example.device.type == "cuda":
            ways["compiled"] = (torch.compile(folded, mode="max-autotune-no-cudagraphs"), last)
        else:
            ways["compiled"] = (torch.compile(folded), last)
            ways["compiled_frozen"] = (torch.compile(folded, options={"freezing": True}), last)
    made = {name: repeatable(module, x) for name, (module, x) in ways.items()}
    return {name: _fed(run, ways[name][1]) for name, run in made.items()} if called else made


def _fed(run: Callable[[], object], images: Tensor) -> Callable[[], object]:
    """Return a call with images; a graph is given them anew each time."""
    recording = getattr(run, "__self__", None)
    if not isinstance(recording, Recording):
        return run

    def call() -> object:
        recording.input.copy_(images)
        return run()

    return call
