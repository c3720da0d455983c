"""Networks of the paper's experiments, built on the adaptive block.

Residual networks    resnet32, resnet110, psact_resnet32, psact_resnet110
Of any size          ResNet, ResNetConfig, build
Their parts          ResidualUnit, HaltingHead
Training             warm_start
"""

from torchpact.models.resnet import (
    HaltingHead,
    ResidualUnit,
    ResNet,
    ResNetConfig,
    build,
    psact_resnet32,
    psact_resnet110,
    resnet32,
    resnet110,
    warm_start,
)

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
