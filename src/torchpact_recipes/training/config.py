"""What a training run is: typed, checked once, written into every run and checkpoint as JSON."""

import math
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, get_args

from torchpact import ACT, Discrete, Mode, Relaxed
from torchpact.checks import MOST, check_choice, check_count, check_number
from torchpact.core.modes import MODES
from torchpact.models import ResNetConfig
from torchpact_recipes.training.settings import from_plain

Method = Literal["plain", "relaxed", "reinforce", "act", "random"]
Precision = Literal["fp32", "bf16"]
DISTILL = 0.9
"""How much a teacher usually counts."""


@dataclass(frozen=True)
class TrainConfig:
    """A run of the trainer, apart from where its files and data are.

    ``method`` is how the network learns: "plain" (no adaptive blocks), "relaxed" (eq. 27), "reinforce"
    (eq. 26), "act" (SACT, or ACT where the network decides per image) or, to compare with, "random": the
    network does not decide, decisions are drawn by lot. ``milestones`` are the shares of ``iterations``
    after which the learning rate is divided by ten, unless its ``schedule`` is a cosine. The defaults are
    those of the paper's supplement; :func:`preset` has others.

    >>> config = preset("fast", method="relaxed", tau=0.01)
    >>> config.iterations, config.optimizer, config.lr
    (16000, 'sgd', 0.1)
    >>> TrainConfig.from_dict(config.to_dict()) == config
    True
    """

    network: ResNetConfig = field(default_factory=ResNetConfig)
    method: Method = "relaxed"
    tau: float = 0.01
    temperature: float = 2 / 3
    clip: float = 0.01
    eps: float = 0.01
    random_steps: tuple[float, ...] = ()
    """How many steps to draw, on average, in each block of a network that does not decide."""

    iterations: int = 100_000
    batch: int = 128
    optimizer: Literal["sgd", "adam"] = "sgd"
    lr: float = 0.1
    head_lr: float = 1.0
    """The learning rate of halting heads, in times of the others': slow heads are not sure before the network
    has learned what becomes of pixels that halt."""
    momentum: float = 0.9
    weight_decay: float = 2e-4
    nesterov: bool = False
    schedule: Literal["steps", "cosine"] = "steps"
    milestones: tuple[float, ...] = (0.6, 0.75, 0.9)
    label_smoothing: float = 0.0
    distill: float = 0.0
    """How much a teacher's outputs count, where labels count the rest to 1."""
    distill_temperature: float = 4.0
    """By what both outputs are divided to be compared."""
    pad: int = 2
    """By how many pixels images are shifted at most."""
    tau_ramp: float = 0.0
    """The share of ``iterations`` over which the price of a step rises from 0 to ``tau``."""
    baseline_decay: float = 0.99

    seed: int = 0
    precision: Precision = "fp32"
    deterministic: bool = False
    """Whether a GPU, too, gives the same bits every time; it costs speed, as nothing is compiled."""
    log_every: int = 500
    validate_every: int = 5000
    checkpoint_every: int = 5000
    validate_modes: tuple[str, ...] | None = None
    """Modes to validate in; None is for those that go with the method."""
    variance_samples: int = 0
    """Of how many gradients to find the variance when validating; see ``training.variance``."""

    def __post_init__(self) -> None:
        for name, choices in (("method", get_args(Method)), ("precision", get_args(Precision))):
            check_choice(name, getattr(self, name), choices)
        if self.optimizer not in ("sgd", "adam"):
            raise ValueError(f"expected optimizer to be sgd or adam, got {self.optimizer!r}")
        if self.schedule not in ("steps", "cosine"):
            raise ValueError(f"expected schedule to be steps or cosine, got {self.schedule!r}")
        for name in ("iterations", "batch", "log_every", "validate_every", "checkpoint_every"):
            check_count(name, getattr(self, name), maximum=MOST)
        check_count("seed", self.seed, minimum=0, maximum=2**63 - 1)
        check_count("variance_samples", self.variance_samples, minimum=0)
        for name in ("deterministic", "nesterov"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"expected {name} to be True or False, got {getattr(self, name)!r}")
        if self.nesterov and not (self.optimizer == "sgd" and self.momentum > 0):
            raise ValueError("expected sgd with momentum for nesterov")
        check_count("pad", self.pad, minimum=0)
        check_number("label_smoothing", self.label_smoothing, 0, 1, open_high=True)
        check_number("distill", self.distill, 0, 1)
        check_number("distill_temperature", self.distill_temperature, 0, open_low=True, open_high=True)
        check_number("tau_ramp", self.tau_ramp, 0, 1)
        check_number("lr", self.lr, 0, open_low=True, open_high=True)
        check_number("head_lr", self.head_lr, 0, open_high=True)
        check_number("tau", self.tau, 0, open_high=True)
        check_number("momentum", self.momentum, 0, 1, open_high=True)
        check_number("weight_decay", self.weight_decay, 0, open_high=True)
        check_number("baseline_decay", self.baseline_decay, 0, 1, open_high=True)
        for share in self.milestones:
            check_number("milestones", share, 0, 1)
        if self.network.adaptive != (self.method != "plain"):
            kind = "a plain" if self.method == "plain" else "an adaptive"
            raise ValueError(f"expected {kind} network for the method {self.method}, got {self.network}")
        wanted = 3 if self.method == "random" else 0
        if len(self.random_steps) != wanted:
            raise ValueError(
                f"expected {wanted} random_steps for the method {self.method}, got {len(self.random_steps)}"
            )
        for steps in self.random_steps:
            check_number("random_steps", steps, 1, self.network.units, open_low=True, open_high=True)
        for name in self.modes:
            if name not in MODES:
                raise ValueError(f"expected modes among {', '.join(MODES)}; got {name!r}")
        self.training_mode()  # checks temperature, clip and eps

    def training_mode(self) -> Mode | None:
        """The mode to train in."""
        modes = {
            "relaxed": Relaxed(self.temperature, self.clip),
            "reinforce": Discrete(),
            "random": Discrete(),
            "act": ACT(self.eps),
        }
        return modes.get(self.method)

    @property
    def modes(self) -> tuple[str, ...]:
        """The names of the modes to validate in; plain networks have none."""
        if self.method == "plain":
            return ()
        if self.validate_modes is not None:
            return self.validate_modes
        known = {"act": ("act", "thresholded"), "random": ("discrete",)}
        return known.get(self.method, ("relaxed", "discrete", "thresholded"))

    def learning_rate(self, iteration: int) -> float:
        """The learning rate of an iteration, counted from 0."""
        if self.schedule == "cosine":
            return self.lr * (1 + math.cos(math.pi * iteration / self.iterations)) / 2
        passed = sum(iteration >= share * self.iterations for share in self.milestones)
        return self.lr * 0.1**passed

    def price(self, iteration: int) -> float:
        """The price τ of a step in an iteration, counted from 0."""
        ramp = self.tau_ramp * self.iterations
        return self.tau if iteration >= ramp else self.tau * iteration / ramp

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, such as JSON holds."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "TrainConfig":
        """Build a configuration from what :meth:`to_dict` gave."""
        return from_plain(cls, ResNetConfig, values)


