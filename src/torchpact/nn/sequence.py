"""Networks for sequences: adaptive recurrent layers, with a linear readout at every time step."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from torch import Tensor, nn

from torchpact.checks import MOST, check_count, check_number
from torchpact.core.modes import Mode
from torchpact.core.ponder import Ponder
from torchpact.core.state import State
from torchpact.nn.cells import never_halt
from torchpact.nn.resnet_config import MOST_BIAS
from torchpact.nn.rnn import AdaptiveRNN
from torchpact.nn.stacked_rnn import StackedRNN

Cell = Literal["rnn", "gru", "lstm"]
CELLS: dict[str, Callable[[int, int], nn.Module]] = {
    "rnn": nn.RNNCell,
    "gru": nn.GRUCell,
    "lstm": nn.LSTMCell,
}


@dataclass(frozen=True)
class SequenceConfig:
    """What a network for sequences is, apart from its weights; plain values, so that JSON can hold it.

    A time step brings ``features`` numbers, or with ``symbols`` one of so many symbols. They enter by way
    of ``embedding`` linear units, or as they are if that is 0, which symbols cannot. ``outputs``
    questions with ``classes`` answers each are asked. There are ``layers`` of ``hidden`` units. With
    ``adaptive`` they run up to ``max_steps`` iterations at each time step, otherwise always as many: a
    plain network has one.

    >>> plain = SequenceConfig(features=64, adaptive=False, max_steps=1)
    >>> repeated = SequenceConfig(features=64, adaptive=False, max_steps=5)
    """

    features: int
    outputs: int = 1
    classes: int = 2
    symbols: bool = False
    embedding: int = 0
    cell: Cell = "lstm"
    hidden: int = 128
    layers: int = 1
    dropout: float = 0.0
    adaptive: bool = True
    max_steps: int = 10
    halting_bias: float = 1.0

    def __post_init__(self) -> None:
        for name in ("features", "outputs", "classes", "hidden", "layers", "max_steps"):
            check_count(name, getattr(self, name), maximum=MOST)
        for name in ("symbols", "adaptive"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"expected {name} to be True or False, got {getattr(self, name)!r}")
        check_count("embedding", self.embedding, minimum=int(self.symbols), maximum=MOST)
        check_number("dropout", self.dropout, 0, 1)
        check_number("halting_bias", self.halting_bias, -MOST_BIAS, MOST_BIAS)
        if self.cell not in get_args(Cell):
            raise ValueError(f"expected cell to be one of {', '.join(get_args(Cell))}; got {self.cell!r}")


class SequenceNet(nn.Module):
    """A network that answers at every time step; plain, repeating and adaptive ones share the signature.

    Input is of shape (batch, time, features), or (batch, time) for symbols. Every layer has a
    :class:`~torchpact.Ponder` with positions (batch, time).

    >>> model = SequenceNet(SequenceConfig(features=256, classes=256, symbols=True, embedding=16))
    >>> logits, states, ponders = model(torch.randint(256, (3, 20)))
    >>> logits.shape, len(ponders)
    (torch.Size([3, 20, 1, 256]), 1)
    >>> logits, states, ponders = model(torch.randint(256, (3, 20)), states)  # reads on
    """

    def __init__(self, config: SequenceConfig, mode: Mode | str | None = None) -> None:
        super().__init__()
        self.config = config
        self.entry: nn.Module
        if config.symbols:
            self.entry = nn.Embedding(config.features, config.embedding)
        else:
            self.entry = nn.Linear(config.features, config.embedding) if config.embedding else nn.Identity()
        sizes = [config.embedding or config.features] + [config.hidden] * (config.layers - 1)
        layers = [
            AdaptiveRNN(
                CELLS[config.cell](size + 1, config.hidden),
                config.max_steps,
                halting=None if config.adaptive else never_halt,
                halting_bias=config.halting_bias,
                mode=mode if config.adaptive else "thresholded",
                batch_first=True,
            )
            for size in sizes
        ]
        self.rnn = StackedRNN(layers, config.dropout)
        self.readout = nn.Linear(config.hidden, config.outputs * config.classes)

    def extra_repr(self) -> str:
        """Return the configuration for ``print(model)``."""
        return repr(self.config)

    def forward(
        self,
        input: Tensor,
        states: Sequence[State] | None = None,
        *,
        lengths: Tensor | Sequence[int] | None = None,
    ) -> tuple[Tensor, list[State], list[Ponder]]:
        """Return logits of shape (batch, time, outputs, classes), final states, and what the layers did."""
        hidden, finals, ponders = self.rnn(self._enter(input), states, lengths=lengths)
        return self._answer(hidden), finals, ponders

    def unroll(self, input: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits after each iteration of a single time step, and those of halting.

        Their shapes are (L, batch, 1, outputs, classes) and (L, batch); the network has one layer.

        >>> model = SequenceNet(SequenceConfig(features=64, max_steps=10))
        >>> logits, halting = model.unroll(torch.randn(3, 1, 64))
        >>> logits.shape, halting.shape
        (torch.Size([10, 3, 1, 1, 2]), torch.Size([10, 3]))
        """
        if input.size(1) != 1 or self.config.layers != 1:
            raise ValueError(
                f"expected one time step and one layer, got {input.size(1)} and {self.config.layers}"
            )
        (layer,) = self.rnn.layers
        assert isinstance(layer, AdaptiveRNN)
        hidden, halting = layer.unroll(self._enter(input)[:, 0])
        return self._answer(hidden.unsqueeze(2)), halting

    def zero_states(self, batch: int) -> list[State]:
        """Return the states from which so many sequences begin, one for each layer.

        >>> model = SequenceNet(SequenceConfig(features=64, layers=2, cell="gru"))
        >>> [state.shape for state in model.zero_states(3)]
        [torch.Size([3, 128]), torch.Size([3, 128])]
        """
        like = self.readout.weight
        layers = [layer for layer in self.rnn.layers if isinstance(layer, AdaptiveRNN)]
        return [layer.zero_state(batch, like) for layer in layers]

    def _enter(self, input: Tensor) -> Tensor:
        config = self.config
        fits = input.dim() == 2 if config.symbols else input.dim() == 3 and input.size(2) == config.features
        if not fits or input.is_floating_point() == config.symbols:
            what = "symbols of shape (batch, time)" if config.symbols else "floats of shape (batch, time, "
            what += "" if config.symbols else f"{config.features})"
            raise ValueError(f"expected {what}, got {input.dtype} {tuple(input.shape)}")
        entered: Tensor = self.entry(input)
        return entered

    def _answer(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.readout(hidden)
        return logits.view(*hidden.shape[:-1], self.config.outputs, self.config.classes)


def sequence_nll(logits: Tensor, targets: Tensor) -> Tensor:
    """Return −log p of the targets of each sequence, summed over all that is asked, divided by its time.

    ``logits`` are of shape (batch, time, outputs, classes) and ``targets`` (batch, time, outputs), −100
    where nothing is asked. The time is that of the longest sequence. The objectives average the cost of a
    layer over time, so both have one scale; where lengths differ, they do so over the real time steps of each
    example, unless they are given ponders without weights: ``ponder._replace(weights=None)``.

    >>> import math
    >>> sequence_nll(torch.zeros(1, 4, 1, 2), torch.tensor([[[0], [1], [-100], [1]]])) / math.log(2)
    tensor([0.7500])
    """
    if logits.shape[:-1] != targets.shape or targets.dim() != 3:
        raise ValueError(
            "expected logits (batch, time, outputs, classes) and targets (batch, time, outputs), "
            f"got {tuple(logits.shape)} and {tuple(targets.shape)}"
        )
    flat = nn.functional.cross_entropy(logits.flatten(0, 2), targets.flatten(), reduction="none")
    return flat.view(targets.shape).sum((1, 2)) / targets.size(1)
