"""The four ways of turning halting probabilities into decisions; each is one algorithm of the paper.

A mode is a small state machine over one tensor: the stick that *remains* at each position. It starts
at 1, and every iteration but the last breaks a piece off. ``gate`` says which positions are computed in the
next iteration, ``halt`` takes the logits of the halting probabilities and breaks the stick. A mode that
samples draws its ``noise`` for all positions, computed or not: draws do not depend on what has halted.
Modes have no parameters and hold no state between calls: train a network in one, evaluate it in another.

To add a mode, subclass :class:`Mode`; to give it a name, enter it into :data:`MODES`.
"""

import math
import warnings
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from torchpact.checks import check_number
from torchpact.core.halting import act_step, iteration_index, log_stick_breaking_of
from torchpact.core.relaxation import bernoulli, logistic_noise, relaxed_bernoulli
from torchpact.core.thresholds import logit_of


class Mode:
    """What an adaptive block asks of a mode; see :mod:`torchpact.core.modes`."""

    hard: ClassVar[bool] = False
    """Whether the halting distribution is one-hot, so that the output is the state at halting."""
    can_exit_early: ClassVar[bool] = True
    """Whether a position can be done for good before the last iteration."""
    needs_every_h: ClassVar[bool] = True
    """Whether the cost depends on h after halting too; if not, a recurrent layer stops early in training."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "leaves" in vars(cls):
            _warn_of_leaves()
            cls.can_exit_early = vars(cls)["leaves"]

    @property
    def leaves(self) -> bool:
        """The former name of ``can_exit_early``."""
        _warn_of_leaves()
        return self.can_exit_early

    def gate(self, remaining: Tensor) -> Tensor:
        """Return the active positions mask a, by which residuals are multiplied; 0 is skipped."""
        return (remaining > 0).to(remaining.dtype)

    def noise(self, like: Tensor) -> Tensor | None:
        """Draw what decides, one number for every position, as ``halt`` does; None where nothing is drawn."""
        return None

    def halt(self, remaining: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Break the stick: the weight of this iteration in the output, and what remains."""
        raise NotImplementedError

    def log_prob(self, logits: Tensor, steps: Tensor) -> Tensor | None:
        """Return log q(z = steps) of the decisions taken, where the mode samples them."""
        return None

    def cost(self, probs: Tensor, steps: Tensor, expected_steps: Tensor) -> Tensor:
        """Return what the objective charges for, per position."""
        return expected_steps


