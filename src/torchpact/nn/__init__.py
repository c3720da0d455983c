"""Networks made of adaptive blocks: convolutional units, halting heads, transformer and recurrent layers.

Mathematics only: how active positions get computed is the business of :mod:`torchpact.engines`.

Looped networks      Looped, loop_loss; their updates ConvUpdate, AttentionUpdate
"""

from torchpact.nn.loop_updates import AttentionUpdate, ConvUpdate
from torchpact.nn.looped import Looped
from torchpact.nn.looped_losses import loop_loss

__all__ = ["AttentionUpdate", "ConvUpdate", "Looped", "loop_loss"]
