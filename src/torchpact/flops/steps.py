"""What a step costs each example, where that is not its share of the cost of all positions."""

from collections.abc import Sequence

from torch import Tensor

from torchpact.flops.attention import attention_flops
from torchpact.specs import AttentionLayer, Opaque, StepSpec, price_of


def step_flops(
    step: StepSpec, active: Tensor, shape: Sequence[int], real: Tensor | None = None
) -> Tensor | None:
    """Return the FLOPs of a step for each example, or None where they are metered.

    Args:
        step: What the step is.
        active: Which positions run it, of the shape of the decisions.
        shape: That of its output.
        real: False for padding, (batch, length); None where there is none.

    Returns:
        Integers of shape (batch,), or None.

    """
    if isinstance(step, AttentionLayer):
        return attention_flops(step, active, shape[1], real)
    price = price_of(step.module) if isinstance(step, Opaque) else None
    return None if price is None else price(active, shape)
