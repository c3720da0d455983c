"""Several adaptive recurrent layers, one on top of the other."""

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence

from torchpact.checks import check_number
from torchpact.core.modes import Mode
from torchpact.core.ponder import Ponder
from torchpact.core.state import State
from torchpact.nn.rnn import AdaptiveRNN


class StackedRNN(nn.Module):
    """Adaptive layers on top of each other, each with decisions of its own.

    Every layer reads the outputs of the one below, less a share of ``dropout`` in training. The call is
    that of :class:`AdaptiveRNN`, with a list of states and of ponders, one for each layer.

    >>> layers = [AdaptiveRNN(nn.GRUCell(size + 1, 16), max_steps=3) for size in (8, 16)]
    >>> output, states, ponders = StackedRNN(layers)(torch.randn(7, 2, 8))
    >>> output.shape, len(states), len(ponders)
    (torch.Size([7, 2, 16]), 2, 2)
    """

    def __init__(self, layers: Iterable[AdaptiveRNN], dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.dropout = check_number("dropout", dropout, 0, 1)
        for layer in self.layers:
            if not isinstance(layer, AdaptiveRNN):
                raise TypeError(f"expected layers of AdaptiveRNN, got {type(layer).__name__}")
        if not self.layers:
            raise ValueError("expected at least one layer, got none")
        for below, above in zip(self.layers[:-1], self.layers[1:], strict=True):
            if above.input_size != below.hidden_size or above.batch_first != below.batch_first:
                raise ValueError(
                    f"expected a layer of input_size={below.hidden_size}, batch_first={below.batch_first} "
                    f"as the one below it gives; got {above.input_size}, {above.batch_first}"
                )

    def forward(
        self,
        input: Tensor | PackedSequence,
        states: Sequence[State] | None = None,
        *,
        lengths: Tensor | Sequence[int] | None = None,
        mode: Mode | str | None = None,
    ) -> tuple[Any, list[State], list[Ponder]]:
        """Return the outputs of the last layer, and the final state and ponder of each."""
        if states is not None and len(states) != len(self.layers):
            raise ValueError(f"expected {len(self.layers)} states for as many layers, got {len(states)}")
        output: Any = input
        finals, ponders = [], []
        for index, layer in enumerate(self.layers):
            if index and self.dropout and self.training:
                output = _drop(output, self.dropout)
            before = None if states is None else states[index]
            output, final, ponder = layer(output, before, lengths=lengths, mode=mode)
            finals.append(final)
            ponders.append(ponder)
        return output, finals, ponders


def _drop(output: Tensor | PackedSequence, share: float) -> Tensor | PackedSequence:
    if isinstance(output, PackedSequence):
        return output._replace(data=F.dropout(output.data, share))
    return F.dropout(output, share)
