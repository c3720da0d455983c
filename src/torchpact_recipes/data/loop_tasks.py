"""Tasks for looped networks: as many examples as one likes, each with its solution and how hard it is.

An answer is a class at every position. How many steps an example needs grows with its difficulty, which each
task defines; to test beyond the training range, make the same task larger.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from torchpact.checks import check_count, check_number
from torchpact_recipes.data.grids import Maze, Sudoku, carved_maze, generated_sudoku, graded_sudokus


@dataclass(frozen=True, eq=False)
class LoopBatch:
    """Examples of a task for looped networks."""

    inputs: Tensor
    """Classes, int64, of shape (batch, length) or (batch, height, width)."""
    targets: Tensor
    """Classes of the same shape."""
    difficulty: Tensor
    """What makes an example hard, int64, of shape (batch,). See each task."""

    def __len__(self) -> int:
        return len(self.inputs)


class LoopTask:
    """What a network must know of a task, and how to make examples of it.

    >>> batch = PrefixSums(8).sample(3, torch.Generator().manual_seed(0))
    >>> batch.inputs.shape, batch.targets.shape, batch.difficulty.tolist()
    (torch.Size([3, 8]), torch.Size([3, 8]), [8, 8, 8])
    """

    symbols: int
    """The number of classes of inputs."""
    classes: int = 2
    """The number of classes of targets."""

    def sample(self, count: int, generator: torch.Generator | None = None) -> LoopBatch:
        """Draw ``count`` examples."""
        check_count("count", count)
        return self._sample(count, generator)

    def _sample(self, count: int, generator: torch.Generator | None) -> LoopBatch:
        raise NotImplementedError


@dataclass(frozen=True)
class PrefixSums(LoopTask):
    """The parity of all bits up to each position; as difficult as the string is long."""

    length: int = 32
    symbols = 2

    def __post_init__(self) -> None:
        check_count("length", self.length)

    def _sample(self, count: int, generator: torch.Generator | None) -> LoopBatch:
        bits = torch.randint(0, 2, (count, self.length), generator=generator)
        return LoopBatch(bits, bits.cumsum(1) % 2, torch.full((count,), self.length))


@dataclass(frozen=True)
class ResetParity(LoopTask):
    """The parity of the bits since the last reset, at each position; symbol 2 is a reset.

    ``resets`` is the share of positions with one, and ``without`` that of strings that have none. The
    difficulty is the length of the longest segment without a reset.
    """

    length: int = 32
    resets: float = 0.1
    without: float = 0.3
    symbols = 3

    def __post_init__(self) -> None:
        check_count("length", self.length)
        check_number("resets", self.resets, 0, 1)
        check_number("without", self.without, 0, 1)

    def _sample(self, count: int, generator: torch.Generator | None) -> LoopBatch:
        shape = (count, self.length)
        tokens = torch.randint(0, 2, shape, generator=generator)
        reset = torch.rand(shape, generator=generator) < self.resets
        reset &= torch.rand(count, 1, generator=generator) >= self.without
        tokens[reset] = 2
        place = torch.arange(1, self.length + 1).expand(shape)
        last = torch.where(reset, place, 0).cummax(1).values
        ones = (tokens == 1).long().cumsum(1)
        before = torch.cat([torch.zeros(count, 1, dtype=torch.long), ones], 1).gather(1, last)
        return LoopBatch(tokens, (ones - before) % 2, (place - last).amax(1))


@dataclass(frozen=True)
class DigitAddition(LoopTask):
    """The digits of a sum of two numbers, the least significant first.

    A position holds a digit of each, 10·a + b. There is a position more than ``digits``, for the last carry.
    The difficulty is the longest run of positions through which a carry goes.
    """

    digits: int = 8
    symbols = 100
    classes = 10

    def __post_init__(self) -> None:
        check_count("digits", self.digits)

    def _sample(self, count: int, generator: torch.Generator | None) -> LoopBatch:
        pairs = torch.randint(0, 10, (2, count, self.digits + 1), generator=generator)
        pairs[:, :, -1] = 0
        carry, run = torch.zeros(2, count, dtype=torch.long)
        found, hardest = [], run
        for column in pairs.sum(0).unbind(1):
            total = column + carry
            found.append(total % 10)
            carry = total // 10
            run = torch.where(carry > 0, run + 1, 0)
            hardest = torch.maximum(hardest, run)
        return LoopBatch(10 * pairs[0] + pairs[1], torch.stack(found, 1), hardest)


@dataclass(frozen=True)
class Mazes(LoopTask):
    """The path through a maze, which is unique: 1 on it, ends included, else 0.

    A maze of n × n cells is a map of 2n + 1 squares a side: 0 wall, 1 free, 2 start, 3 goal. The difficulty
    is the number of squares of the path.
    """

    cells: int = 5
    symbols = 4

    def __post_init__(self) -> None:
        check_count("cells", self.cells, 2)

    def _sample(self, count: int, generator: torch.Generator | None) -> LoopBatch:
        mazes: list[Maze] = [carved_maze(self.cells, seed) for seed in _seeds(count, generator)]
        targets = torch.tensor([maze.path for maze in mazes])
        return LoopBatch(torch.tensor([maze.squares for maze in mazes]), targets, targets.sum((1, 2)))


@dataclass(frozen=True)
class Sudokus(LoopTask):
    """Sudokus with one solution; 0 is empty in inputs, and targets are digits less one.

    ``rows`` × ``columns`` are the sizes of a box: (2, 3) is a 6 × 6 sudoku, (3, 3) the usual one. Puzzles are
    dug out of a full grid until no more than ``clues`` are left, or until none can be taken away without a
    second solution. The difficulty is the number of guesses that a solver takes that fills in cells with a
    single candidate first.

    With ``graded``, 9 × 9 puzzles come from the program qqwing, which Debian has: "simple", "easy",
    "intermediate" or "expert" ones. They do not depend on the generator.
    """

    rows: int = 2
    columns: int = 3
    clues: int = 0
    graded: str = ""

    def __post_init__(self) -> None:
        check_count("rows", self.rows, 2)
        check_count("columns", self.columns, 2)
        check_count("clues", self.clues, 0)
        if self.graded and (self.rows, self.columns) != (3, 3):
            raise ValueError(f"expected boxes of 3 × 3 for graded sudokus, got {self.rows} × {self.columns}")

    @property
    def symbols(self) -> int:  # type: ignore[override]
        """The digits, and empty."""
        return self.rows * self.columns + 1

    @property
    def classes(self) -> int:  # type: ignore[override]
        """The digits."""
        return self.rows * self.columns

    def _sample(self, count: int, generator: torch.Generator | None) -> LoopBatch:
        found: list[Sudoku]
        if self.graded:
            found = graded_sudokus(count, self.graded)
        else:
            make: Callable[[int], Sudoku] = lambda seed: generated_sudoku(  # noqa: E731
                self.rows, self.columns, self.clues, seed
            )
            found = [make(seed) for seed in _seeds(count, generator)]
        puzzles, solutions = (
            torch.tensor(grids) for grids in zip(*[each[:2] for each in found], strict=True)
        )
        return LoopBatch(puzzles, solutions - 1, torch.tensor([each.guesses for each in found]))


def _seeds(count: int, generator: torch.Generator | None) -> list[int]:
    seeds: list[int] = torch.randint(2**62, (count,), generator=generator).tolist()
    return seeds
