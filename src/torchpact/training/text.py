"""Text as streams that are read side by side, and what a network makes of them, in bits a character."""

import math
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from torchpact._checks import check_count
from torchpact.block import use_mode
from torchpact.models.sequence import SequenceNet
from torchpact.modes import Mode

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
    torch.manual_seed(seed)
    try:
        with use_mode(model, mode) if mode is not None else nullcontext():
            states = None
            for inputs, targets in streams.whole():
                logits, states, ponders = model(inputs, states)
                log_p = logits.squeeze(2).log_softmax(-1).gather(-1, targets.unsqueeze(-1))
                sums[0] -= log_p.double().sum()
                sums[1] += (logits.squeeze(2).argmax(-1) == targets).sum()
                taken = torch.stack([ponder.steps for ponder in ponders]).sum(0).double().flatten()
                kinds = kind_of[inputs].flatten()
                steps.index_add_(0, kinds, taken)
                counts.index_add_(0, kinds, torch.ones_like(taken))
            passage = text[:PASSAGE].long()
            logits, _, ponders = model(passage.unsqueeze(0))
            log_p = logits[0, :-1, 0].log_softmax(-1).gather(-1, passage[1:, None])[:, 0]
            alone = torch.stack([ponder.steps for ponder in ponders]).sum(0)[0]
    finally:
        model.train(training)
    total = counts.sum()
    nll, right = (sums / total).tolist()
    means = (steps / counts).tolist()
    return TextEvaluation(
        bits_per_character=nll / math.log(2),
        accuracy=right,
        nll=nll,
        steps=(steps.sum() / total).item(),
        steps_by_kind={kind: mean for kind, mean in zip(KINDS, means, strict=True) if not math.isnan(mean)},
        characters=int(total),
        passage=bytes(passage.tolist()).decode("latin-1"),
        passage_steps=[int(n) for n in alone.tolist()],
        passage_bits=[8.0, *(-log_p / math.log(2)).tolist()],
    )


def _kind(byte: int) -> int:
    character = chr(byte)
    if byte >= 128 or character.isalpha():
        return 0  # beyond ASCII are parts of letters, mostly
    if character.isdigit():
        return 1
    return {" ": 2, "\n": 3}.get(character, 4)
