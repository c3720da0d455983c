"""Runners in the place of the adaptive parts of a copied network: the network runs as it is around them."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from torchpact.core.block import AdaptiveBlock
from torchpact.core.call_args import CallArgs
from torchpact.core.collect import report
from torchpact.core.criterion import Criterion, PoolingHead
from torchpact.core.halting_module import HaltingModule
from torchpact.core.modes import Thresholded
from torchpact.core.ponder import Ponder, is_unknown, without_details
from torchpact.core.state import check_state
from torchpact.core.thresholds import run_bounds_of
from torchpact.engines.base import NO_CONTEXT, Runner, Unsupported
from torchpact.engines.hooked import PatchedLayers
from torchpact.engines.reference import Reference
from torchpact.flops.metering import loop_of
from torchpact.specs import BlockSpec
from torchpact.specs.blocks import Bounds
from torchpact.specs.call_capture import step_call


class PatchedPart:
    """What is called in the place of a part's forward: a runner, or the part where that cannot run the call.

    Args:
        spec: What the part is.
        runner: What runs it; None is the part itself.

    """

    def __init__(self, spec: BlockSpec, runner: Runner | None = None) -> None:
        self.spec, self.reference, self.brief = spec, Reference(spec), not spec.keeps_details
        self.block: HaltingModule | None = loop_of(spec.module) if spec.run is None else spec.run
        self.compares = isinstance(spec.mode, Thresholded)
        self.runner = runner
        heads: Iterable[nn.Module] = () if self.block is None else self.block.all_heads
        self.weighs = any(isinstance(head, Criterion | PoolingHead) for head in heads)
        self.contiguous = False  # whether the network cannot take maps with their channels last

    def install(self) -> None:
        """Stand in the place of the part's forward, wherever it is called from."""
        self.spec.module.forward = self

    def remove(self) -> None:
        """Leave the part as it was."""
        del self.spec.module.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the part does."""
        spec = self.spec
        own = (run_bounds_of(self.block) or spec.bounds) if self.compares else None
        if kwargs.get("exits"):
            raise ValueError("expected a call without exits, which a deployed block skips, got exits=True")
        weights = kwargs.get("weights")
        if kwargs or len(args) != 1:
            given = step_call(CallArgs(args, kwargs))
            u: Any = given.args[0] if given.args else None
            context = CallArgs(given.args[1:], given.kwargs)
        else:  # the usual call of a small block takes little time
            u, context = args[0], NO_CONTEXT
        if not isinstance(u, Tensor) and isinstance(spec.module, AdaptiveBlock):
            check_state(u)
        if weights is not None and self.weighs:  # which engines do not tell heads
            known = CallArgs(context.args, {**context.kwargs, "weights": weights})
            ran, (*output, ponder) = False, self.reference(u, known)
        else:
            ran, (*output, ponder) = self._run(u, context, own)
        if self.contiguous:
            output = [x.contiguous() if isinstance(x, Tensor) else x for x in output]
        if ponder is None:
            return output[0]
        if self.brief and not is_unknown(ponder.probs):
            ponder = without_details(ponder)
        probs, steps, expected, cost, log_prob, own_weights, *_ = ponder
        weights = own_weights if weights is None else AdaptiveBlock.checked_weights(weights, steps)
        told = Ponder(probs, steps, expected, cost, log_prob, weights, spec.label, spec.price)
        if ran and self.block is not None:  # else the part has told by itself
            report(self.block, told)
        return output[0] if spec.run is not None else (*output, told)

    def _run(self, u: Any, context: CallArgs, bounds: Bounds) -> tuple[bool, Any]:
        """Return whether the runner ran it, and what the part returns."""
        if self.runner is not None:
            try:
                fixed = "mode" not in context.kwargs and "thresholds" not in context.kwargs
                if fixed and self.runner.accepts(u, context):
                    return True, self.runner(u, context, bounds)
            except Unsupported:  # such a call; the part runs it
                pass
        return False, self.reference(u, context)  # which sees the bounds of the run itself


Patches = Mapping[nn.Module, PatchedPart | PatchedLayers]


def patch(patches: Patches) -> None:
    """Have parts run by what stands for them, wherever they are called from."""
    for patched in patches.values():
        patched.install()


def unpatch(patches: Patches) -> None:
    """Leave parts as they were."""
    for patched in patches.values():
        patched.remove()


@contextmanager
def patched(patches: Patches) -> Iterator[None]:
    """Have them run so for a while."""
    patch(patches)
    try:
        yield
    finally:
        unpatch(patches)
