"""What a training run is: typed, checked once, written into every run and checkpoint as JSON."""

import math
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, get_args

from torchpact import ACT, Discrete, Mode, Relaxed
from torchpact.checks import MOST, check_choice, check_count, check_number
from torchpact.core.modes import MODES
from torchpact.models import ResNetConfig
from torchpact_recipes.training.settings import from_plain, setting

Method = Literal["plain", "relaxed", "reinforce", "act", "random"]
Precision = Literal["fp32", "bf16"]
DISTILL = 0.9
"""How much a teacher usually counts."""


@dataclass(frozen=True)
class TrainConfig:
    """A run of the trainer, apart from where its files and data are.

    ``method`` is how the network learns: "plain" (no adaptive blocks), "relaxed" (eq. 27), "reinforce"
    (eq. 26), "act" (SACT, or ACT where the network decides per image) or, as a baseline, "random": positions
    halt at random. Fields with a help text are options of ``torchpact train images``. ``milestones`` are the
    shares of ``iterations`` after which the learning rate is divided by ten, unless its ``schedule`` is a
    cosine. The defaults are those of the paper's supplement; :func:`preset` has others.

    >>> config = preset("fast", method="relaxed", tau=0.01)
    >>> config.iterations, config.optimizer, config.lr
    (16000, 'sgd', 0.1)
    >>> TrainConfig.from_dict(config.to_dict()) == config
    True
    """

    network: ResNetConfig = field(default_factory=ResNetConfig)
    method: Method = setting("relaxed", f"How the network learns: {', '.join(get_args(Method))} (relaxed).")
    tau: float = setting(0.01, "Price of a step; several make a sweep.")
    temperature: float = setting(2 / 3, "λ of the relaxation.")
    clip: float = setting(0.01, "δ, below which a relaxed position is skipped.")
    eps: float = setting(0.01, "ε of ACT.")
    random_steps: tuple[float, ...] = setting(
        (), "Mean steps of a block that halts at random, by --method random; once for each block."
    )

    iterations: int = setting(100_000, "Iterations.")
    batch: int = setting(128, "Images in a batch.")
    optimizer: Literal["sgd", "adam"] = setting("sgd", "sgd or adam.")
    lr: float = setting(0.1, "Learning rate.")
    # slow heads are not sure before the network has learned what becomes of pixels that halt
    head_lr: float = setting(1.0, "Learning rate of halting heads, in times of the others' (1).")
    momentum: float = setting(0.9, "Momentum of sgd.")
    weight_decay: float = setting(2e-4, "Decay of the weights of convolutions and linear layers.")
    nesterov: bool = setting(False, "Nesterov's momentum.")
    schedule: Literal["steps", "cosine"] = setting("steps", "Of the learning rate: steps or cosine.")
    milestones: tuple[float, ...] = setting(
        (0.6, 0.75, 0.9),
        "Share of iterations after which the rate falls to a tenth.",
        option="milestone",
    )
    label_smoothing: float = setting(0.0, "Smoothing of labels.")
    distill: float = setting(0.0, f"Weight of the teacher, from 0 to 1; with --teacher {DISTILL}.")
    distill_temperature: float = setting(4.0, "Temperature at which outputs are compared with the teacher's.")
    pad: int = setting(2, "Pixels that images are shifted by at most.")
    tau_ramp: float = setting(0.0, "Share of iterations over which the price rises from 0 to tau.")
    baseline_decay: float = setting(0.99, "Decay of REINFORCE's baseline.")

    seed: int = setting(0, "Several make a sweep.")
    precision: Precision = setting("fp32", "fp32 or bf16; bf16 on a GPU by default.")
    deterministic: bool = setting(False, "The same bits every time on a GPU too; slower.")
    log_every: int = setting(500, "Iterations between entries of the history.")
    validate_every: int = setting(5000, "Iterations between validations.")
    checkpoint_every: int = setting(5000, "Iterations between checkpoints.")
    validate_modes: tuple[str, ...] | None = setting(
        None,
        "Mode to validate in: relaxed, discrete, thresholded or act, by default those of the method; several "
        "if repeated, the best checkpoint being chosen by the first.",
        option="validate-mode",
    )
    variance_samples: int = setting(0, "Gradients whose variance is measured when validating.")

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
