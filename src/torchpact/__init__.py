"""torchpact: networks that decide how much to compute, per input and per position.

The maths        stick_breaking, log_stick_breaking, expected_steps, act_halting, TruncatedGeometric
The modes        Relaxed, Discrete, Thresholded, ACT; Mode, Thresholds
The loop         HaltingLoop, advance, decide: for loops of your own
The block        AdaptiveBlock, Ponder, Residual, use_mode, use_thresholds
The criteria     criteria: what heads look at; use_heads, Exits, exit_thresholds
The objective    map_loss; reinforce_loss, rloo_loss, EMABaseline; exact_loss, advantage_loss, ponder_loss
The networks     models: ResNets, plain and adaptive; AdaptiveRNN; count_flops: what a run costs
Your network     adapt, unadapt, summary; collect: what its blocks did; save_pretrained, from_pretrained
Does it pay?     diagnose: before training, by exit; after, which heads are dead and why
To a budget      distill: a copy learns to meet it; Budget, calibrate, ThresholdTable: in a loop of your own
Deployment       deploy: the same outputs, halted work skipped
Looped networks  nn.Looped; stream: any number of inputs, in a batch that is kept full
Other problems   svo: stochastic variational optimization of any f(z)
"""

import torchpact.first  # noqa: F401 (before what takes long to import)

# isort: split
from torchpact import models, nn, svo
from torchpact.adapt import adapt, from_pretrained, save_pretrained, summary, unadapt
from torchpact.budget import Budget, Diagnosis, PriceController, ThresholdTable, calibrate, diagnose, distill
from torchpact.core.baseline import EMABaseline
from torchpact.core.block import AdaptiveBlock
from torchpact.core.collect import Ponders, collect
from torchpact.core.exit_objectives import advantage_loss, exact_loss
from torchpact.core.exits import Exits, exit_thresholds
from torchpact.core.halting import ACTHalting, act_halting, expected_steps, log_stick_breaking, stick_breaking
from torchpact.core.loop import HaltingLoop, advance, decide
from torchpact.core.modes import ACT, Discrete, Mode, Relaxed, Thresholded
from torchpact.core.objective import map_loss, ponder_loss, reinforce_loss, rloo_loss
from torchpact.core.overrides import use_heads, use_mode, use_thresholds
from torchpact.core.ponder import Ponder
from torchpact.core.priors import TruncatedGeometric
from torchpact.core.thresholds import Thresholds
from torchpact.engines import deploy, stream
from torchpact.flops.count import count_flops
from torchpact.models import AdaptiveRNN
from torchpact.nn import criteria
from torchpact.nn.residual import Residual

__version__ = "0.1.0"

__all__ = [
    "ACT",
    "ACTHalting",
    "AdaptiveBlock",
    "AdaptiveRNN",
    "Budget",
    "Diagnosis",
    "Discrete",
    "EMABaseline",
    "Exits",
    "HaltingLoop",
    "Mode",
    "Ponder",
    "Ponders",
    "PriceController",
    "Relaxed",
    "Residual",
    "ThresholdTable",
    "Thresholded",
    "Thresholds",
    "TruncatedGeometric",
    "act_halting",
    "adapt",
    "advance",
    "advantage_loss",
    "calibrate",
    "collect",
    "count_flops",
    "criteria",
    "decide",
    "deploy",
    "diagnose",
    "distill",
    "exact_loss",
    "exit_thresholds",
    "expected_steps",
    "from_pretrained",
    "log_stick_breaking",
    "map_loss",
    "models",
    "nn",
    "ponder_loss",
    "reinforce_loss",
    "rloo_loss",
    "save_pretrained",
    "stick_breaking",
    "stream",
    "summary",
    "svo",
    "unadapt",
    "use_heads",
    "use_mode",
    "use_thresholds",
]
