"""Learning from another network, whose outputs say more than labels do."""

import importlib

import torch
from torch import Tensor
from torch.nn import functional as F

from torchpact.models.resnet import ResNet
from torchpact.training.inputs import as_input, casting


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
    """A plain network that is asked, and does not learn."""

    def __init__(
        self, model: ResNet, device: torch.device, precision: str, own_kernels: bool = False
    ) -> None:
        if model.config.adaptive:
            raise ValueError("expected a plain network as teacher, got an adaptive one")
        memory = torch.channels_last if device.type == "cuda" else torch.contiguous_format
        self.model: ResNet = model.to(device, memory_format=memory).eval().requires_grad_(False)  # type: ignore[call-overload]
        if own_kernels:
            importlib.import_module("torchpact.training.narrow_conv").with_narrow_convs(self.model)
        self.device, self.precision = device, precision

    def __call__(self, images: Tensor) -> Tensor:
        """Return what it makes of images, cropped and flipped."""
        with torch.no_grad(), casting(self.device, self.precision):
            logits: Tensor = self.model(as_input(images))[0]
        return logits
