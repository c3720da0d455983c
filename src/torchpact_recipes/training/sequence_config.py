"""What training on sequences is: the task, the network, the method; with presets for every task."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, get_args

from torchpact import ACT, Discrete, Mode, Relaxed
from torchpact.checks import MOST, check_choice, check_count, check_number
from torchpact.core.modes import MODES
from torchpact.models import SequenceConfig
from torchpact_recipes.data.tasks import Addition, Logic, Parity, Sort, Task
from torchpact_recipes.training.config import TrainConfig
from torchpact_recipes.training.settings import from_plain, setting

Method = Literal["plain", "repeat", "act", "relaxed", "reinforce", "ponder"]
"""One iteration; always as many; ACT; the relaxed model; REINFORCE; PonderNet's expectation."""

GENERATORS: Mapping[str, type[Task]] = {
    "parity": Parity,
    "logic": Logic,
    "addition": Addition,
    "sort": Sort,
}
TASKS = (*GENERATORS, "enwik8")
BYTES = 256


def check_sizes(task: str, names: Iterable[str]) -> None:
    """Refuse names that are not those of a task's sizes; a task on text has none."""
    given = list(names)
    known = [f.name for f in fields(GENERATORS[task])] if task in GENERATORS else []  # type: ignore[arg-type]
    if any(name not in known for name in given):
        what = f"sizes of {task} among {', '.join(known)}; got" if known else f"no sizes of {task}, got"
        raise ValueError(f"expected {what} {', '.join(given)}")


def make_task(name: str, sizes: Mapping[str, int]) -> Task:
    """Return a synthetic task of given sizes.

    >>> make_task("parity", {"size": 8})
    Parity(size=8, low=1, high=None)
    """
    if name not in GENERATORS:
        raise ValueError(f"expected a task among {', '.join(GENERATORS)}; got {name!r}")
    check_sizes(name, sizes)
    return GENERATORS[name](**sizes)


def network_for(task: str, sizes: Mapping[str, int], method: str, **settings: Any) -> SequenceConfig:
    """Return the network of a method for a task; ``settings`` are those of :class:`SequenceConfig`.

    >>> network_for("parity", {"size": 8}, "plain", hidden=32).max_steps
    1
    """
    if method == "plain":
        settings["max_steps"] = 1
    settings["adaptive"] = method not in ("plain", "repeat")
    if task == "enwik8":
        return SequenceConfig(features=BYTES, classes=BYTES, symbols=True, **settings)
    found = make_task(task, sizes)
    return SequenceConfig(features=found.features, outputs=found.outputs, classes=found.classes, **settings)


