"""What a block and a network are: their steps, heads and settings, and the module that is the reference."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torchpact.core.block import AdaptiveBlock
from torchpact.core.layer_run import LayerRun
from torchpact.core.modes import Mode, Thresholded
from torchpact.specs.heads import ConvHead, CriterionHead, HeadSpec
from torchpact.specs.steps import Conv, ConvUnit, Norm, Opaque, StepSpec

Bounds = tuple[float, ...] | None
"""What the logits of a block's heads must exceed; None is the threshold of the mode."""


@dataclass(frozen=True, eq=False)
class BlockSpec:
    """A block: the step of every iteration, the head of every decision, and the mode that decides.

    A block that is not adaptive has no heads, and runs all of its steps.
    """

    module: nn.Module
    """The block itself, in evaluation: what the dense engine runs."""
    steps: tuple[StepSpec, ...]
    """One for each iteration; a shared one stands for all of them."""
    heads: tuple[HeadSpec, ...]
    """One for each decision, L − 1; none where the block is not adaptive."""
    mode: Mode
    details: bool = True
    """Whether probabilities are kept where only decisions count."""
    shared: bool = False
    """Whether all iterations share their step."""
    name: str = ""
    """Its name in the network."""
    label: str = ""
    """The name that its ponders carry."""
    price: float = 1.0
    bounds: Bounds = None
    """What the logits of its heads must exceed unless a run says otherwise; see ``use_thresholds``."""
    batch_dim: int = 0
    """The dimension of the input that is the batch."""
    recurrent: bool = False
    """Whether it is a recurrent layer, each of whose time steps is a block."""
    hooked: bool = False
    """Whether it is a run of layers that the network calls itself, one by one, and hooks drive."""
    run: LayerRun | None = None
    """The run of layers whose hooks drive it, where ``module`` calls them and does nothing else."""

    @property
    def adaptive(self) -> bool:
        """Whether it decides, or is a block that might: of a single step, which leaves nothing to decide."""
        return bool(self.heads) or isinstance(self.module, AdaptiveBlock)

    @property
    def keeps_details(self) -> bool:
        """Whether the ponder has probabilities, which modes other than the thresholded one need."""
        return self.details or not isinstance(self.mode, Thresholded)

    @property
    def max_steps(self) -> int:
        """L."""
        return len(self.steps)

    @property
    def has_criteria(self) -> bool:
        """Whether any head is a criterion, which engines have to call with exits."""
        return any(isinstance(head, CriterionHead) for head in self.heads)

    @property
    def conv_units(self) -> tuple[ConvUnit, ...] | None:
        """The steps, if all of them are convolutional units of one kind."""
        units = tuple(step for step in self.steps if isinstance(step, ConvUnit))
        alike = len(units) == len(self.steps) and len({unit.bottleneck for unit in units}) == 1
        return units if alike else None

    @property
    def conv_heads(self) -> tuple[ConvHead, ...] | None:
        """The heads, if all of them are convolutional; () where there are none."""
        heads = tuple(head for head in self.heads if isinstance(head, ConvHead))
        return heads if len(heads) == len(self.heads) else None

    @property
    def reason(self) -> str:
        """Why engines know no more of some step or head than that it can be called; empty if they do."""
        parts: list[Any] = [*self.steps, *self.heads]
        return next((part.reason for part in parts if isinstance(part, Opaque) and part.reason), "")


@dataclass(frozen=True, eq=False)
class NetworkSpec:
    """A network for images as a sequence: a convolution, blocks, and a classifier of the pooled last map."""

    module: nn.Module
    stem: Conv
    blocks: tuple[BlockSpec, ...]
    norm: Norm
    classifier: nn.Linear
    image_size: int
    """The size of images that it was made for; others run, too."""
    check: Callable[[Tensor], None]
    """Refuses images of a wrong shape."""

    @property
    def dtype(self) -> torch.dtype:
        """The precision of its weights."""
        return self.stem.weight.dtype

    @property
    def device(self) -> torch.device:
        """Where its weights are."""
        return self.stem.weight.device

    @property
    def adaptive(self) -> bool:
        """Whether any block decides."""
        return any(block.heads for block in self.blocks)
