"""The engine contract: how the active positions of a block get computed. Modes decide, engines execute.

An engine is a file with a subclass of :class:`Engine` that is registered; :mod:`torchpact.engines.registry`
has the table. It reads specs only. What it builds is a :class:`Runner`, whose outputs are those of the dense
engine.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from torchpact.core.call_args import CallArgs
from torchpact.core.ponder import Ponder
from torchpact.core.state import State
from torchpact.specs import BlockSpec, NetworkSpec
from torchpact.specs.blocks import Bounds

NO_CONTEXT = CallArgs()
"""Steps are given nothing but the state."""


class Unsupported(ValueError):
    """Why an engine cannot run a block or a call; one line."""


class Runner(ABC):
    """A block ready to run, without gradients; several threads may call it."""

    host_sync: bool = False
    """Whether it waits for values of the device, which no CUDA graph can do."""
    skip_cuda_graph: bool = False
    """Whether it starts so few kernels that a CUDA graph would gain nothing."""

    @abstractmethod
    def __call__(
        self, u: State, context: CallArgs = NO_CONTEXT, bounds: Bounds = None
    ) -> tuple[State, Ponder | None]:
        """Run the block.

        Args:
            u: The state; maps are channels last.
            context: What else its steps are given.
            bounds: What logits must exceed in thresholded mode; None is the threshold of the mode.

        Returns:
            What the part returns: the output, and what every position did (None where it is not adaptive); of
            a recurrent layer the outputs, the final state, and what every position did.

        Raises:
            Unsupported: It cannot run this call; the dense engine does.

        """

    def accepts(self, u: State, context: CallArgs) -> bool:
        """Whether it can run such a call."""
        return not (context.args or context.kwargs)

    def tune(self, u: State, context: CallArgs) -> None:  # noqa: B027 (most have nothing to choose)
        """Choose what is fastest for calls like this one; called once, before it is measured."""


class NetworkRunner(ABC):
    """A network ready to run as a whole, from images to logits and ponders."""

    host_sync: bool = False
    skip_cuda_graph: bool = False

    @abstractmethod
    def __call__(
        self, images: Tensor, bounds: Mapping[str, Bounds] | None = None
    ) -> tuple[Tensor, list[Ponder]]:
        """Run the network; ``bounds`` are those of each block by name.

        Raises:
            Unsupported: It cannot run such images; block by block they run.

        """

    def tune(self, images: Tensor) -> None:  # noqa: B027 (most have nothing to choose)
        """Choose what is fastest for calls like this one; called once, before it is measured."""


class Engine(ABC):
    """One way to compute the active positions of a block, or of a network.

    Attributes:
        name: What it is called in ``deploy(engines=[…])``.
        devices: The types of devices that it runs on.
        whole: Whether it takes a :class:`~torchpact.specs.NetworkSpec` and runs a network as a whole.
        tolerance: By how much outputs may differ from the dense engine's, relative to their size, by
            precision.
        host_sync: Whether its runners wait for values of the device.
        on_request: Whether it is tried only when asked for, because it takes long to build.
        hooked: Whether it runs layers that the network calls one by one, as those of an adapted network.
        recurrent: Whether it runs recurrent layers, and nothing else.

    """

    name: ClassVar[str]
    devices: ClassVar[tuple[str, ...]] = ("cpu", "cuda")
    whole: ClassVar[bool] = False
    tolerance: ClassVar[Mapping[torch.dtype, float]] = {torch.float32: 1e-4}
    host_sync: ClassVar[bool] = False
    on_request: ClassVar[bool] = False
    hooked: ClassVar[bool] = False
    recurrent: ClassVar[bool] = False

    kinds: ClassVar[tuple[type, ...]] = ()
    """The kinds of steps that it is for, as classes of specs; () is any."""

    def concerns(self, spec: BlockSpec | NetworkSpec) -> bool:
        """Whether it is for parts of this kind; why it cannot run others is not worth a note."""
        if isinstance(spec, NetworkSpec):
            return self.whole
        if spec.hooked or self.hooked:
            return spec.hooked and self.hooked
        if self.recurrent:
            return spec.recurrent
        return not self.kinds or any(isinstance(step, self.kinds) for step in spec.steps)

    @abstractmethod
    def supports(self, spec: BlockSpec | NetworkSpec, example: CallArgs) -> str | None:
        """Return None if it can run such a block on such a call, or one line that says why not.

        Args:
            spec: What is to be run.
            example: A call of it.

        """

    @abstractmethod
    def build(self, spec: BlockSpec | NetworkSpec, example: CallArgs) -> Any:
        """Return a :class:`Runner`, or for a network a :class:`NetworkRunner`.

        Raises:
            Unsupported: It turns out that it cannot.

        """
