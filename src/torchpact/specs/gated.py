"""How engines run gated steps on open positions only, in training too, and how steps ask for it.

The forward of a gated step is its formula: it computes every position and multiplies by the gate. Before
that it asks :func:`run_gated` whether an engine has registered a faster way for steps of its kind, with the
same values and gradients. :func:`dense_execution` switches these off: it leaves the reference.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from torchpact.specs.providers import step_spec
from torchpact.specs.steps import Opaque, StepSpec

F = TypeVar("F", bound=Callable[..., Tensor | None])
M = TypeVar("M", bound=nn.Module)
_EXECUTIONS: dict[type[Any], Callable[..., Tensor | None]] = {}
_ENABLED: ContextVar[bool] = ContextVar("gated_execution", default=True)


def register_gated(kind: type[Any]) -> Callable[[F], F]:
    """Register how gated steps with specs of one kind are run; used as a decorator.

    The function is called as ``function(spec, u, gate, *context)``, with the state before the step and a gate
    that broadcasts to it. It returns the state after the step, or None where the step should compute
    everything: too little would be saved, or the values of the gate cannot be read. It is differentiable.

    Args:
        kind: A class of specs.

    Returns:
        The decorator, which returns the function as it is. The latest function of a kind counts.

    Example:
        >>> from torchpact.specs import Opaque
        >>> class Doubled(Opaque):
        ...     pass
        >>> @register_gated(Doubled)
        ... def doubled(spec, u, gate):
        ...     return torch.where(gate > 0, 2 * u, u)
        >>> run_gated(nn.Identity(), Doubled, torch.ones(2), torch.tensor([0.0, 1.0]))
        tensor([1., 2.])

    """

    def register(function: F) -> F:
        _EXECUTIONS[kind] = function
        return function

    return register


def run_gated(
    step: M, spec_of: Callable[[M], StepSpec], u: Tensor, gate: Tensor | None, *context: Any
) -> Tensor | None:
    """Return the state after a gated step, if an engine has a faster way to compute it.

    Args:
        step: The step.
        spec_of: What makes the spec of the step; not called where no engine may run it.
        u: The state before the step.
        gate: The active positions mask; None if the step was given none.
        context: What else the step was given.

    Returns:
        The state after the step; None where the step should compute everything by its formula.

    """
    # the compiler does not trace context variables, and would bake in what a gate held
    if gate is None or torch.compiler.is_compiling() or not _ENABLED.get():
        return None
    spec = spec_of(step)
    function = _EXECUTIONS.get(type(spec))
    return None if function is None else function(spec, u, gate, *context)


def has_gated_execution(step: StepSpec) -> bool:
    """Return whether an engine can skip closed positions of a step, or of a part of an opaque step.

    Args:
        step: The spec of a step.

    Example:
        >>> mlp, gated = nn.Linear(8, 8), tp.Residual(nn.Linear(8, 8), by_position=True)
        >>> has_gated_execution(step_spec(gated)), has_gated_execution(step_spec(mlp))
        (True, False)

    """
    if not isinstance(step, Opaque):
        return type(step) in _EXECUTIONS
    return any(type(step_spec(part, hooks=True)) in _EXECUTIONS for part in step.module.modules())


@contextmanager
def dense_execution() -> Iterator[None]:
    """Let gated steps compute every position by their formulas, in this thread, for the duration.

    This is the reference that engines are tested against. What is recomputed later, as in activation
    checkpointing, must be recomputed under the same setting.

    Example:
        >>> unit = tp.models.TransformerUnit(256, heads=4)
        >>> u, gate = torch.randn(8, 64, 256), torch.zeros(8, 64, 1)
        >>> gate[:, :10] = 1
        >>> with dense_execution():
        ...     dense = unit(u, gate=gate)
        >>> torch.allclose(unit(u, gate=gate), dense, atol=1e-5)
        True

    """
    with _set(False):
        yield


@contextmanager
def gated_execution() -> Iterator[None]:
    """Let gated steps be run by what engines have registered, as they are by default; ends a dense execution.

    Example:
        >>> with dense_execution(), gated_execution():
        ...     runs_open_positions_only()
        True

    """
    with _set(True):
        yield


def runs_open_positions_only() -> bool:
    """Whether gated steps may be run by engines, in this thread; see :func:`dense_execution`."""
    return _ENABLED.get()


@contextmanager
def _set(enabled: bool) -> Iterator[None]:
    before = _ENABLED.set(enabled)
    try:
        yield
    finally:
        _ENABLED.reset(before)
