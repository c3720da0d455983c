"""One small file for each family of pretrained networks: which layers they have, and what these are.

A file registers records of :class:`~torchpact.adapt.Family`; it does not import the packages of the layers.
Networks of families that are not here run too, see :mod:`torchpact.adapt.find`.
"""

from torchpact.adapt.families import decoders, encoders, resnets, speech, torch_layers, vision

__all__ = ["decoders", "encoders", "resnets", "speech", "torch_layers", "vision"]
