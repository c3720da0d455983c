"""Linear layers on a CPU with their weights laid out in advance, by oneDNN inside torch.

``F.linear`` in single precision goes to torch's BLAS, which on some processors is half as fast as oneDNN: on
2 cores of an AMD EPYC with AVX-512, 4096×384→1536 took 21.8 ms, and 9.6 ms by oneDNN. The operations that
torch.compile uses for that, ``torch.ops.mkldnn``, are private: they are tried once for each precision, and
used if they are right and not slower.
"""

from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor
from torch.nn import functional as F

from torchpact.engines.attention.panels import FEW, PanelProduct, panels_fit, trial
from torchpact.engines.timing import timed
from torchpact.specs.attention import Projection

Function = Callable[[Tensor], Tensor]

FUNCTIONS: dict[str, Function] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
    "relu": F.relu,
}
"""Activations that have one kernel in torch, and can be fused."""
FUSED = {"": ("none", ""), "gelu": ("gelu", "none"), "gelu_tanh": ("gelu", "tanh"), "silu": ("swish", "")}
"""What oneDNN's operation calls them."""
PRECISIONS = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
"""Those that oneDNN is tried in, and by how much results may differ, relative to the largest."""
PROBE = (512, 256, 768)
"""Rows, inputs and outputs of the trial."""


class PackedLinear:
    """A projection and an activation, for rows: weights are copied into the layout that is fastest for them.

    Args:
        projection: The layer; its weights are read now.
        activation: What its outputs go through, if anything.
        factor: What each output is multiplied by, before the activation; see ``AttentionLayer.scale1``.

    Example:
        >>> linear = nn.Linear(8, 3)
        >>> packed, x = PackedLinear(Projection.of(linear), F.gelu), torch.randn(5, 8)
        >>> with torch.no_grad():
        ...     torch.allclose(packed(x), F.gelu(linear(x)), atol=1e-5)
        True

    """

    def __init__(
        self, projection: Projection, activation: Function | None = None, factor: Tensor | None = None
    ) -> None:
        weight, bias = projection.weight.detach(), projection.bias
        bias = None if bias is None else bias.detach()
        if factor is not None:
            factor = factor.detach().to(weight.dtype)
            weight = weight * factor[:, None]
            bias = None if bias is None else bias * factor
        self._lay_out(weight, bias, activation)

    def _lay_out(self, weight: Tensor, bias: Tensor | None, activation: Function | None) -> None:
        self.weight, self.bias, self.given = weight, bias, activation
        name = "" if activation is None else activation_name(activation)
        known = bool(name) or activation is None
        self.activation = FUNCTIONS.get(name, activation)
        self.name = name if known and panels_fit(weight) else None
        self.fused: tuple[str, str] | None = None
        if weight.device.type == "cpu" and packing_pays(weight.dtype):
            self.fused = FUSED[name] if known and name in FUSED else FUSED[""]
            if known and name in FUSED:
                self.activation = None
        # made when they are first needed, which may be never: a network is often called with few rows only
        self.panels: PanelProduct | None = None
        self.packed: Tensor | None = None

    def __getstate__(self) -> tuple[Tensor, Tensor | None, Function | None]:
        return self.weight, self.bias, self.given  # what oneDNN has laid out cannot be copied

    def __setstate__(self, state: tuple[Tensor, Tensor | None, Function | None]) -> None:
        self._lay_out(*state)

    def for_few(self) -> PanelProduct:
        """Return the product for few rows, where :attr:`name` says that there is one."""
        panels = self.panels
        if panels is None:
            assert self.name is not None
            panels = self.panels = PanelProduct(self.weight, self.bias, self.name)
        return panels

    def __call__(self, x: Tensor) -> Tensor:
        """Return the outputs of rows, (rows, inputs)."""
        if self.name is not None and len(x) <= FEW and x.dtype == self.weight.dtype:
            return self.for_few()(x)
        if self.fused is None:
            y = F.linear(x, self.weight, self.bias)
        else:
            if self.packed is None:
                self.packed = packed_weight(self.weight)
            y = packed_product(x, self.packed, self.bias, *self.fused)
        return y if self.activation is None else self.activation(y)


def activation_name(activation: Function) -> str:
    """Return which function of :data:`FUNCTIONS` an activation is, by its values; "" if it is none of these.

    Args:
        activation: A function of tensors.

    Example:
        >>> activation_name(nn.GELU()), activation_name(nn.SiLU()), activation_name(torch.tanh)
        ('gelu', 'silu', '')

    """
    grid = torch.linspace(-9, 9, 1441).view(1, -1)
    try:
        with torch.no_grad():
            values = activation(grid)
    except (RuntimeError, TypeError):  # one that has weights, of another device or precision
        return ""
    if not isinstance(values, Tensor) or values.shape != grid.shape:
        return ""
    # GELU and its approximation differ by 4e-4
    return next((name for name, f in FUNCTIONS.items() if torch.allclose(values, f(grid), atol=2e-6)), "")


@cache
def packing_pays(dtype: torch.dtype) -> bool:
    """Return whether packed weights give the same as ``F.linear``, and no later, on this machine.

    It is measured at the first call for a precision, for about 20 ms; where others use the processor at the
    same time it may go either way if there is little between the two.
    """
    if dtype not in PRECISIONS or not torch.backends.mkldnn.is_available():
        return False
    with torch.no_grad():
        x, weight, bias = trial(PROBE, dtype)
        try:
            packed = packed_weight(weight)
            for name, spelled in FUSED.items():
                function = FUNCTIONS.get(name, _same)
                for few in (x, x[:1], x[:37]):
                    expected = function(F.linear(few.float(), weight.float(), bias.float()))
                    wrong = packed_product(few, packed, bias, *spelled).float() - expected
                    if not wrong.abs().max() <= PRECISIONS[dtype] * expected.abs().max():
                        return False
            without = packed_product(x, packed, None, "none", "")
            if not torch.allclose(without, F.linear(x, weight), atol=PRECISIONS[dtype] * 64):
                return False
        except (RuntimeError, AttributeError, TypeError, NotImplementedError):
            return False
        ours, theirs = [], []
        for _ in range(5):
            ours.append(timed(lambda: packed_product(x, packed, bias, "none", "")))
            theirs.append(timed(lambda: F.linear(x, weight, bias)))
        return min(ours) <= 1.1 * min(theirs)


def packed_weight(weight: Tensor) -> Tensor:
    """Return a weight in the layout of oneDNN: a copy, for :func:`packed_product` only."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
    return packed


def packed_product(x: Tensor, packed: Tensor, bias: Tensor | None, function: str, variant: str) -> Tensor:
    """Return the product of rows with a packed weight, through a function of :data:`FUSED`."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, function, [], variant)
    return product


def _same(x: Tensor) -> Tensor:
    return x
