"""Whether halting pays, how much it may cost, and thresholds that meet that.

Budget           the price of a step moves until training meets a budget
diagnose         whether halting can pay, and why heads are dead
calibrate        thresholds on held-out inputs, within a budget or at a quality
distill          a copy of a network learns to meet a budget, from the network itself
"""

from torchpact.budget.budget import Budget
from torchpact.budget.calibration import calibrate
from torchpact.budget.controller import PriceController
from torchpact.budget.diagnose import diagnose
from torchpact.budget.diagnosis import BlockDiagnosis, Diagnosis, ExitRow
from torchpact.budget.distill import distill
from torchpact.budget.executable import Gain
from torchpact.budget.head_states import HeadState
from torchpact.budget.progress import Progress
from torchpact.budget.stages import DistillConfig
from torchpact.budget.table import TableRow, ThresholdTable

__all__ = [
    "BlockDiagnosis",
    "Budget",
    "Diagnosis",
    "DistillConfig",
    "ExitRow",
    "Gain",
    "HeadState",
    "PriceController",
    "Progress",
    "TableRow",
    "ThresholdTable",
    "calibrate",
    "diagnose",
    "distill",
]
