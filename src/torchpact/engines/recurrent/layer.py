"""What recurrent kernels need to know of a layer, read from its spec: weights, sizes and the halting head."""

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from torchpact.core.modes import Thresholded
from torchpact.engines.base import Unsupported
from torchpact.specs import BlockSpec, LinearHead, NeverHead, Opaque, RecurrentCell
from torchpact.specs.heads import HeadSpec
from torchpact.specs.steps import StepSpec

KINDS = {"lstm": (0, 4), "gru": (1, 3), "rnn": (2, 1)}
"""The number by which kernels know a kind of cell, and how many gates it has."""


@dataclass(frozen=True, eq=False)
class Layer:
    """A cell and its halting head, without gradients.

    The flag of a new time step is the last input, so that its weights are the last column of ``weight_ih``.
    """

    kind: int
    gates: int
    max_steps: int
    weight_ih: Tensor
    """(gates · size, features + 1)."""
    weight_hh: Tensor
    """(gates · size, size)."""
    bias_ih: Tensor | None
    bias_hh: Tensor | None
    head: Tensor | None
    """(size,); None of a head that never halts."""
    head_bias: Tensor | None

    @property
    def size(self) -> int:
        """The units of the cell."""
        return self.weight_hh.size(1)

    @property
    def dtype(self) -> torch.dtype:
        """The precision of all weights."""
        return self.weight_hh.dtype

    @property
    def device(self) -> torch.device:
        """The device of all weights."""
        return self.weight_hh.device

    @property
    def weights(self) -> list[Tensor]:
        """All weights that there are."""
        found = (self.weight_ih, self.weight_hh, self.bias_ih, self.bias_hh, self.head, self.head_bias)
        return [weight for weight in found if weight is not None]

    @property
    def is_lstm(self) -> bool:
        """Whether a state is a pair (h, c)."""
        return self.kind == 0


def layer_of(spec: BlockSpec, dtypes: Collection[torch.dtype]) -> Layer:
    """Return what the kernels need to know of a recurrent layer.

    Args:
        spec: The layer.
        dtypes: The precisions that a kernel is there for.

    Raises:
        Unsupported: The cell, the head, the mode or the precision is one that kernels are not there for.

    """
    if type(spec.mode) is not Thresholded:
        raise Unsupported(f"expected the mode thresholded, got {spec.mode}")
    cell, (head, head_bias) = _cell_of(spec.steps[0]), _head_of(spec.heads)
    kind, gates = KINDS[cell.kind]
    module = cell.cell
    assert isinstance(module, nn.LSTMCell | nn.GRUCell | nn.RNNCell)
    layer = Layer(
        kind,
        gates,
        spec.max_steps,
        _weight(module.weight_ih),
        _weight(module.weight_hh),
        None if module.bias_ih is None else _weight(module.bias_ih),
        None if module.bias_hh is None else _weight(module.bias_hh),
        head,
        head_bias,
    )
    if layer.dtype not in dtypes or len({(x.dtype, x.device) for x in layer.weights}) > 1:
        names = ", ".join(_name(dtype) for dtype in dtypes)
        found = ", ".join(sorted({f"{_name(x.dtype)} on {x.device}" for x in layer.weights}))
        raise Unsupported(f"expected all weights of one device and precision ({names}), got {found}")
    return layer


def _cell_of(step: StepSpec) -> RecurrentCell:
    if isinstance(step, RecurrentCell):
        return step
    reason = step.reason if isinstance(step, Opaque) else ""
    raise Unsupported(reason or f"expected a cell of torch, got {type(step).__name__}")


def _head_of(heads: tuple[HeadSpec, ...]) -> tuple[Tensor | None, Tensor | None]:
    """Return the weight and the bias of the head that all decisions share."""
    if not heads or isinstance(heads[0], NeverHead):
        return None, None
    head = heads[0]
    if isinstance(head, LinearHead):
        return _weight(head.weight)[0].contiguous(), None if head.bias is None else _weight(head.bias)
    reason = head.reason if isinstance(head, Opaque) else ""
    raise Unsupported(reason or "expected a HaltingUnit or never_halt as the halting head, got another")


def _weight(weight: Tensor) -> Tensor:
    return weight.detach().contiguous()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
