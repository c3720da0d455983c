"""The training runs that experiments are made of: each is made once, and found again by its name."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

from torchpact.models import ResNetConfig
from torchpact_recipes.training import TrainConfig, preset


@dataclass(frozen=True)
class Scale:
    """How large a reproduction is: ``settings`` replace those of the preset, ``depths`` the networks."""

    name: str
    preset: str
    settings: dict[str, Any] = field(default_factory=dict)
    seeds: int = 3
    """How many seeds an experiment has, unless it says otherwise."""
    depths: dict[int, int] = field(default_factory=lambda: {32: 5, 110: 18})
    """Units a block that stand for the paper's ResNet-32 and ResNet-110."""
    images: int | None = None
    """Of how many images of the bundled sample each of the two sets is; None is for all of CIFAR-10."""

    def network(self, depth: int) -> str:
        """What to call the network that stands for one of the paper's.

        >>> SCALES["fast"].network(32), SCALES["smoke"].network(32)
        ('ResNet-32', 'ResNet-14')
        """
        return f"ResNet-{ResNetConfig(units=self.depths[depth]).layers}"

    @property
    def length(self) -> str:
        """How long each of its networks is trained. Titles say it: "paper" would sound like the paper's own.

        >>> SCALES["paper"].length
        '100,000 iterations'
        """
        return f"{preset(self.preset, **self.settings).iterations:,} iterations"


SCALES = {
    "smoke": Scale(
        "smoke",
        "smoke",
        {"iterations": 2, "batch": 4, "log_every": 1, "validate_every": 1, "checkpoint_every": 1},
        seeds=1,
        depths={32: 2, 110: 3},
        images=16,
    ),
    "fast": Scale("fast", "fast"),
    "paper": Scale("paper", "paper", seeds=1),
}
"""Seconds on a CPU, to see that all of it works; 16,000 iterations; the paper's 100,000."""


class RunConfig(Protocol):
    """A configuration as experiments need it; each kind of run has its own."""

    @property
    def method(self) -> str: ...  # noqa: D102 (as in TrainConfig)
    @property
    def modes(self) -> tuple[str, ...]: ...  # noqa: D102
    @property
    def seed(self) -> int: ...  # noqa: D102
    @property
    def iterations(self) -> int: ...  # noqa: D102
    @property
    def validate_every(self) -> int: ...  # noqa: D102

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, such as JSON holds."""

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "RunConfig":
        """Build a configuration from what :meth:`to_dict` gave."""


class AnyRun(Protocol):
    """What those who make and keep runs must know of one, on images or on sequences."""

    @property
    def name(self) -> str:
        """What tells it from other runs of its scale."""

    @property
    def setting(self) -> str:
        """What it has in common with runs of other seeds."""

    @property
    def config(self) -> RunConfig:
        """What is trained, and how."""

    @property
    def needs(self) -> "tuple[AnyRun, ...]":
        """The runs whose weights it starts or learns from."""

    @property
    def kind(self) -> object:
        """What runs that share a compiled iteration have in common."""


R = TypeVar("R", bound=AnyRun)


@dataclass(frozen=True)
class Run:
    """A network to train, from the weights of a plain one or from nothing, and perhaps by a teacher."""

    config: TrainConfig
    warm: "Run | None" = None
    teacher: "Run | None" = None

    @property
    def needs(self) -> tuple["Run", ...]:
        """The runs whose weights it starts or learns from."""
        return tuple(run for run in (self.warm, self.teacher) if run is not None)

    @property
    def name(self) -> str:
        """What tells it from other runs of its scale; the folder of its files.

        >>> Run(preset("fast", tau=0.05, seed=2)).name
        'resnet32-relaxed-tau0.05-cold-seed2'
        """
        return f"{self.setting}-seed{self.config.seed}"

    @property
    def setting(self) -> str:
        """What it has in common with runs of other seeds."""
        config, network, usual = self.config, self.config.network, TrainConfig()
        parts = [f"resnet{network.layers}", config.method]
        if config.schedule != usual.schedule:
            parts.append("strong")
        if self.teacher is not None:
            parts.append(f"taught{self.teacher.config.network.layers}")
        if config.method == "plain" and self.warm is not None:
            parts.append("again")
        if config.method == "random":
            parts.append("steps" + "-".join(f"{steps:g}" for steps in config.random_steps))
        elif config.method != "plain":
            parts.append(f"tau{config.tau:g}")
            for value, default, text in (
                (network.per, usual.network.per, f"per-{network.per}"),
                (network.group, usual.network.group, f"group{network.group}"),
                (network.halting_norm, usual.network.halting_norm, "norm"),
                (network.halting_bias, usual.network.halting_bias, f"bias{network.halting_bias:g}"),
                (config.temperature, usual.temperature, f"lambda{config.temperature:g}"),
                (config.clip, usual.clip, f"delta{config.clip:g}"),
                (config.head_lr, usual.head_lr, f"heads{config.head_lr:g}"),
                (self.warm is None, False, "cold"),
            ):
                if value != default:
                    parts.append(text)
        return "-".join(parts)

    @property
    def kind(self) -> TrainConfig:
        """What runs that share a compiled iteration have in common."""
        return replace(self.config, tau=0.0, seed=0, variance_samples=0)


def plain(scale: Scale, depth: int, seed: int, **settings: Any) -> Run:
    """A vanilla ResNet-``depth``."""
    network = ResNetConfig(units=scale.depths.get(depth, (depth - 2) // 6), adaptive=False)
    chosen = scale.settings | settings
    return Run(preset(scale.preset, method="plain", network=network, seed=seed, **chosen))


def plain_again(scale: Scale, depth: int, seed: int, **settings: Any) -> Run:
    """A vanilla ResNet-``depth`` from its own weights: with as many iterations as an adaptive one had."""
    return replace(plain(scale, depth, seed, **settings), warm=plain(scale, depth, seed))


def adaptive(
    scale: Scale,
    depth: int,
    method: str,
    tau: float,
    seed: int,
    *,
    warm: bool = True,
    network: dict[str, Any] | None = None,
    **settings: Any,
) -> Run:
    """An adaptive ResNet-``depth``; if ``warm``, from the weights of the plain one of the same seed."""
    config = ResNetConfig(units=scale.depths[depth], **(network or {}))
    chosen = scale.settings | settings
    return Run(
        preset(scale.preset, method=method, network=config, tau=tau, seed=seed, **chosen),
        plain(scale, depth, seed) if warm else None,
    )


def by_lot(scale: Scale, depth: int, steps: tuple[float, ...], seed: int, **settings: Any) -> Run:
    """ResNet-``depth`` with random decisions, so many ``steps`` on average, from the plain one's weights."""
    network = ResNetConfig(units=scale.depths[depth])
    few = tuple(min(value, network.units - 0.5) for value in steps)  # of smoke's shallow networks
    chosen = scale.settings | settings | {"random_steps": few}
    return Run(
        preset(scale.preset, method="random", network=network, tau=0.0, seed=seed, **chosen),
        plain(scale, depth, seed),
    )


