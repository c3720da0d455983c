"""A network in CUDA graphs, one for each size of its input: kernels start without a word from the host."""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.backends import cudnn

from torchpact.core.modes import Mode
from torchpact.core.ponder import Ponder, is_unknown, unknown, without_details
from torchpact.engines.block_spec import Unsupported

Outputs = tuple[Tensor, list[Ponder]]

MOST_GRAPHS = 8
"""Sizes that are captured; all of them together hold the memory of the largest. Others run as they are."""
MOST_SIZES = 64
"""Sizes that are remembered for having come once."""


class Recording:
    """What a function does with an input of some size, captured.

    ``generators`` are those that it draws from, apart from the device's own; capturing leaves them as they
    were. Raises :class:`Unsupported` for what cannot be captured.
    """

    def __init__(
        self,
        function: Callable[[Tensor], Any],
        example: Tensor,
        generators: Sequence[torch.Generator] = (),
        stream: torch.cuda.Stream | None = None,
        pool: Any = None,
    ) -> None:
        device = example.device
        stream = stream or torch.cuda.Stream(device)
        self.function = function  # whose weights the graph reads: they must not go before it
        self.graph = torch.cuda.CUDAGraph()
        for generator in generators:
            self.graph.register_generator_state(generator)
        # not of inference mode, within which alone they could be written to
        with torch.inference_mode(False), torch.no_grad(), torch.cuda.device(device):
            self.input = torch.empty_like(example, memory_format=torch.channels_last).copy_(example)
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream), _by_measurement():
                with restored([*generators, torch.cuda.default_generators[torch.cuda.current_device()]]):
                    for _ in range(2):  # what is done once, such as compiling, cannot be captured
                        function(self.input)
                try:
                    # other threads may do as they like meanwhile
                    with torch.cuda.graph(self.graph, pool, stream, capture_error_mode="thread_local"):
                        self.output = function(self.input)
                except RuntimeError as error:
                    raise Unsupported(f"no CUDA graph: {' '.join(str(error).splitlines()[:1])}") from error
            torch.cuda.current_stream().wait_stream(stream)

    def replay(self) -> Any:
        """Run it once more, on what ``input`` holds now."""
        self.graph.replay()
        return self.output


class Graphed:
    """A network that is replayed from graphs; several threads, on streams of their own, may call it.

    Images of a size that came before are captured, up to a number of sizes; what comes but once is not worth
    it. What is returned belongs to the caller. Where capturing fails, ``problem`` says why, and the network
    runs as it is.
    """

    def __init__(
        self, network: Callable[[Tensor], Outputs], generators: Sequence[torch.Generator] = ()
    ) -> None:
        self.network = network
        self.generators = generators
        self.problem: str | None = None
        self._recordings: dict[torch.Size, Recording] = {}
        self._came: set[torch.Size] = set()
        self._lock = threading.Lock()
        self._shared: dict[str, Any] = {}
        self._done: torch.cuda.Event | None = None

    def __call__(self, images: Tensor) -> Outputs:
        """Return what the network does."""
        if images.numel() and not torch.cuda.is_current_stream_capturing():  # not in a graph of the caller's
            with self._lock:  # while work is queued: nobody waits for the device
                recording = self._recordings.get(images.shape) or self._record_if_it_returns(images)
                if recording is not None:
                    return self._replay(recording, images)
        return self.network(images)

    def record(self, images: Tensor) -> None:
        """Capture images of this size now."""
        with self._lock:
            self._record(images)

    def _replay(self, recording: Recording, images: Tensor) -> Outputs:
        with torch.cuda.device(images.device):
            stream = torch.cuda.current_stream()
            if self._done is not None:
                stream.wait_event(self._done)  # of another stream: graphs share their memory
            recording.input.copy_(images)
            outputs = _copied(*recording.replay())
            self._done = stream.record_event()
        return outputs

    def _record_if_it_returns(self, images: Tensor) -> Recording | None:
        if images.shape in self._came:
            return self._record(images)
        if len(self._came) >= MOST_SIZES:
            self._came.clear()
        self._came.add(images.shape)
        return None

    def _record(self, images: Tensor) -> Recording | None:
        if self.problem is not None or len(self._recordings) >= MOST_GRAPHS:
            return None
        if not self._shared:
            self._shared = {
                "stream": torch.cuda.Stream(images.device),
                "pool": torch.cuda.graph_pool_handle(),
            }
        if self._done is not None:
            torch.cuda.current_stream(images.device).wait_event(self._done)
        try:
            recording = Recording(self.network, images, self.generators, **self._shared)
        except Unsupported as problem:
            self.problem = str(problem)
            return None
        self._recordings[images.shape] = recording
        return recording


def repeatable(
    function: Callable[[Tensor], Any], example: Tensor, generators: Sequence[torch.Generator] = ()
) -> Callable[[], Any]:
    """Return the function with its argument: captured, if it is for a GPU and waits for nothing.

    >>> repeatable(torch.abs, torch.tensor(-1.0))()
    tensor(1.)
    """
    if example.device.type == "cuda" and not getattr(function, "waits", False):
        try:
            return Recording(function, example, generators).replay
        except Unsupported:
            pass
    return partial(function, example)


def replayed(work: Callable[[], Any], device: torch.device) -> Callable[[], Any]:
    """Return work that starts by itself on a GPU, in a CUDA graph: its time is the device's, not the host's.

    >>> replayed(lambda: 3, torch.device("cpu"))()
    3
    """
    if device.type != "cuda":
        return work
    stream, graph = torch.cuda.Stream(device), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        work()  # what is done once cannot be captured
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            work()
    torch.cuda.current_stream(device).wait_stream(stream)

    def replay(_held: Callable[[], Any] = work) -> None:  # whose weights the graph reads
        graph.replay()

    return replay


def _copied(logits: Tensor, ponders: Sequence[Ponder]) -> Outputs:
    """Copies of all tensors, by a kernel for each of their types; what is unknown is one new NaN."""
    brief = [is_unknown(ponder.probs) for ponder in ponders]
    kept = [(p.steps, p.cost) if short else p for p, short in zip(ponders, brief, strict=True)]
    found = [x for each in kept for x in each if isinstance(x, Tensor)]
    held = {id(x): x for x in (logits, *found)}
    copies = {key: torch.empty_like(x) for key, x in held.items()}
    for kind in {x.dtype for x in held.values()}:
        keys = [key for key, x in held.items() if x.dtype == kind]
        torch._foreach_copy_([copies[key] for key in keys], [held[key] for key in keys])
    nan = unknown(logits.device) if any(brief) else None
    made = [ponder.map(lambda x: copies.get(id(x), x)) for ponder in ponders]
    return copies[id(logits)], [
        without_details(p, nan) if short else p for p, short in zip(made, brief, strict=True)
    ]


def generators_of(modes: Iterable[Mode]) -> list[torch.Generator]:
    """Return those that modes draw from, each once."""
    found = [getattr(mode, "generator", None) for mode in modes]
    return [*{id(each): each for each in found if each is not None}.values()]


@contextmanager
def restored(generators: Sequence[torch.Generator]) -> Iterator[None]:
    """Put generators back to where they were."""
    states = [generator.get_state() for generator in generators]
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


@contextmanager
def _by_measurement() -> Iterator[None]:
    """Let cuDNN try its algorithms, unless it has been told to take the same ones always."""
    before, cudnn.benchmark = cudnn.benchmark, cudnn.benchmark or not cudnn.deterministic
    try:
        yield
    finally:
        cudnn.benchmark = before
