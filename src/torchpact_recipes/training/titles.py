"""What runs are called where people read of them."""

from torchpact_recipes.training.config import TrainConfig
from torchpact_recipes.training.sequence_config import SequenceTrainConfig

METHODS = {
    "relaxed": "PSACT",
    "act": "SACT",
    "reinforce": "REINFORCE",
    "plain": "plain ResNet",
    "random": "random decisions",
}
"""What the paper calls a network trained by a method; the last is a baseline that it has not."""

SEQUENCE_METHODS = {"relaxed": "PACT", "act": "ACT", "reinforce": "REINFORCE", "ponder": "PonderNet"}


def title_of(config: TrainConfig) -> str:
    """What the paper calls a network, and its τ, or how many units are drawn in each block.

    >>> title_of(TrainConfig(method="act", tau=0.005))
    'SACT, τ = 0.005'
    >>> title_of(TrainConfig(method="random", random_steps=(1.5, 1.3, 1.7)))
    'random decisions, 1.5 / 1.3 / 1.7 units'
    """
    name = METHODS[config.method]
    if config.network.per == "image":
        name = {"PSACT": "PACT", "SACT": "ACT"}.get(name, name)
    if config.method == "random":
        return f"{name}, {' / '.join(f'{steps:.3g}' for steps in config.random_steps)} units"
    return name if config.method == "plain" else f"{name}, τ = {config.tau:g}"


def title(config: TrainConfig | SequenceTrainConfig) -> str:
    """What a run is, in a few words; the network or the task first.

    >>> title(TrainConfig(tau=0.01))
    'ResNet-32, PSACT, τ = 0.01'
    >>> from torchpact.models import ResNetConfig
    >>> title(TrainConfig(method="plain", network=ResNetConfig(adaptive=False), distill=0.9))
    'ResNet-32, plain, taught'
    >>> from torchpact_recipes.training.sequence_presets import sequence_preset
    >>> title(sequence_preset("parity", "tiny", method="act", tau=0.001))
    'parity, ACT, τ = 0.001'
    """
    if isinstance(config, SequenceTrainConfig):
        return f"{config.task}, {_sequence_method(config)}"
    kind = "plain" if config.method == "plain" else title_of(config)
    return f"ResNet-{config.network.layers}, {kind}{', taught' if config.distill else ''}"


def label(config: TrainConfig | SequenceTrainConfig) -> str:
    """The same without the network or the task, short enough to stand in a chart.

    >>> label(TrainConfig(method="reinforce", tau=0.05))
    'REINFORCE τ 0.05'
    >>> label(TrainConfig(method="random", random_steps=(1.5, 1.3, 1.7)))
    'random, 4.5 units'
    """
    if isinstance(config, TrainConfig) and config.method == "random":
        return f"random, {sum(config.random_steps):.3g} units"
    return title(config).partition(", ")[2].replace(", τ = ", " τ ")


def _sequence_method(config: SequenceTrainConfig) -> str:
    if config.method == "plain":
        return "plain"
    if config.method == "repeat":
        return f"repeat {config.network.max_steps}"
    return f"{SEQUENCE_METHODS[config.method]}, τ = {config.tau:g}"
