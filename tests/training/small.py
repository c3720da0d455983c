"""Small runs on real images, for the tests of training."""

from typing import Any

from torch.nn import functional as F

from torchpact.models import ResNetConfig
from torchpact_recipes.data import Images, load_sample
from torchpact_recipes.training import TrainConfig, preset

METHODS = ("plain", "relaxed", "reinforce", "act", "random")


def images(split="train", count=64, size=12):
    """The first images of the bundled sample, shrunk; balanced over classes as far as they go."""
    data = load_sample(split)
    small = F.interpolate(data.images[:count].float(), size=(size, size), mode="area")
    return Images(small.round().byte(), data.labels[:count])


def config(method="relaxed", **settings) -> TrainConfig:
    network = ResNetConfig(units=2, adaptive=method != "plain", image_size=12, **settings.pop("network", {}))
    defaults: dict[str, Any] = {
        "iterations": 12,
        "batch": 8,
        "log_every": 4,
        "validate_every": 6,
        "checkpoint_every": 3,
        "tau": 0.05,
    }
    if method == "random":
        defaults["random_steps"] = (1.5, 1.3, 1.7)
    return preset("smoke", method=method, network=network, **(defaults | settings))


def burst(run):
    """Train a run until something was due: a log, a validation or a checkpoint."""
    run.learner.advance()
    while not run.after_iteration():
        run.learner.advance()
