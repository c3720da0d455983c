"""Networks on the Hugging Face hub: ``save_pretrained``, ``from_pretrained``, ``push_to_hub``.

Needs the package huggingface_hub (``pip install torchpact[hub]``), whose mixin does the work; the weights are
a safetensors file, and no other; the configuration is config.json beside it.
"""

from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

try:
    from huggingface_hub import PyTorchModelHubMixin
except ImportError:
    raise ImportError(
        "expected the package huggingface_hub to be installed (pip install torchpact[hub])"
    ) from None

from torchpact.models.config import ResNetConfig
from torchpact.models.resnet import ResNet
from torchpact.modes import MODES, Mode


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

    def __init__(
        self, mode: str | None = None, mode_settings: dict[str, float] | None = None, **settings: Any
    ) -> None:
        if mode is not None and mode not in MODES:
            raise ValueError(f"expected a mode among {', '.join(MODES)}; got {mode!r}")
        made = None if mode is None else MODES[mode](**(mode_settings or {}))
        super().__init__(ResNetConfig(**settings), made)

    @classmethod
    def of(cls, model: ResNet) -> "HubResNet":
        """Return a network with the weights of ``model``, in the same mode; generators stay behind."""
        made = cls(**_settings(model))
        made.load_state_dict(model.state_dict())
        return made.train(model.training)

    def save_pretrained(
        self, save_directory: str | Path, *, config: Any = None, **options: Any
    ) -> str | None:
        """As the mixin does, in the mode the network is in now rather than the one it was made in."""
        config = _settings(self) if config is None else config
        saved: str | None = super().save_pretrained(save_directory, config=config, **options)
        return saved

    @classmethod
    def _load_as_pickle(cls, model: Any, model_file: str, map_location: str, strict: bool) -> Any:
        raise ValueError(f"expected weights as model.safetensors, got {Path(model_file).name} alone")


def _settings(model: ResNet) -> dict[str, Any]:
    """What the network is made from, as JSON holds it."""
    modes: list[Mode | None] = [getattr(block, "mode", None) for block in model.blocks]
    if any(mode != modes[0] for mode in modes):
        raise ValueError(f"expected all blocks to be in one mode, got {', '.join(map(str, modes))}")
    return asdict(model.config) | _mode_settings(modes[0])


def _mode_settings(mode: Mode | None) -> dict[str, Any]:
    if mode is None:
        return {"mode": None, "mode_settings": None}
    name = next((name for name, kind in MODES.items() if type(mode) is kind), None)
    if name is None:
        raise ValueError(f"expected a mode among {', '.join(MODES)}; got {mode}")
    kept = [f.name for f in fields(mode) if f.compare]  # type: ignore[arg-type]
    return {"mode": name, "mode_settings": {key: getattr(mode, key) for key in kept}}