def looks(scale: Scale, count: int) -> dict[str, Any]:
    """Settings to validate so many times in a run."""
    iterations = preset(scale.preset, **scale.settings).iterations
    return {"validate_every": max(iterations // count, 1)}


def with_needed(runs: Iterable[AnyRun]) -> list[AnyRun]:
    """The runs and those they need, once each, the latter first.

    Of a run that several experiments need, it is the one that is validated most often.
    """
    found: dict[str, AnyRun] = {}

    def find(run: AnyRun) -> None:
        for one in run.needs:
            find(one)
        other = found.setdefault(run.name, run)
        if run.config.validate_every < other.config.validate_every:
            found[run.name] = run

    for run in runs:
        find(run)
    return sorted(found.values(), key=rank)


def rank(run: AnyRun) -> int:
    """How many runs must come before it, one after the other.

    >>> start = Run(preset("fast", method="plain"))
    >>> rank(start), rank(Run(preset("fast"), start))
    (0, 1)
    """
    return 1 + max(map(rank, run.needs)) if run.needs else 0


def batches(runs: Sequence[R], together: int) -> list[list[R]]:
    """Divide runs into those to train at once, as evenly as can be; those that others need, first.

    >>> [len(part) for part in batches([Run(preset("fast", seed=s)) for s in range(9)], 8)]
    [5, 4]
    """
    parts = []
    for level in sorted({rank(run) for run in runs}):
        # those of one kind next to each other: what is compiled for one serves all
        kinds: dict[str, list[R]] = {}
        for run in runs:
            if rank(run) == level:
                kinds.setdefault(repr(run.kind), []).append(run)
        same = [run for kind in kinds.values() for run in kind]
        count = -(-len(same) // together)
        sizes = [len(same) // count + (k < len(same) % count) for k in range(count)] if count else []
        for size in sizes:
            parts.append(same[:size])
            same = same[size:]
    return parts
