"""Text as streams that are read side by side, and what a network makes of them, in bits a character."""

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from torchpact import Mode, use_mode
from torchpact.checks import check_count
from torchpact.core import state as _state
from torchpact.core.state import State
from torchpact.models import SequenceNet
from torchpact_recipes.training.cuda_graph import CapturedStep
from torchpact_recipes.training.ensemble.text import can_read, read_single
from torchpact_recipes.training.state import seeded

PASSAGE = 240
"""Of how many characters at the beginning of a text the steps are put down one by one."""

KINDS = ("letter", "digit", "space", "newline", "other")


class Streams:
    """A text cut into ``batch`` streams of equal length, which are read ``window`` characters at a time.

    >>> streams = Streams(torch.arange(13, dtype=torch.uint8), batch=2, window=3)
    >>> inputs, targets = streams[1]
    >>> inputs.tolist(), targets.tolist()
    ([[3, 4, 5], [9, 10, 11]], [[4, 5, 6], [10, 11, 12]])
    >>> len(streams)
    2
    """

    def __init__(self, text: Tensor, batch: int, window: int) -> None:
        check_count("batch", batch)
        check_count("window", window)
        if len(text) <= batch * window:
            raise ValueError(
                f"expected a text of more than {batch * window} characters for {batch} streams of windows "
                f"of {window}, got {len(text)}"
            )
        self.text, self.window = text, window
        self.length = (len(text) - 1) // batch
        self._starts = torch.arange(batch, device=text.device).unsqueeze(1) * self.length

    def __len__(self) -> int:
        return self.length // self.window

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        return self._read(number * self.window, self.window)

    def whole(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Return all windows, and what is left after them."""
        for start in range(0, self.length, self.window):
            yield self._read(start, min(self.window, self.length - start))

    def _read(self, start: int, count: int) -> tuple[Tensor, Tensor]:
        index = self._starts + torch.arange(start, start + count, device=self.text.device)
        return self.text[index].long(), self.text[index + 1].long()


@dataclass(frozen=True)
class TextEvaluation:
    """What a network did on a text, in one mode; steps are those of a character, summed over layers."""

    bits_per_character: float
    accuracy: float
    nll: float
    steps: float
    steps_by_kind: dict[str, float]
    """The mean on reading a letter, a digit, a space, the end of a line, or anything else."""
    characters: int
    passage: str
    """How the text begins, byte by byte."""
    passage_steps: list[int]
    """The steps on reading each character of the passage."""
    passage_bits: list[float]
    """What each character of the passage cost, 8 for the first, of which nothing was known."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, such as JSON holds."""
        return asdict(self)


@torch.no_grad()
def evaluate_on_text(
    model: SequenceNet,
    text: Tensor,
    mode: Mode | str | None = None,
    *,
    batch: int | None = None,
    window: int = 100,
    seed: int = 0,
) -> TextEvaluation:
    """Evaluate on a text; but for the first character of each stream, everything is predicted once.

    There are ``batch`` streams, by default as many as have 5000 characters each, so that few are read
    with little before them.
    """
    device = next(model.parameters()).device
    text = text.to(device)
    streams = Streams(text, batch or max(len(text) // 5000, 1), min(window, len(text) - 1))
    kind_of = torch.tensor([_kind(byte) for byte in range(256)], device=device)
    sums = torch.zeros(2, dtype=torch.double, device=device)
    steps = torch.zeros(len(KINDS), dtype=torch.double, device=device)
    counts = torch.zeros_like(steps)
    training = model.training
    model.eval()
    try:
        with use_mode(model, mode) if mode is not None else nullcontext():
            reading = _Reading(model, len(streams[0][0]), streams.window)
            with reading.on_stream(), seeded(seed, device):
                for inputs, targets in streams.whole():
                    logits, taken = reading(inputs)
                    log_p = logits.log_softmax(-1).gather(-1, targets.unsqueeze(-1))
                    sums[0] -= log_p.double().sum()
                    sums[1] += (logits.argmax(-1) == targets).sum()
                    kinds = kind_of[inputs].flatten()
                    steps.index_add_(0, kinds, taken.double().flatten())
                    counts.index_add_(0, kinds, torch.ones_like(kinds, dtype=torch.double))
                # on the stream too: noise is drawn there by the seed
                passage = text[:PASSAGE].long()
                logits, _, alone = _look(model, passage.unsqueeze(0), model.zero_states(1))
                log_p = logits[0, :-1].log_softmax(-1).gather(-1, passage[1:, None])[:, 0]
                passage_bits, passage_steps = (-log_p / math.log(2)).tolist(), alone[0].long().tolist()
                nll, right = (sums / counts.sum()).tolist()
    finally:
        model.train(training)
    total = counts.sum()
    means = (steps / counts).tolist()
    return TextEvaluation(
        bits_per_character=nll / math.log(2),
        accuracy=right,
        nll=nll,
        steps=(steps.sum() / total).item(),
        steps_by_kind={kind: mean for kind, mean in zip(KINDS, means, strict=True) if not math.isnan(mean)},
        characters=int(total),
        passage=bytes(passage.tolist()).decode("latin-1"),
        passage_steps=passage_steps,
        passage_bits=[8.0, *passage_bits],
    )


class _Reading:
    """A network that reads streams on from where it is; on a GPU, whole windows by a CUDA graph.

    There all iterations of a time step run, as a graph cannot look at what has halted.
    """

    def __init__(self, model: SequenceNet, batch: int, window: int) -> None:
        self.model = model
        self.states: list[State] = model.zero_states(batch)
        device = model.readout.weight.device
        self._captured = CapturedStep(device) if device.type == "cuda" else None
        self._inputs = torch.zeros(batch, window, dtype=torch.long, device=device)
        self._read_last: tuple[Tensor, Tensor] | None = None
        if self._captured is not None:  # what it will need may still be on its way, from another stream
            torch.cuda.current_stream(device).synchronize()

    def on_stream(self) -> AbstractContextManager[None]:
        return nullcontext() if self._captured is None else self._captured.on_stream()

    def __call__(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Logits and steps of each character; on a GPU they are there until the next call."""
        if self._captured is None or inputs.shape != self._inputs.shape:
            return self._read(inputs)
        if not self._captured.recorded:
            self._record(self._captured)
        self._inputs.copy_(inputs)
        self._captured.replay()
        assert self._read_last is not None
        return self._read_last

    def _read(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        logits, states, steps = _look(self.model, inputs, self.states)
        for kept, after in zip(self.states, states, strict=True):
            for mine, new in zip(_state.parts(kept), _state.parts(after), strict=True):
                mine.copy_(new)
        return logits, steps

    def _record(self, captured: CapturedStep) -> None:
        captured.record(self._read_inputs, lambda: None, warm_up=1)
        for state in self.states:
            for part in _state.parts(state):
                part.zero_()

    def _read_inputs(self) -> None:
        self._read_last = self._read(self._inputs)


def _look(model: SequenceNet, inputs: Tensor, states: list[State]) -> tuple[Tensor, Sequence[State], Tensor]:
    """Logits of each character, states in the end, and steps; on a GPU in few kernels, if there are some."""
    if inputs.is_cuda and can_read(model):
        return read_single(model, inputs, states)
    logits, after, ponders = model(inputs, states)
    return logits.squeeze(2), after, torch.stack([ponder.steps for ponder in ponders]).sum(0)


def _kind(byte: int) -> int:
    character = chr(byte)
    if byte >= 128 or character.isalpha():
        return 0  # beyond ASCII are parts of letters, mostly
    if character.isdigit():
        return 1
    return {" ": 2, "\n": 3}.get(character, 4)
