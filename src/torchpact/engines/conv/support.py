"""What engines of convolutional blocks ask of a block, and of a call: one line says what is missing."""

from collections.abc import Sequence

from torch import Tensor

from torchpact.core.callables import unwrapped
from torchpact.core.layer_run import LayerRun
from torchpact.core.modes import Mode, Thresholded
from torchpact.specs import BlockSpec, ConvHead, ConvUnit, CriterionHead, HeadSpec, Opaque, StepSpec
from torchpact.specs.blocks import Bounds


def conv_block_problem(spec: BlockSpec, *, one_precision: bool = True) -> str | None:
    """Return why a block is none of residual units with halting heads, as engines know them; None if it is.

    Args:
        spec: The block.
        one_precision: Whether all of its weights must have the same precision, and be on the same device.

    Returns:
        One line, without the name of an engine, or None.

    Example:
        >>> from torchpact.models import HaltingHead, ResidualUnit
        >>> from torchpact.specs import block_spec
        >>> block = tp.AdaptiveBlock([ResidualUnit(16, 16), ResidualUnit(16, 32)], [HaltingHead(16)])
        >>> conv_block_problem(block_spec(block))
        'expected step 2 to map 16 channels to 16 with stride 1, got 16 to 32 with stride 1'

    """
    kinds = {_kind_of(step) for step in spec.steps}
    if len(kinds) != 1 or not kinds <= {"ResidualUnit", "Bottleneck"}:
        return f"expected a block whose steps are all ResidualUnit or all Bottleneck, got {_names(kinds)}"
    if spec.adaptive and spec.max_steps < 2:
        return f"expected a block of at least two units, got {spec.max_steps}"
    units, heads = spec.conv_units, spec.conv_heads
    if spec.reason:
        return spec.reason
    if units is None:  # of classes of their own, by these names
        return "expected a block whose steps are all ResidualUnit or all Bottleneck of torchpact.models"
    if heads is None:
        others = {_kind_of(head) for head in spec.heads if not isinstance(head, ConvHead)}
        known = "of torchpact.models.HaltingHead"
        if isinstance(spec.module, LayerRun):
            known = "as tp.adapt makes them by default"
        return f"expected halting heads {known}, got {_names(others)}"
    precision = _precision_problem(spec) if one_precision else None
    problem = precision or _unit_problem(spec, units) or _head_problem(heads, units)
    if problem is None and spec.hooked:
        return "expected units in an nn.Sequential of their own, got units that the network calls one by one"
    return problem


def _kind_of(part: StepSpec | HeadSpec) -> str:
    if isinstance(part, ConvUnit):
        return "Bottleneck" if part.bottleneck else "ResidualUnit"
    if isinstance(part, CriterionHead):
        return f"the criterion {type(part.module).__name__}"
    return type(unwrapped(part.module) if isinstance(part, Opaque) else part).__name__


def _names(kinds: set[str]) -> str:
    return ", ".join(sorted(kinds))


def _precision_problem(spec: BlockSpec) -> str | None:
    run = spec.module if isinstance(spec.module, LayerRun) else spec.run
    modules = [spec.module] if run is None else [run, *run.layers]
    buffers = [buffer for each in modules for buffer in each.buffers() if buffer.is_floating_point()]
    parameters = [parameter for each in modules for parameter in each.parameters()]
    found = {f"{tensor.dtype} on {tensor.device}" for tensor in (*parameters, *buffers)}
    if len(found) < 2:
        return None
    return f"expected all of the block in one precision on one device, got {_names(found)}"


def _unit_problem(spec: BlockSpec, units: Sequence[ConvUnit]) -> str | None:
    """Return why units do not follow each other: only the first of an adaptive block may change the map."""
    channels, between = units[0].channels, units[0].weight.size(0)
    for number, unit in enumerate(units, start=1):
        name, given = f"step {number}", unit.weight.size(1)
        may_change = not spec.adaptive or (number == 1 and not spec.shared)
        if not may_change and (given, unit.channels, unit.stride) != (channels, channels, 1):
            return (
                f"expected {name} to map {channels} channels to {channels} with stride 1, got {given} to "
                f"{unit.channels} with stride {unit.stride}"
            )
        if unit.weight.size(0) != between:
            return (
                f"expected {name} to have {between} channels between its convolutions, as step 1 has, got "
                f"{unit.weight.size(0)}"
            )
    return None


def _head_problem(heads: Sequence[ConvHead], units: Sequence[ConvUnit]) -> str | None:
    """Return why heads are not for these maps, or differ in what they are."""
    groups = {head.group for head in heads} | {unit.group for unit in units}
    channels = units[0].channels
    if len(groups) > 1:
        found = ", ".join(map(str, sorted(groups)))
        return f"expected one size of patches for all units and heads, got {found}"
    kinds = {
        (_size_of(head.taps), _size_of(head.pool), head.norm is None, head.pooled_norm is None)
        for head in heads
    }
    if len(kinds) > 1:
        return "expected heads that are alike: all for pixels or for images, with norms or without"
    if heads and heads[0].taps is None and heads[0].group > 1:
        return "expected decisions for patches by heads with a convolution, got some for images"
    for number, head in enumerate(heads, start=1):
        if head.channels != channels:
            return f"expected head {number} to look at {channels} channels, got {head.channels}"
    return None


def _size_of(weight: Tensor | None) -> int:
    """Return how many taps a weight of a head has; 0 where there is none."""
    return 0 if weight is None else weight[0, 0].numel()


def decides_per_pixel(spec: BlockSpec) -> bool:
    """Whether every pixel has a decision of its own, by heads without batch norm."""
    heads = spec.conv_heads or ()
    return bool(heads) and all(h.taps is not None and h.norm is None and h.group == 1 for h in heads)


def as_matrix(weight: Tensor) -> Tensor:
    """Return the weights of a convolution as a matrix of (taps · inputs, outputs)."""
    return weight.permute(2, 3, 1, 0).reshape(-1, len(weight)).contiguous()


def bounds_of(mode: Mode, bounds: Bounds, heads: int) -> tuple[float, ...] | None:
    """Return what the logits of each head must exceed in a run; None where the mode compares with no bound.

    Args:
        mode: What decides.
        bounds: Those of the run, or None for the threshold of the mode.
        heads: How many heads decide.

    Raises:
        ValueError: There are bounds, but for another number of heads, or a mode that compares nothing.

    Example:
        >>> bounds_of(tp.Thresholded(), None, heads=2), bounds_of(tp.Discrete(), None, heads=2)
        ((0.0, 0.0), None)

    """
    if bounds is not None and not isinstance(mode, Thresholded):
        raise ValueError(f"expected the mode thresholded with thresholds, got {mode}")
    if bounds is not None and len(bounds) != heads:
        raise ValueError(f"expected {heads} thresholds for as many heads, got {len(bounds)}")
    if bounds is None and isinstance(mode, Thresholded):
        return (mode.bound,) * heads
    return None if bounds is None else tuple(bounds)
