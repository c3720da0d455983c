"""Networks of the paper's experiments, built on the adaptive block.

Residual networks    resnet32, resnet110, psact_resnet32, psact_resnet110
Pretrained           zoo: what there is; pretrained="name" of the four above
Of any size          ResNet, ResNetConfig, build
Their parts          ResidualUnit, Bottleneck, HaltingHead
Transformers         TransformerUnit: a layer that heeds a mask of tokens
Recurrent networks   AdaptiveRNN, StackedRNN; with a readout SequenceNet, SequenceConfig
Their parts          HaltingUnit, never_halt
Training             warm_start
"""

from typing import Any

from torchpact.nn.cells import HaltingUnit, never_halt
from torchpact.nn.conv_units import Bottleneck, HaltingHead, ResidualUnit
from torchpact.nn.factory import psact_resnet32, psact_resnet110, resnet32, resnet110
from torchpact.nn.resnet import ResNet, build, warm_start
from torchpact.nn.resnet_config import ResNetConfig
from torchpact.nn.rnn import AdaptiveRNN
from torchpact.nn.sequence import SequenceConfig, SequenceNet
from torchpact.nn.stacked_rnn import StackedRNN
from torchpact.nn.transformer import TransformerUnit
from torchpact.plugins import pretrained_weights

__all__ = [
    "AdaptiveRNN",
    "Bottleneck",
    "HaltingHead",
    "HaltingUnit",
    "ResNet",
    "ResNetConfig",
    "ResidualUnit",
    "SequenceConfig",
    "SequenceNet",
    "StackedRNN",
    "TransformerUnit",
    "build",
    "never_halt",
    "psact_resnet32",
    "psact_resnet110",
    "resnet32",
    "resnet110",
    "warm_start",
]


def __getattr__(name: str) -> Any:
    if name == "zoo":  # comes with another distribution
        return pretrained_weights()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
