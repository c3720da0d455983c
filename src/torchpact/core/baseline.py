"""Baselines for REINFORCE."""

import torch
from torch import Tensor, nn

from torchpact.checks import check_number


class EMABaseline(nn.Module):
    """The moving average of past rewards, as a baseline for REINFORCE (section 6).

    Calling it returns the average of the rewards seen *before*, which keeps the gradient unbiased,
    and, in training mode, then takes in the new ones. The average starts empty and is corrected for
    that, so that it is an average from the first batch on. State is held in buffers: it saves, loads
    and moves with the module, and no value ever travels to the host.

    Args:
        decay: How much of the average a new batch leaves, in [0, 1).

    Raises:
        ValueError: ``decay`` is outside [0, 1).

    Example:
        >>> baseline = EMABaseline(decay=0.5)
        >>> [baseline(torch.tensor([reward])).item() for reward in (4.0, 4.0, 1.0, 1.0)]
        [0.0, 4.0, 4.0, 2.285714...]

    """

    total: Tensor
    weight: Tensor

    def __init__(self, decay: float = 0.99) -> None:
        super().__init__()
        self.decay = check_number("decay", decay, 0, 1, open_high=True)
        self.register_buffer("total", torch.zeros(()))
        self.register_buffer("weight", torch.zeros(()))

    def extra_repr(self) -> str:
        """Return the settings for ``print(baseline)``."""
        return f"decay={self.decay}"

    @torch.no_grad()
    def forward(self, reward: Tensor) -> Tensor:
        """Return the baseline for these rewards, then update it."""
        if self.total.device != reward.device:
            self.to(reward.device)
        value = torch.where(self.weight > 0, self.total / self.weight, torch.zeros_like(self.total))
        if self.training:
            mean = reward.mean().to(self.total.dtype)
            share = (1 - self.decay) * mean.isfinite()  # a bad or empty batch is not remembered
            self.total.lerp_(mean.nan_to_num(), share)
            self.weight.lerp_(torch.ones_like(self.weight), share)
        return value