PRESETS: dict[str, dict[str, Any]] = {
    "paper": {},
    "fast": {"iterations": 16_000, "validate_every": 2000, "checkpoint_every": 4000},
    "strong": {
        "iterations": 40_000,
        "schedule": "cosine",
        "nesterov": True,
        "weight_decay": 5e-4,
        "pad": 4,
        "validate_every": 10_000,
        "checkpoint_every": 5000,
    },
    "smoke": {
        "iterations": 60,
        "batch": 32,
        "log_every": 20,
        "validate_every": 60,
        "checkpoint_every": 20,
    },
}
"""The supplement's protocol; the same shape in 16,000 iterations; a recipe of today; a few, to see it run.

None ramps τ in: where the price of a step rose from 0, heads never halted before it had risen, nor later.
"""


def preset(name: str, **settings: Any) -> TrainConfig:
    """Return a preset with some settings changed; REINFORCE gets Adam, as in the paper."""
    if name not in PRESETS:
        raise ValueError(f"expected a preset among {', '.join(PRESETS)}; got {name!r}")
    if settings.get("method") == "reinforce":
        settings = {"optimizer": "adam", "lr": 1e-3, "nesterov": False} | settings
    if settings.get("method") == "plain" and "network" not in settings:
        settings["network"] = replace(ResNetConfig(), adaptive=False)
    return TrainConfig(**(PRESETS[name] | settings))
