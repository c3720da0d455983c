"""The old place of :class:`~torchpact.engines.base.Unsupported`; import it from there."""

from torchpact.engines.base import Unsupported

__all__ = ["Unsupported"]
