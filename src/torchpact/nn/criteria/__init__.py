"""Halting criteria: ready-made heads, learned or not, that one loop, one calibration and the engines share.

Of the state       Linear, MLP (learned); LatentChange
Of a read-out      Confidence, Unchanged, Divergence
Of nothing         RandomExit
Several            Combined
One's own          Criterion, the base; Exit is what it sees

All give logits; those that are not learned start at the threshold *never*, until thresholds are chosen.
"""

from torchpact.core.criterion import Criterion, Exit
from torchpact.nn.criteria.base import ReadoutCriterion, StateCriterion
from torchpact.nn.criteria.combined import Combined
from torchpact.nn.criteria.readouts import Confidence, Divergence, Unchanged
from torchpact.nn.criteria.records import from_record, record_of
from torchpact.nn.criteria.states import MLP, LatentChange, Linear, RandomExit

__all__ = [
    "MLP",
    "Combined",
    "Confidence",
    "Criterion",
    "Divergence",
    "Exit",
    "LatentChange",
    "Linear",
    "RandomExit",
    "ReadoutCriterion",
    "StateCriterion",
    "Unchanged",
    "from_record",
    "record_of",
]
