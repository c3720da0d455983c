"""Small networks with decisions that differ from position to position, and their checkpoints."""

import torch

from torchpact.models import ResNet, ResNetConfig, build
from torchpact_recipes.training import TrainConfig
from torchpact_recipes.training.checkpoint import save_checkpoint


def network(mode=None, **settings) -> ResNet:
    torch.manual_seed(0)
    return build(ResNetConfig(**({"units": 4, "halting_bias": 0.0} | settings)), mode).eval()


def images(count=2, height=32, width=32):
    return torch.randint(256, (count, 3, height, width), generator=torch.Generator().manual_seed(1)).byte()


def write_checkpoint(path, config: TrainConfig):
    torch.manual_seed(0)
    weights = build(config.network, config.training_mode()).state_dict()
    path.parent.mkdir(parents=True, exist_ok=True)
    save_checkpoint(path, {f"model.{k}": v for k, v in weights.items()}, {"config": config.to_dict()})
    return path
