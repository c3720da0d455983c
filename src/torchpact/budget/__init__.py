"""Whether halting pays, how much it may cost, and thresholds that meet that.

Budget           the price of a step moves until training meets a budget
diagnose         whether halting can pay, and why heads are dead
calibrate        thresholds on held-out inputs, within a budget or at a quality
"""

from torchpact.budget.budget import Budget
from torchpact.budget.calibration import calibrate
from torchpact.budget.controller import PriceController
from torchpact.budget.diagnose import diagnose
from torchpact.budget.diagnosis import BlockDiagnosis, Diagnosis, ExitRow
from torchpact.budget.executable import Gain
from torchpact.budget.head_states import HeadState
from torchpact.budget.table import TableRow, ThresholdTable

__all__ = [
    "BlockDiagnosis",
    "Budget",
    "Diagnosis",
    "ExitRow",
    "Gain",
    "HeadState",
    "PriceController",
    "TableRow",
    "ThresholdTable",
    "calibrate",
    "diagnose",
]
