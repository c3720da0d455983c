"""The claims of the paper, in the order of its pages, each with what judges it by numbers.

By what rule, see :mod:`torchpact_recipes.experiments.verdicts`. Bounds are written where they are
used; nothing is typed in by hand but the claims themselves.
"""

from torchpact_recipes.experiments import judgements_halting as halting
from torchpact_recipes.experiments import judgements_tradeoff as tradeoff
from torchpact_recipes.experiments import judgements_training as training
from torchpact_recipes.experiments.verdicts import Claim

CLAIMS: list[Claim] = [
    training.jumps,
    training.modes_stay_close,
    training.relaxed_costs_more,
    training.variance,
    training.competitive,
    tradeoff.similar32,
    tradeoff.similar110,
    tradeoff.lower_tau,
    tradeoff.higher_tau,
    tradeoff.trains110,
    training.temperature,
    training.clipping,
    halting.thresholded,
    halting.saturated,
    halting.sact_thresholded,
    halting.sact_not_sharp,
    halting.maps_follow,
]
