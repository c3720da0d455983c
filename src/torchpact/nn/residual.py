"""Steps that take the mask of active positions: u + f(u)·a."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from torchpact.core.callables import as_module
from torchpact.specs import Opaque, PositionwiseResidual, StepSpec, register_step, run_gated


class Residual(nn.Module):
    """A step u + f(u)·a that takes the active positions mask a (eq. 28).

    A block hands the mask, as ``gate``, to any step with a true attribute ``gated``, from the second
    iteration on. Use such steps where positions see each other, as pixels under a convolution do:
    what a halted neighbour shows is then the same in training and in evaluation.

    ``by_position`` says that f looks at one position at a time, as an MLP does, along the dimension
    ``features``: the last one or, for 1×1 convolutions, 1. Then f is given those positions only whose gate is
    open, in training too, where a relaxed mask is clipped to zero; outputs and gradients stay as they are.
    :mod:`torchpact.engines.generic.positionwise` says how; ``torchpact.specs.dense_execution()`` switches it
    off.

    Args:
        function: f, a module or another callable that keeps the shape.
        by_position: Whether f looks at one position at a time.
        features: The dimension that f works along, where it looks at one position at a time.

    Raises:
        TypeError: ``function`` is not callable.

    Example:
        >>> unit = Residual(nn.Conv2d(4, 4, 3, padding=1))
        >>> u = torch.randn(1, 4, 8, 8)
        >>> torch.equal(unit(u, gate=torch.zeros(1, 1, 8, 8)), u)
        True
        >>> mlp = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 4))
        >>> tokens, gate = torch.randn(2, 5, 4), torch.rand(2, 5, 1).round()
        >>> output = Residual(mlp, by_position=True)(tokens, gate=gate)
        >>> torch.allclose(output, tokens + mlp(tokens) * gate, atol=1e-6)
        True

    """

    gated = True

    def __init__(
        self, function: Callable[..., Tensor], *, by_position: bool = False, features: int = -1
    ) -> None:
        super().__init__()
        self.function = as_module(function)
        self.by_position, self.features = by_position, features

    def extra_repr(self) -> str:
        """Return the settings for ``print``."""
        return f"by_position=True, features={self.features}" if self.by_position else ""

    def forward(self, u: Tensor, *context: Any, gate: Tensor | None = None, **named: Any) -> Tensor:
        """Add the residual, where the gate is open.

        Args:
            u: The state.
            context: Goes to f.
            gate: The active positions mask, which broadcasts to the residual.
            named: Goes to f by name.

        Returns:
            The state after the step.

        Raises:
            ValueError: ``by_position``, and the gate has several values for a position.

        """
        if self.by_position and gate is not None:
            self._check(u, gate)
            if not named:
                moved = run_gated(self, positionwise_residual, u, gate, *context)
                if moved is not None:
                    return moved
        residual: Tensor = self.function(u, *context, **named)
        return u + (residual if gate is None else residual * gate)

    def _check(self, u: Tensor, gate: Tensor) -> None:
        if u.dim() < 2 or gate.size(self.features) != 1:
            raise ValueError(
                f"expected a gate of one value along dim {self.features}, got gates of {tuple(gate.shape)} "
                f"for a state of {tuple(u.shape)}"
            )


@register_step(Residual)
def positionwise_residual(step: Residual) -> StepSpec:
    """Return what a residual step is, for engines and FLOPs: more than opaque if it is one by position.

    Args:
        step: The step; its function is not copied.

    Example:
        >>> positionwise_residual(Residual(nn.Linear(4, 4), by_position=True))
        PositionwiseResidual(function=Linear(in_features=4, out_features=4, bias=True), features=-1)

    """
    return PositionwiseResidual(step.function, step.features) if step.by_position else Opaque(step)
