"""Stochastic variational optimization: maximise f(z) through L(φ) = E_q f(z) ≤ max f (section 3).

One function, :func:`maximize`; behind it one estimator of ∇L a file, chosen by name or given as an
object, and families of q to start from. :func:`gradient_statistics` measures an estimator's mean and
variance.
"""

from torchpact.svo.concrete import Concrete
from torchpact.svo.estimator import ESTIMATORS, Estimator
from torchpact.svo.families import BernoulliVector, ChainedBernoulli, LinearChain, NormalVector
from torchpact.svo.maximize import Result, maximize
from torchpact.svo.reinforce import Reinforce
from torchpact.svo.reparameterization import Reparameterization
from torchpact.svo.statistics import GradientStatistics, gradient_statistics

__all__ = [
    "ESTIMATORS",
    "BernoulliVector",
    "ChainedBernoulli",
    "Concrete",
    "Estimator",
    "GradientStatistics",
    "LinearChain",
    "NormalVector",
    "Reinforce",
    "Reparameterization",
    "Result",
    "gradient_statistics",
    "maximize",
]
