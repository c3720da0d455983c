"""Networks on the Hugging Face hub: ``save_pretrained``, ``from_pretrained``, ``push_to_hub``.

Needs the package huggingface_hub (from a clone: ``pip install "./src/torchpact_recipes[hub]"``), whose mixin
does the work; the weights are a safetensors file, and no other; the configuration is config.json beside it.
"""

import json
from pathlib import Path
from typing import Any

import torch

try:
    from huggingface_hub import ModelCard, PyTorchModelHubMixin
except ImportError:
    raise ImportError(
        "expected the package huggingface_hub to be installed (from a clone: "
        'pip install "./src/torchpact_recipes[hub]")'
    ) from None

from torchpact.models import ResNet
from torchpact_recipes import hub_files, zoo

_CARD = """\
---
{data}
---

{kind} ResNet-{layers} of torchpact, an implementation of *Probabilistic Adaptive Computation Time*
(M. Figurnov, A. Sobolev, D. Vetrov, 2018). What it was trained on, and how well it does, is for its
maker to say.

```python
from torchpact_recipes.hub import HubResNet

model = HubResNet.from_pretrained("this repository, or a folder")
```
"""


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
        given = {"mode": mode, "mode_settings": mode_settings} | settings
        super().__init__(*hub_files.from_settings(given))

    @classmethod
    def of(cls, model: ResNet) -> "HubResNet":
        """Return a network with the weights of ``model``, in the same mode; generators stay behind."""
        made = cls(**hub_files.to_settings(model))
        made.load_state_dict(model.state_dict())
        return made.train(model.training)

    def save_pretrained(
        self, save_directory: str | Path, *, config: Any = None, **options: Any
    ) -> str | None:
        """As the mixin does, in the mode the network is in now rather than the one it was made in."""
        config = hub_files.to_settings(self) if config is None else config
        card = Path(save_directory) / "README.md"
        # the mixin keeps a card that is there; one of the zoo would be of another network
        if card.is_file() and card.read_text(encoding="utf-8").strip() in _cards():
            card.unlink()
        saved: str | None = super().save_pretrained(save_directory, config=config, **options)
        return saved

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | Path, *, strict: bool = True, **options: Any
    ) -> "HubResNet":
        """As the mixin does, but what is missing, broken, or does not fit is told in one line."""
        place = pretrained_model_name_or_path
        if Path(place).is_dir():
            hub_files.read_config(Path(place))
        try:
            model: HubResNet = super().from_pretrained(place, strict=strict, **options)
        except (json.JSONDecodeError, UnicodeDecodeError, AttributeError, TypeError) as error:
            raise hub_files.not_settings(place, error) from error
        return model

    def generate_model_card(self, *args: Any, **options: Any) -> Any:
        """The card of the zoo for a network that is in it; of another nothing is said but what it is."""
        # training builds on models: at the top of the file this would be a circle
        from torchpact_recipes.model_card import markdown

        entry = _in_the_zoo(self)
        if entry is not None:
            return ModelCard(markdown(entry))
        data = self._hub_mixin_info.model_card_data.to_yaml()
        kind = "An adaptive" if self.config.adaptive else "A plain"
        return ModelCard(_CARD.format(data=data, kind=kind, layers=self.config.layers))

    @classmethod
    def _from_pretrained(cls, *, model_id: str, **options: Any) -> Any:
        hub_files.check_depth(model_id, options)  # a repository without config.json says nothing
        with torch.device("meta"):  # weights that do not fit are told before any memory is taken
            return super()._from_pretrained(model_id=model_id, **options)

    @classmethod
    def _load_as_safetensor(cls, model: Any, model_file: str, map_location: str, strict: bool) -> Any:
        with torch.device("cpu"):
            weights = hub_files.read_weights(model_file, str(map_location))
            if strict:
                hub_files.check_fit(model_file, model, weights)
            made = cls(**hub_files.to_settings(model))
        made.load_state_dict(weights, strict=strict)
        return made.to(map_location).eval()

    @classmethod
    def _load_as_pickle(cls, model: Any, model_file: str, map_location: str, strict: bool) -> Any:
        raise ValueError(f"expected weights as model.safetensors, got {Path(model_file).name} alone")


def _in_the_zoo(model: ResNet) -> zoo.Entry | None:
    """The entry that has these very weights."""
    ours = model.state_dict()
    for entry in zoo.entries():
        if entry.network == model.config:
            theirs = zoo.load(entry.name).state_dict()
            if all(torch.equal(ours[name].cpu(), theirs[name]) for name in ours):
                return entry
    return None


def _cards() -> set[str]:
    return {entry.path.with_suffix(".md").read_text(encoding="utf-8").strip() for entry in zoo.entries()}
