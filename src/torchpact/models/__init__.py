"""Networks of the paper's experiments, built on the adaptive block.

Residual networks    resnet32, resnet110, psact_resnet32, psact_resnet110
Of any size          ResNet, ResNetConfig, build
Their parts          ResidualUnit, HaltingHead
Training             warm_start
"""

from torchpact.models.config import ResNetConfig
from torchpact.models.resnet import (
    ResNet,
    build,
    psact_resnet32,
    psact_resnet110,
    resnet32,
    resnet110,
    warm_start,
)
from torchpact.models.units import HaltingHead, ResidualUnit

__all__ = [
    "HaltingHead",
    "ResNet",
    "ResNetConfig",
    "ResidualUnit",
    "build",
    "psact_resnet32",
    "psact_resnet110",
    "resnet32",
    "resnet110",
    "warm_start",
]
