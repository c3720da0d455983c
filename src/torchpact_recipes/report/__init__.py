"""One page about one or more runs, with all it needs inside: ``torchpact report``.

Read runs       read_run, RunReport
Look inside     gallery: images, active positions and halting probabilities of a network
Write it        write_page
"""

from torchpact_recipes.report.gallery import gallery
from torchpact_recipes.report.page import write_page
from torchpact_recipes.report.runs import RunReport, read_run
from torchpact_recipes.report.timing import measure

__all__ = ["RunReport", "gallery", "measure", "read_run", "write_page"]
