"""A network in CUDA graphs, one for each size of its input: kernels start without the host."""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.backends import cudnn

from torchpact.core.call_args import CallArgs
from torchpact.core.modes import Mode
from torchpact.core.ponder import Ponder, is_unknown, unknown, without_details
from torchpact.engines.base import NO_CONTEXT, NetworkRunner, Runner, Unsupported
from torchpact.specs import BlockSpec
from torchpact.specs.blocks import Bounds

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
            layout = torch.channels_last if example.dim() == 4 else torch.preserve_format
            self.input = torch.empty_like(example, memory_format=layout).copy_(example)
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


class Graphed(NetworkRunner):
    """A network that is replayed from graphs; several threads, on streams of their own, may call it.

    Images of a size that came before are captured, up to a number of sizes; what comes but once is not worth
    it. What is returned belongs to the caller. Where capturing fails, ``problem`` says why, and the network
    runs as it is.
    """

    def __init__(self, network: Callable[..., Outputs], generators: Sequence[torch.Generator] = ()) -> None:
        self.network = network
        self.generators = generators
        self.problem: str | None = None
        self._recordings: dict[torch.Size, Recording] = {}
        self._came: set[torch.Size] = set()
        self._lock = threading.Lock()
        self._shared: dict[str, Any] = {}
        self._done: torch.cuda.Event | None = None

    def __call__(self, images: Tensor, bounds: Mapping[str, Bounds] | None = None) -> Outputs:
        """Return what the network does; with other thresholds than a graph has, without graphs."""
        if bounds is not None:
            return self.network(images, bounds)
        if images.numel() and not torch.cuda.is_current_stream_capturing():  # not in a graph of the caller's
            with self._lock:  # while work is queued; no thread waits for the device
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


class GraphedBlock(Runner):
    """A block that is replayed from graphs, where it is given maps alone and has the thresholds of its mode.

    Args:
        run: What runs the block.
        generators: Those that its mode draws from.

    """

    def __init__(self, run: Runner, generators: Sequence[torch.Generator] = ()) -> None:
        self.run = run
        self.graphed = Graphed(self._outputs, generators)

    def _outputs(self, u: Tensor, bounds: Any = None) -> Outputs:
        output, ponder = self.run(u)
        assert isinstance(output, Tensor)
        return output, [] if ponder is None else [ponder]

    def __call__(
        self, u: Any, context: CallArgs = NO_CONTEXT, bounds: Bounds = None
    ) -> tuple[Any, Ponder | None]:
        """Run the block."""
        if bounds is not None or context.values:
            return self.run(u, context, bounds)
        output, ponders = self.graphed(u)
        return output, ponders[0] if ponders else None

    def accepts(self, u: Any, context: CallArgs) -> bool:
        """As the runner says."""
        return self.run.accepts(u, context)


def as_called(
    network: NetworkRunner, example: Tensor, generators: Sequence[torch.Generator]
) -> tuple[NetworkRunner, str | None]:
    """Return a network as users will call it, in CUDA graphs where those help; or why there are none."""
    if example.device.type != "cuda" or network.skip_cuda_graph:
        return network, None
    if network.host_sync:
        return network, "no CUDA graph: an engine waits for the device to know how much is left"
    graphed = Graphed(network, generators)
    graphed.record(example)
    return (graphed, None) if graphed.problem is None else (network, graphed.problem)


def as_called_block(run: Runner, call: CallArgs, spec: BlockSpec, notes: dict[str, None]) -> Runner:
    """Return a runner of a single block in CUDA graphs where those help; why it has none is noted."""
    u = call.args[0]
    if not isinstance(u, Tensor) or u.device.type != "cuda" or run.skip_cuda_graph or len(call.values) > 1:
        return run
    if run.host_sync:
        notes["no CUDA graph: an engine waits for the device to know how much is left"] = None
        return run
    graphed = GraphedBlock(run, generators_of([spec.mode]))
    graphed.graphed.record(u)
    if graphed.graphed.problem is not None:
        notes[graphed.graphed.problem] = None
        return run
    return graphed


def repeatable(
    function: Callable[[Tensor], Any],
    example: Tensor,
    generators: Sequence[torch.Generator] = (),
    host_sync: bool = False,
) -> Callable[[], Any]:
    """Return the function with its argument: captured, if it is for a GPU and waits for nothing.

    >>> repeatable(torch.abs, torch.tensor(-1.0))()
    tensor(1.)
    """
    if example.device.type == "cuda" and not host_sync:
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
