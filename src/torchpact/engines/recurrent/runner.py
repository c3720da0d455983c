"""What the engines of recurrent layers have in common: calls, runners, and the check of an example."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from torchpact.checks import readable
from torchpact.core import state as _state
from torchpact.core.call_args import CallArgs
from torchpact.core.modes import Mode, Thresholded, as_mode
from torchpact.core.state import State
from torchpact.core.thresholds import Thresholds
from torchpact.engines.base import Engine, Runner, Unsupported
from torchpact.engines.recurrent.layer import Layer
from torchpact.nn.rnn import AdaptiveRNN
from torchpact.specs import BlockSpec, NetworkSpec
from torchpact.specs.blocks import Bounds
from torchpact.specs.providers import is_watched

_NOTHING = CallArgs()


class LayerCall(NamedTuple):
    """What a recurrent layer is called with, and what decides in this call."""

    input: Any
    state: State | None
    lengths: Tensor | Sequence[int] | None
    mode: Mode
    bounds: Bounds

    @property
    def data(self) -> Tensor:
        """The numbers of the input, packed or not."""
        data: Tensor = self.input.data if isinstance(self.input, PackedSequence) else self.input
        return data

    @property
    def bound(self) -> float | None:
        """What all logits must exceed in thresholded mode; None where that differs, or in another mode."""
        if type(self.mode) is not Thresholded:
            return None
        if not self.bounds:
            return self.mode.bound
        return self.bounds[0] if len({*self.bounds}) == 1 else None


class RecurrentRunner(Runner):
    """A recurrent layer ready to run, without gradients.

    It is called with the input of the layer, a tensor or a ``PackedSequence``, and with a context of the
    other arguments of :meth:`AdaptiveRNN.forward <torchpact.AdaptiveRNN.forward>`, by position and by name.
    It returns what the layer does: the outputs, the final state and the ponder.
    """

    def __init__(self, module: AdaptiveRNN) -> None:
        self.module = module

    @torch.no_grad()
    def __call__(self, u: Any, context: CallArgs = _NOTHING, bounds: Bounds = None) -> Any:
        """Run the layer; see :class:`~torchpact.engines.base.Runner`."""
        call = call_of(self.module, u, context, bounds)
        reason = self.refusal(call)
        if reason is not None:
            raise Unsupported(reason)
        return self.run(call)

    def accepts(self, u: Any, context: CallArgs) -> bool:
        """Whether it can run such a call."""
        return self.refusal(call_of(self.module, u, context)) is None

    @abstractmethod
    def refusal(self, call: LayerCall) -> str | None:
        """Return None if it can run a call, or one line that says why not."""

    @abstractmethod
    def run(self, call: LayerCall) -> Any:
        """Run a call that was not refused."""


class RecurrentEngine(Engine):
    """An engine for recurrent layers; an example's first argument is the input of the layer."""

    recurrent: ClassVar[bool] = True

    def supports(self, spec: BlockSpec | NetworkSpec, example: CallArgs) -> str | None:
        """Return None if it can run such a layer on such a call, or one line that says why not."""
        try:
            self.check(*_taken_apart(spec, example))
        except Unsupported as reason:
            return str(reason)
        return None

    def build(self, spec: BlockSpec | NetworkSpec, example: CallArgs) -> RecurrentRunner:
        """Return a runner of a layer; its weights are laid out now, so build another when they change.

        Raises:
            Unsupported: It cannot run such a layer.

        """
        block, call = _taken_apart(spec, example)
        self.check(block, call)
        return self.make(block, call)

    @abstractmethod
    def check(self, spec: BlockSpec, call: LayerCall) -> None:
        """Raise :class:`Unsupported` if it cannot run such a layer on such a call."""

    @abstractmethod
    def make(self, spec: BlockSpec, call: LayerCall) -> RecurrentRunner:
        """Return a runner of a layer that was checked."""


def rnn_of(spec: BlockSpec) -> AdaptiveRNN:
    """Return the layer that a spec is of.

    Raises:
        Unsupported: It is none, or its calls are watched or changed.

    """
    module = spec.module
    if not isinstance(module, AdaptiveRNN):
        raise Unsupported(f"expected an AdaptiveRNN, got {type(module).__name__}")
    if is_watched(module) or "forward" in vars(module):
        raise Unsupported("expected a layer without hooks or a forward of its own, got one with")
    return module


def call_of(module: AdaptiveRNN, u: Any, context: CallArgs, bounds: Bounds = None) -> LayerCall:
    """Return a call of a layer; thresholds among its arguments come before the network's ``bounds``."""

    def bound(
        state: State | None = None,
        *,
        lengths: Tensor | Sequence[int] | None = None,
        mode: Mode | str | None = None,
        thresholds: Thresholds | float | None = None,
    ) -> LayerCall:
        chosen, found = module.block.mode if mode is None else as_mode(mode), bounds
        if thresholds is not None or bounds is None:
            found = module.block.bounds_of(chosen, thresholds)
        return LayerCall(u, state, lengths, chosen, found)

    return bound(*context.args, **context.kwargs)


def kernel_refusal(layer: Layer, call: LayerCall) -> str | None:
    """Return why kernels cannot run a call, or None if they can.

    Args:
        layer: The weights that they read.
        call: A call of the layer.

    """
    data = call.data
    if not isinstance(data, Tensor) or not readable(data):
        return "expected values that can be read, got a call that is compiled, captured or transformed"
    if call.bound is None:
        return f"expected the mode thresholded with one threshold for all heads, got {call.mode}"
    for tensor in (data, *(() if call.state is None else _state.parts(call.state))):
        if tensor.dtype != layer.dtype or tensor.device != layer.device:
            wanted = f"expected inputs and states of {layer.dtype} on {layer.device}"
            return f"{wanted}, got {tensor.dtype} on {tensor.device}"
    if torch.is_autocast_enabled(layer.device.type):
        return "expected a call without autocast, got one with"
    if torch._C._len_torch_dispatch_stack():  # those would not see what kernels do
        return "expected a call outside of dispatch modes, got one inside"
    return None


def _taken_apart(spec: BlockSpec | NetworkSpec, example: CallArgs) -> tuple[BlockSpec, LayerCall]:
    """Return the spec of a layer, and an example as a call of it."""
    if not isinstance(spec, BlockSpec):
        raise Unsupported(f"expected an AdaptiveRNN, got {type(spec.module).__name__}")
    module, named = rnn_of(spec), dict(example.kwargs)
    args = example.args or ((named.pop("input"),) if "input" in named else ())
    if not args:
        raise Unsupported("expected an example with the input of the layer, got none")
    return spec, call_of(module, args[0], CallArgs(args[1:], named))
