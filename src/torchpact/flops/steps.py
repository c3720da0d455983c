"""What a step costs each example, where its spec tells."""

from collections.abc import Sequence

from torch import Tensor

from torchpact.specs import StepSpec


def step_flops(step: StepSpec, active: Tensor, shape: Sequence[int]) -> Tensor | None:
    """Return the FLOPs of a step for each example, or None where they are metered.

    Args:
        step: What the step is.
        active: Which positions run it, of the shape of the decisions.
        shape: That of its output.

    """
    return None