@dataclass(frozen=True)
class SequenceTrainConfig:
    """A run on a synthetic task or on text, apart from where its files and data are.

    ``sizes`` are those of the task, and ``transfer`` others on which the network is validated too, without
    ever learning from them. ``beta`` weighs PonderNet's prior, whose price of a step is ``tau``. On
    text, ``batch`` streams are read ``window`` characters at a time; their states are carried on, their
    gradients are not. :func:`sequence_preset` has settings that go together.

    >>> sizes = {"size": 8}
    >>> network = network_for("parity", sizes, "act", cell="gru", max_steps=10)
    >>> config = SequenceTrainConfig("parity", network, sizes, method="act", tau=0.01)
    >>> SequenceTrainConfig.from_dict(config.to_dict()) == config
    True
    """

    task: str
    network: SequenceConfig
    sizes: Mapping[str, int] = field(default_factory=dict)
    transfer: Mapping[str, int] = field(default_factory=dict)
    method: Method = setting("relaxed", f"How the network learns: {', '.join(get_args(Method))} (relaxed).")
    tau: float = setting(0.001, "Price of a step; several make a sweep.")
    beta: float = setting(0.01, "Weight of PonderNet's prior.")
    free: float = setting(0.0, "Share of training before steps cost anything.")
    temperature: float = setting(2 / 3, "λ of the relaxation.")
    eps: float = setting(0.01, "ε of ACT.")

    iterations: int = setting(5000, "Iterations.")
    batch: int = setting(128, "Sequences, or streams of text, in a batch.")
    window: int = setting(50, "Characters that are read at a time.")
    lr: float = setting(3e-3, "Learning rate.")
    clip_norm: float = setting(1.0, "Largest norm of the gradients.")
    milestones: tuple[float, ...] = setting(
        (), "Share of iterations after which the rate falls to a tenth.", option="milestone"
    )
    baseline_decay: float = setting(0.99, "Decay of REINFORCE's baseline.")

    seed: int = setting(0, "Several make a sweep.")
    examples: int = setting(2048, "Examples, or characters, of a validation.")
    log_every: int = setting(100, "Iterations between entries of the history.")
    validate_every: int = setting(1000, "Iterations between validations.")
    checkpoint_every: int = setting(1000, "Iterations between checkpoints.")

    def __post_init__(self) -> None:
        for name, choices in (("task", TASKS), ("method", get_args(Method))):
            check_choice(name, getattr(self, name), choices)
        for name in (
            "iterations", "batch", "window", "examples", "log_every", "validate_every", "checkpoint_every",
        ):  # fmt: skip
            check_count(name, getattr(self, name), maximum=MOST)
        check_count("seed", self.seed, minimum=0, maximum=2**63 - 1)
        for name in ("tau", "beta"):
            check_number(name, getattr(self, name), 0, open_high=True)
        for name in ("lr", "clip_norm"):
            check_number(name, getattr(self, name), 0, open_low=True, open_high=True)
        check_number("baseline_decay", self.baseline_decay, 0, 1, open_high=True)
        check_number("free", self.free, 0, 1)
        for share in self.milestones:
            check_number("milestones", share, 0, 1)
        self._check_network()
        self.training_mode()  # checks temperature and eps

    def _check_network(self) -> None:
        shape = ("features", "outputs", "classes", "symbols", "adaptive", *(["max_steps"] * self.is_plain))
        kept = {f.name: getattr(self.network, f.name) for f in fields(SequenceConfig)}
        for name in ("features", "outputs", "classes", "symbols", "adaptive"):
            del kept[name]
        wanted = network_for(self.task, self.sizes, self.method, **kept)
        for name in shape:
            if getattr(wanted, name) != getattr(self.network, name):
                raise ValueError(
                    f"expected a network with {name}={getattr(wanted, name)} for {self.task} by the method "
                    f"{self.method}, got {getattr(self.network, name)}"
                )
        if self.transfer:
            other = make_task(self.task, self.transfer)
            if other.features != self.network.features or other.classes != self.network.classes:
                raise ValueError(f"expected to transfer to a task of the same inputs, got {other}")
        if self.method == "ponder" and (self.task != "parity" or self.network.layers != 1):
            raise ValueError(
                "expected a task of one time step and a network of one layer for the method ponder, "
                f"got {self.task} and {self.network.layers}"
            )

    @property
    def is_plain(self) -> bool:
        """Whether there is one iteration a time step."""
        return self.method == "plain"

    @property
    def is_text(self) -> bool:
        """Whether it reads characters."""
        return self.task == "enwik8"

    def training_mode(self) -> Mode | None:
        """The mode to train in; PonderNet's loss needs none, but its model is the discrete one."""
        modes = {
            "relaxed": Relaxed(self.temperature),
            "reinforce": Discrete(),
            "ponder": Discrete(),
            "act": ACT(self.eps),
        }
        return modes.get(self.method)

    @property
    def modes(self) -> tuple[str, ...]:
        """The names of the modes to validate in; networks of a fixed number of steps have none."""
        discrete = ("discrete", "thresholded")
        found: dict[str, tuple[str, ...]] = {
            "plain": (),
            "repeat": (),
            "act": ("act", "thresholded"),
            "relaxed": ("relaxed", *discrete),
        }
        return found.get(self.method, discrete)

    def learning_rate(self, iteration: int) -> float:
        """The learning rate of an iteration, counted from 0."""
        passed = sum(iteration >= share * self.iterations for share in self.milestones)
        return self.lr * 0.1**passed

    def price(self, iteration: int) -> float:
        """The price of a step at an iteration; PonderNet's is that of its prior, and does not change."""
        return 0.0 if iteration < self.free * self.iterations and self.method != "ponder" else self.tau

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, such as JSON holds."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "SequenceTrainConfig":
        """Build a configuration from what :meth:`to_dict` gave."""
        return from_plain(cls, SequenceConfig, values)


RunConfig = TrainConfig | SequenceTrainConfig
"""What is trained, of any kind."""


def check_modes(names: tuple[str, ...]) -> None:
    """Refuse names of modes that there are not."""
    for name in names:
        if name not in MODES:
            raise ValueError(f"expected modes among {', '.join(MODES)}; got {name!r}")
