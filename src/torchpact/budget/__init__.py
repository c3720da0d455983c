"""Whether halting pays, how much it may cost, and thresholds that meet that.

Budget           the price of a step moves until training meets a budget
calibrate        thresholds on held-out inputs, within a budget or at a quality
"""

from torchpact.budget.budget import Budget
from torchpact.budget.calibration import calibrate
from torchpact.budget.controller import PriceController
from torchpact.budget.table import TableRow, ThresholdTable

__all__ = ["Budget", "PriceController", "TableRow", "ThresholdTable", "calibrate"]
