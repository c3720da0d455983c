"""Pretrained networks made adaptive: heads on their layers, hooks that drive the halting loop.

The verbs        adapt, unadapt, summary
The record       AdaptConfig: what was made adaptive and how, as JSON
Families         Family, register_family: what is known of layers of some networks
"""

from torchpact.adapt.adapting import adapt, unadapt
from torchpact.adapt.config import AdaptConfig
from torchpact.adapt.families.registry import Family, register_family
from torchpact.adapt.saving import from_pretrained, save_pretrained
from torchpact.adapt.summary import Summary, summary

__all__ = [
    "AdaptConfig",
    "Family",
    "Summary",
    "adapt",
    "from_pretrained",
    "register_family",
    "save_pretrained",
    "summary",
    "unadapt",
]
