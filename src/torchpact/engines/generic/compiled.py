"""The dense engine by torch.compile: everything is computed and masked, by kernels made for the block.

Masks become part of the kernels around them, so that little but the heads is added to the plain network. It
takes minutes to compile, for on a GPU convolutions are tried out.
"""

import threading
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from torchpact.checks import one_line
from torchpact.core import state
from torchpact.core.call_args import CallArgs
from torchpact.core.modes import Mode
from torchpact.core.ponder import Ponder
from torchpact.core.state import State
from torchpact.engines.base import NO_CONTEXT, Engine, Runner, Unsupported
from torchpact.engines.build_cache import protect_compiler_caches
from torchpact.engines.generic.dense import DENSE
from torchpact.specs import BlockSpec, NetworkSpec
from torchpact.specs.blocks import Bounds


class Compiled(Engine):
    """Blocks of any steps, in modes that draw nothing."""

    name = "compiled"
    on_request = True
    tolerance: ClassVar[Mapping[torch.dtype, float]] = {
        torch.float32: 1e-4,
        torch.float16: 1e-2,
        torch.bfloat16: 1e-2,
    }

    def supports(self, spec: BlockSpec | NetworkSpec, example: CallArgs) -> str | None:
        """Return None if it can run a block, or one line that says why not."""
        if isinstance(spec, NetworkSpec):
            return "compiled: expected a block, got a network"
        if spec.heads and type(spec.mode).noise is not Mode.noise:
            return f"compiled: expected a mode that draws nothing, got {spec.mode}"
        if spec.recurrent:
            return "compiled: expected a block, got a recurrent layer"
        if spec.hooked:
            return "compiled: expected a block, got layers that a network calls one by one"
        return None

    def build(self, spec: BlockSpec | NetworkSpec, example: CallArgs = NO_CONTEXT) -> "CompiledRunner":
        """Return the block compiled, for states of the size that comes first."""
        assert isinstance(spec, BlockSpec)
        problem = self.supports(spec, example)
        if problem is not None:
            raise Unsupported(problem)
        return CompiledRunner(DENSE.build(spec, example))


class CompiledRunner(Runner):
    """A block for states of one size and layout, and for one set of thresholds.

    Other calls, and those with more than a state, run densely as they are: compiling takes long.
    """

    def __init__(self, run: Runner) -> None:
        self.run = run
        self.compiled: Any = None
        self.known: object = None
        self._lock = threading.Lock()

    def __call__(
        self, u: State, context: CallArgs = NO_CONTEXT, bounds: Bounds = None
    ) -> tuple[State, Ponder | None]:
        """Run the block."""
        # it would be compiled anew for inference mode
        with torch.inference_mode(False), torch.no_grad():
            u = state.map_state(lambda part: part.clone() if part.is_inference() else part, u)
            parts = state.parts(u)
            kind = [(part.shape, part.stride()) for part in parts], bounds
            if self.known is None and not context.values:
                self._compile(kind, parts[0].device)
            if kind == self.known and not context.values:
                output, ponder = self.compiled(u, bounds)
                return output, ponder
            return self.run(u, context, bounds)

    def tune(self, u: State, context: CallArgs) -> None:
        """Compile for a call like this one, with the threshold of the mode.

        Raises:
            Unsupported: It cannot be compiled.

        """
        try:
            self(u, context)
        except Exception as error:  # by whatever name torch.compile has for it
            raise Unsupported(f"compiled: {one_line(error)}") from error

    def accepts(self, u: State, context: CallArgs) -> bool:
        """Whether it can run such a call: as the dense engine does."""
        return True

    def _compile(self, kind: object, device: torch.device) -> None:
        with self._lock:
            if self.known is None:
                protect_compiler_caches()
                run, mode = self.run, "max-autotune-no-cudagraphs" if device.type == "cuda" else None
                self.compiled = torch.compile(
                    lambda u, bounds: run(u, bounds=bounds), mode=mode, dynamic=False
                )
                self.known = kind


COMPILED = Compiled()
