"""Networks on the Hugging Face hub: ``save_pretrained``, ``from_pretrained``, ``push_to_hub``.

Needs the package huggingface_hub (``pip install torchpact[hub]``), whose mixin does the work; the weights are
a safetensors file, and the configuration is config.json beside it.
"""

from dataclasses import asdict
from typing import Any

try:
    from huggingface_hub import PyTorchModelHubMixin
except ImportError:
    raise ImportError(
        "expected the package huggingface_hub to be installed (pip install torchpact[hub])"
    ) from None

from torchpact.models.config import ResNetConfig
from torchpact.models.resnet import ResNet
from torchpact.modes import MODES


class HubResNet(
    ResNet,
    PyTorchModelHubMixin,
    library_name="torchpact",
    license="apache-2.0",
    pipeline_tag="image-classification",
    tags=["adaptive-computation"],
):
    """A ResNet that can go to the hub and come back; ``settings`` are those of :class:`ResNetConfig`.

    model = HubResNet.of(tp.models.psact_resnet32("thresholded", pretrained="tau0.01"))
    model.push_to_hub("somebody/psact-resnet32")
    model = HubResNet.from_pretrained("somebody/psact-resnet32")
    """

    def __init__(self, mode: str | None = None, **settings: Any) -> None:
        super().__init__(ResNetConfig(**settings), mode)

    @classmethod
    def of(cls, model: ResNet) -> "HubResNet":
        """Return a network with the weights of ``model``, in a mode of the same name."""
        made = cls(mode=_mode_name(model), **asdict(model.config))
        made.load_state_dict(model.state_dict())
        return made.train(model.training)


def _mode_name(model: ResNet) -> str | None:
    mode = getattr(model.blocks[0], "mode", None)
    return next((name for name, kind in MODES.items() if type(mode) is kind), None)
