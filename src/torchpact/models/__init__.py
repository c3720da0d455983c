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

from torchpact.models import zoo
from torchpact.models.cells import HaltingUnit, never_halt
from torchpact.models.config import ResNetConfig
from torchpact.models.named import psact_resnet32, psact_resnet110, resnet32, resnet110
from torchpact.models.resnet import ResNet, build, warm_start
from torchpact.models.rnn import AdaptiveRNN
from torchpact.models.sequence import SequenceConfig, SequenceNet
from torchpact.models.stacked import StackedRNN
from torchpact.models.transformer import TransformerUnit
from torchpact.models.units import Bottleneck, HaltingHead, ResidualUnit

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
    "zoo",
]
