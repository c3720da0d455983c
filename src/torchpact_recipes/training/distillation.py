"""Learning from another network, whose outputs say more than labels do."""

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchpact.core.call_args import CallArgs
from torchpact.engines import ENGINES, NetworkRunner, Unsupported
from torchpact.models import ResNet
from torchpact.specs import network_spec
from torchpact_recipes.data import as_input
from torchpact_recipes.training.compiling import compiled
from torchpact_recipes.training.evaluate import casting


def divergence(logits: Tensor, taught: Tensor, temperature: float) -> Tensor:
    """How far outputs are from a teacher's, for every example: KL(teacher ‖ student)·T², both softened by T.

    The factor leaves gradients of the size that those of labels have, whatever the temperature.

    >>> logits = torch.tensor([[2.0, 0.0, -1.0], [0.0, 0.0, 0.0]])
    >>> divergence(logits, logits, temperature=4.0)
    tensor([0., 0.])
    >>> divergence(logits, logits.flip(0), temperature=4.0).gt(0).all().item()
    True
    """
    own, given = (F.log_softmax(x.float() / temperature, dim=1) for x in (logits, taught))
    return F.kl_div(own, given, reduction="none", log_target=True).sum(1) * temperature**2


class Teacher:
    """A plain network that is asked, and does not learn; in bfloat16 on a GPU, on the chip where it fits."""

    def __init__(self, model: ResNet, device: torch.device, precision: str, compile: bool = False) -> None:
        if model.config.adaptive:
            raise ValueError("expected a plain network as teacher, got an adaptive one")
        memory = torch.channels_last if device.type == "cuda" else torch.contiguous_format
        self.model: ResNet = model.to(device, memory_format=memory).eval().requires_grad_(False)  # type: ignore[call-overload]
        self.device, self.precision, self.compile = device, precision, compile
        self.on_chip = _on_chip(self.model) if precision == "bf16" else None
        self._layers: Callable[[Tensor], Tensor] | None = None

    def __call__(self, images: Tensor) -> Tensor:
        """Return what it makes of images, cropped and flipped."""
        with torch.no_grad():
            if self.on_chip is not None:
                try:
                    return self.on_chip(as_input(images).bfloat16())[0]
                except Unsupported:  # so many images: it is known when they first come
                    self.on_chip = None
            if self._layers is None:
                self._layers = self._compiled() if self.compile else self.by_layers
            return self._layers(images)

    def by_layers(self, images: Tensor) -> Tensor:
        """Return it without the chip."""
        with casting(self.device, self.precision):
            logits: Tensor = self.model(as_input(images))[0]
        return logits

    def _compiled(self) -> Callable[[Tensor], Tensor]:
        if self.device.type == "cuda" and self.precision == "bf16":
            from torchpact_recipes.training.kernels.narrow_conv import with_narrow_convs

            self.model = with_narrow_convs(self.model)
        return compiled(self.by_layers)


def _on_chip(model: ResNet) -> NetworkRunner | None:
    """Return the same network with convolutions in bfloat16, a kernel a block; None where it does not fit."""
    half = copy.deepcopy(model)
    for module in half.modules():
        if isinstance(module, nn.Conv2d):  # norms stay as exact as they are
            module.bfloat16()
    spec = network_spec(half)
    if spec is None:
        return None
    try:
        runner: NetworkRunner = ENGINES["onchip"].build(spec, CallArgs())
    except Unsupported:
        return None
    return runner
