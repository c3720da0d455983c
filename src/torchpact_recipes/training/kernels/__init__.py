"""Kernels of our own in place of cuDNN's and the compiler's, for compiled training on a GPU."""

from torch import nn

from torchpact_recipes.training.kernels.fused_bn_relu import with_one_kernel_norms
from torchpact_recipes.training.kernels.fused_head import with_one_kernel_heads
from torchpact_recipes.training.kernels.narrow_conv import with_narrow_convs


def with_own_kernels(model: nn.Module) -> None:
    """Let the model use them where they are faster; names, parameters and saved state stay as they are."""
    with_narrow_convs(model)
    with_one_kernel_norms(model)
    with_one_kernel_heads(model)
