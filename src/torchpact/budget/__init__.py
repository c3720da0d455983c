"""Whether halting pays, how much it may cost, and thresholds that meet that.

Budget           the price of a step moves until training meets a budget
diagnose         whether halting can pay, and why heads are dead
calibrate        thresholds on held-out inputs, within a budget or at a quality
compare          trained heads beside confidence, patience, random exits, an oracle and fixed exits
fewer_layers     a student of the first layers, distilled by the same loop
distill          a copy of a network learns to meet a budget, from the network itself
"""

from torchpact.budget.budget import Budget
from torchpact.budget.calibration import calibrate
from torchpact.budget.compare import Compared, compare
from torchpact.budget.controller import PriceController
from torchpact.budget.diagnose import diagnose
from torchpact.budget.diagnosis import BlockDiagnosis, Diagnosis, ExitRow
from torchpact.budget.discrepancy import discrepancy
from torchpact.budget.distill import distill
from torchpact.budget.executable import Gain
from torchpact.budget.head_states import HeadState
from torchpact.budget.latency import LatencyMeter
from torchpact.budget.progress import Progress
from torchpact.budget.shallow import fewer_layers, first_layers
from torchpact.budget.stages import DistillConfig
from torchpact.budget.table import TableRow, ThresholdTable

__all__ = [
    "BlockDiagnosis",
    "Budget",
    "Compared",
    "Diagnosis",
    "DistillConfig",
    "ExitRow",
    "Gain",
    "HeadState",
    "LatencyMeter",
    "PriceController",
    "Progress",
    "TableRow",
    "ThresholdTable",
    "calibrate",
    "compare",
    "diagnose",
    "discrepancy",
    "distill",
    "fewer_layers",
    "first_layers",
]
