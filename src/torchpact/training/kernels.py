"""Kernels of our own in place of cuDNN's and the compiler's, for compiled training on a GPU."""

from torch import nn

from torchpact.training.narrow_conv import with_narrow_convs
from torchpact.training.one_kernel_head import with_one_kernel_heads
from torchpact.training.one_kernel_norm import with_one_kernel_norms


def with_own_kernels(model: nn.Module) -> None:
    """Let the model use them where they are faster; names, parameters and saved state stay as they are."""
    with_narrow_convs(model)
    with_one_kernel_norms(model)
    with_one_kernel_heads(model)
