"""An iteration of training as one CUDA graph: the host does nothing but start it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from torchpact_recipes.training.compiling import default_generator
from torchpact_recipes.training.state import copies, put_back

if TYPE_CHECKING:
    from torchpact_recipes.training.loop import BaseLearner


class CapturedStep:
    """A function recorded once and replayed from then on, on a stream and with noise of its own.

    Several run beside each other, and none depends on what the others draw.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)
        # graphs read their seed when they run: one that several share would be overwritten by the next
        self._noise = default_generator(device).clone_state()
        self._graph: torch.cuda.CUDAGraph | None = None

    @property
    def recorded(self) -> bool:
        """Whether there is something to replay."""
        return self._graph is not None

    def record(self, function: Callable[[], None], release: Callable[[], None], warm_up: int = 3) -> None:
        """Run the function a few times, call ``release`` to drop what these left, and record it.

        Both are to be called on the stream; what the function did to its tensors is the caller's to undo.
        """
        graph = torch.cuda.CUDAGraph()
        for _ in range(warm_up):
            function()
        torch.cuda.synchronize(self.device)
        release()
        with torch.cuda.graph(graph, stream=self.stream):
            function()
        self._graph = graph

    def replay(self) -> None:
        """Do again what was recorded, with fresh noise of the generator's present seed."""
        assert self._graph is not None
        self._graph.replay()

    @contextmanager
    def on_stream(self) -> Iterator[None]:
        """Within it, what is asked of the device is done on this stream, with this noise."""
        generator = default_generator(self.device)
        others = generator.graphsafe_get_state()
        generator.graphsafe_set_state(self._noise)
        try:
            with torch.cuda.stream(self.stream):
                yield
        finally:
            generator.graphsafe_set_state(others)


@torch.enable_grad()
def record_step(learner: "BaseLearner", captured: CapturedStep) -> None:
    """Record the step of a learner; its state and sums stay as they were."""
    torch.cuda.synchronize(learner.device)  # weights may still be on their way, from another stream
    before, sums = copies(learner.state()), learner.sums.clone()
    learner.record(captured)
    put_back(learner.state(), before)
    learner.sums.copy_(sums)