@dataclass(frozen=True)
class Relaxed(Mode):
    """Concrete relaxation: soft, stochastic and differentiable; the mode to train in (alg. 3).

    ``temperature`` is λ. The mask is r·[r > ``clip``] of the remaining stick r, δ in the paper; the
    gradient flows through r. ``generator`` makes the noise reproducible; torch.compile and activation
    checkpointing need the default one.

    Args:
        temperature: λ, above 0.
        clip: δ, in [0, 1).
        generator: Draws the noise; None is torch's own.

    Raises:
        ValueError: A number is out of its range.

    Example:
        >>> Relaxed(temperature=0.5)
        Relaxed(temperature=0.5, clip=0.01)

    """

    can_exit_early: ClassVar[bool] = False

    temperature: float = 2 / 3
    clip: float = 0.01
    generator: torch.Generator | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_number("temperature", self.temperature, 0, open_low=True, open_high=True)
        check_number("clip", self.clip, 0, 1, open_high=True)

    def gate(self, remaining: Tensor) -> Tensor:
        """Return r·[r > δ]."""
        return torch.where(remaining > self.clip, remaining, torch.zeros_like(remaining))

    def noise(self, like: Tensor) -> Tensor:
        """Draw what decides, one number for every position."""
        return logistic_noise(like, self.generator)

    def halt(self, remaining: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Break off ξ̂ ~ RelaxedBernoulli(h; λ) of what remains."""
        fires, stays = relaxed_bernoulli(logits, self.noise(logits), self.temperature)
        return remaining * fires, remaining * stays


@dataclass(frozen=True)
class Discrete(Mode):
    """Sample when to halt: the model of the paper itself, trained by REINFORCE (alg. 1).

    Args:
        generator: Draws the noise; None is torch's own.

    Example:
        >>> Discrete(generator=torch.Generator().manual_seed(0))
        Discrete()

    """

    hard: ClassVar[bool] = True

    generator: torch.Generator | None = field(default=None, repr=False, compare=False)

    def gate(self, remaining: Tensor) -> Tensor:
        """Return what remains, which is 0 or 1."""
        return remaining

    def noise(self, like: Tensor) -> Tensor:
        """Draw what decides, one number for every position."""
        return logistic_noise(like, self.generator)

    def halt(self, remaining: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Take all that remains where ξ ~ Bernoulli(h) is 1."""
        return _take_all(remaining, bernoulli(logits, self.noise(logits)))

    def log_prob(self, logits: Tensor, steps: Tensor) -> Tensor:
        """Return log q(z = steps), exactly (eq. 15)."""
        return log_stick_breaking_of(logits, 0).gather(0, (steps - 1).unsqueeze(0)).squeeze(0)


@dataclass(frozen=True)
class Thresholded(Mode):
    """Stop as soon as h exceeds ``threshold``: deterministic, the mode to deploy (alg. 2, eq. 16).

    Args:
        threshold: A probability in (0, 1).

    Raises:
        ValueError: It is outside (0, 1).

    Example:
        >>> Thresholded(threshold=0.3)
        Thresholded(threshold=0.3)

    """

    hard: ClassVar[bool] = True

    threshold: float = 0.5

    def __post_init__(self) -> None:
        check_number("threshold", self.threshold, 0, 1, open_low=True, open_high=True)

    @property
    def bound(self) -> float:
        """What logits must exceed for a halt.

        >>> Thresholded().bound
        0.0
        """
        return logit_of(self.threshold)

    def gate(self, remaining: Tensor) -> Tensor:
        """Return what remains, which is 0 or 1."""
        return remaining

    def halt(
        self, remaining: Tensor, logits: Tensor, bound: float | Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Take all that remains where h > threshold or, if given, the logit exceeds ``bound``."""
        return _take_all(remaining, exceeds(logits, self.bound if bound is None else bound))


@dataclass(frozen=True)
class ACT(Mode):
    """Graves' adaptive computation time; SACT, where positions are pixels (alg. 4).

    Args:
        eps: Iterations go on while the sum of h is below 1 − ``eps``, in (0, 1).

    Raises:
        ValueError: It is outside (0, 1).

    Example:
        >>> ACT(eps=0.05)
        ACT(eps=0.05)

    """

    needs_every_h: ClassVar[bool] = False

    eps: float = 0.01

    def __post_init__(self) -> None:
        check_number("eps", self.eps, 0, 1, open_low=True, open_high=True)

    def halt(self, remaining: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Break off h while more than eps remains after it, else all."""
        return act_step(remaining, torch.sigmoid(logits), self.eps)

    def cost(self, probs: Tensor, steps: Tensor, expected_steps: Tensor) -> Tensor:
        """Return the ponder cost ρ = N + R."""
        before = iteration_index(len(probs), steps) < steps
        # Multiplying by 0 would keep a NaN that was never part of the sum
        return steps + 1 - torch.where(before, probs, torch.zeros_like(probs)).sum(0)


class NeverHalt(Mode):
    """No position halts, whatever heads say: every step runs and every head is asked, to measure costs."""

    hard: ClassVar[bool] = True

    def halt(self, remaining: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Leave all that remains."""
        return torch.zeros_like(remaining), remaining


MODES: dict[str, type[Mode]] = {
    "relaxed": Relaxed,
    "discrete": Discrete,
    "thresholded": Thresholded,
    "act": ACT,
}


def as_mode(mode: Mode | str) -> Mode:
    """Return a mode given as such, or by name with its default settings.

    >>> as_mode("thresholded")
    Thresholded(threshold=0.5)
    """
    if isinstance(mode, Mode):
        return mode
    if isinstance(mode, str) and mode in MODES:
        return MODES[mode]()
    names = ", ".join(MODES)
    if isinstance(mode, type):
        given = f"the class {mode.__name__}"
    else:
        given = repr(mode) if isinstance(mode, str) else f"a {type(mode).__name__}"
    raise ValueError(f"expected a mode, or one of the names {names}; got {given}")


def exceeds(logits: Tensor, bound: float | Tensor) -> Tensor:
    """Whether logits exceed a bound, or one for each position; −∞ is exceeded by all of them.

    >>> exceeds(torch.tensor([-torch.inf, 0.0]), -math.inf)
    tensor([True, True])
    """
    if isinstance(bound, Tensor):
        return (logits > bound) | (bound == -math.inf)
    return torch.ones_like(logits, dtype=torch.bool) if bound == -math.inf else logits > bound


def _warn_of_leaves() -> None:
    warnings.warn(
        "expected can_exit_early, the name of this attribute of modes, got leaves, its former one",
        DeprecationWarning,
        stacklevel=3,
    )


def _take_all(remaining: Tensor, fires: Tensor) -> tuple[Tensor, Tensor]:
    nothing = torch.zeros_like(remaining)
    return torch.where(fires, remaining, nothing), torch.where(fires, nothing, remaining)
