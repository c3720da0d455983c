"""stream: a looped network whose batch is kept full: halted examples leave, queued ones take their place."""

from collections.abc import Generator, Iterable
from typing import Any, Literal, overload

from torchpact.checks import check_count
from torchpact.core.block import AdaptiveBlock
from torchpact.core.modes import Mode, Relaxed, Thresholded, as_mode
from torchpact.core.ponder import Ponder
from torchpact.core.thresholds import Thresholds
from torchpact.engines.generic.intake import Intake, Limit
from torchpact.engines.generic.lanes import Lanes, problem_of
from torchpact.engines.generic.streaming import Ends, Streaming
from torchpact.nn.looped import Looped

AHEAD = 32
"""How many batches of finished results wait for an earlier one, by default, before intake pauses."""


@overload
def stream(
    loop: AdaptiveBlock | Looped,
    inputs: Iterable[Any],
    *,
    width: int = ...,
    batches: bool = ...,
    thresholds: Thresholds | float | None = ...,
    max_steps: int | None = ...,
    limit: Limit | None = ...,
    ordered: Literal[True] = ...,
    ahead: int | None = ...,
    mode: Mode | str | None = ...,
    details: bool | None = ...,
    compile: bool = ...,
) -> Generator[tuple[Any, Ponder], None, None]: ...


@overload
def stream(
    loop: AdaptiveBlock | Looped,
    inputs: Iterable[Any],
    *,
    width: int = ...,
    batches: bool = ...,
    thresholds: Thresholds | float | None = ...,
    max_steps: int | None = ...,
    limit: Limit | None = ...,
    ordered: Literal[False],
    ahead: int | None = ...,
    mode: Mode | str | None = ...,
    details: bool | None = ...,
    compile: bool = ...,
) -> Generator[tuple[int, Any, Ponder], None, None]: ...


@overload
def stream(
    loop: AdaptiveBlock | Looped,
    inputs: Iterable[Any],
    *,
    width: int = ...,
    batches: bool = ...,
    thresholds: Thresholds | float | None = ...,
    max_steps: int | None = ...,
    limit: Limit | None = ...,
    ordered: bool,
    ahead: int | None = ...,
    mode: Mode | str | None = ...,
    details: bool | None = ...,
    compile: bool = ...,
) -> Generator[Any, None, None]: ...


def stream(
    loop: AdaptiveBlock | Looped,
    inputs: Iterable[Any],
    *,
    width: int = 256,
    batches: bool = False,
    thresholds: Thresholds | float | None = None,
    max_steps: int | None = None,
    limit: Limit | None = None,
    ordered: bool = True,
    ahead: int | None = None,
    mode: Mode | str | None = None,
    details: bool | None = None,
    compile: bool = False,
) -> Generator[Any, None, None]:
    """Run a looped network on any number of inputs, in a batch that is kept full.

    All iterations share their step, so that examples at different steps can run side by side: one that has
    halted leaves, the next input takes its row, and every step of the device is full. Each result is what the
    network returns for its input alone, up to rounding. There are no gradients.

    Inputs are taken one by one, as rows become free, and results are handed out before more inputs are taken.
    If the iterator of inputs raises, the results of all inputs before come first, then the error. It may
    yield None where it has nothing to give yet: the examples under way go on. Once it ends the batch narrows.
    Memory does not grow with the number of inputs.

    Args:
        loop: An :class:`~torchpact.AdaptiveBlock` with one step and one head that all iterations share, or a
            :class:`~torchpact.nn.Looped`. Its steps treat examples independently, as in evaluation. An
            example leaves once all its positions have halted.
        inputs: What the loop is called with, each a mapping by name, a tuple by position, or the only
            argument; of a block the state comes first, then what steps are given besides. All tensors belong
            to examples: without ``batches`` an input is one example, whose tensors have no batch dimension;
            all of them have the shapes of the first.
        width: How many examples run side by side.
        batches: Whether inputs are batches, of any sizes: the first dimension of all tensors is the batch.
        thresholds: Those of this run, see :class:`~torchpact.AdaptiveBlock`.
        max_steps: L of this run; by default that of the block.
        limit: The most steps of an input, from 1 to L: a function of the input that returns a number or, of
            a batch, a tensor of one for each example.
        ordered: Whether results come in the order of inputs. Otherwise they come as they finish.
        ahead: With ``ordered``, after how many finished examples that wait for an earlier input no more
            inputs are taken; by default 32 times the width. It bounds the memory that an input of many steps
            takes, and costs speed where it is reached.
        mode: One in which examples halt for good and that draws nothing; by default the block's own, or
            thresholded where that is relaxed.
        details: Whether ponders have probabilities besides ``steps`` and ``cost``; by default as the block's.
        compile: Whether a step of a full batch is compiled by ``torch.compile``, once; on a GPU in a CUDA
            graph. The batch keeps its width then until inputs end and half of its rows are free.

    Yields:
        ``(output, ponder)`` for each input or, as they finish, ``(index, output, ponder)`` with the number of
        the input, from 0. The output of a single example has no batch dimension; its ponder has one of 1.

    Raises:
        TypeError: ``loop`` is something else.
        ValueError: Its iterations do not share step and head, the mode is another, or inputs do not fit.

    Example:
        >>> block = tp.AdaptiveBlock(lambda u: u / 2, lambda u: 1 - u, max_steps=9, mode="thresholded")
        >>> for output, ponder in tp.stream(block, torch.tensor([[8.0], [1.0], [3.0]]), width=2):
        ...     print(output.item(), ponder.steps.item())
        0.5 4
        0.5 1
        0.75 2

    """
    block = loop.block if isinstance(loop, Looped) else loop
    if not isinstance(block, AdaptiveBlock):
        raise TypeError(f"expected an AdaptiveBlock or a Looped to stream, got a {type(loop).__name__}")
    if mode is None:
        own = block.present_mode
        mode = Thresholded() if isinstance(own, Relaxed) else own
    decides = as_mode(mode)
    problem = problem_of(block, decides)
    if problem is not None:
        raise ValueError(problem)
    check_count("width", width)
    steps = block.steps_of_run(max_steps)
    bounds = block.bounds_of(decides, thresholds, steps)
    keeps = (block.details if details is None else details) or not isinstance(decides, Thresholded)
    lanes = Lanes(
        block,
        decides,
        bounds,
        steps,
        keeps_logits=keeps,
        width=width if compile else None,
        compiled=compile,
    )

    ends = Ends.of(loop, decides, thresholds, max_steps)
    intake = Intake(iter(inputs), batches, limit, steps)
    waiting = None if not ordered else AHEAD * width if ahead is None else check_count("ahead", ahead)
    units = Streaming(lanes, intake, width, ends, waiting).results()
    if ordered:
        return ((unit.output, unit.ponder) for unit in units)
    return ((unit.index, unit.output, unit.ponder) for unit in units)
