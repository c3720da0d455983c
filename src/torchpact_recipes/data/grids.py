"""Mazes and sudokus with one solution each, made one at a time in plain Python."""

import random
import shutil
import subprocess
from collections.abc import Iterator
from typing import NamedTuple

from torchpact_recipes.data.files import DataError

Grid = list[list[int]]


class Maze(NamedTuple):
    """A maze and the path through it, as maps."""

    squares: Grid
    """0 wall, 1 free, 2 start, 3 goal."""
    path: Grid
    """1 on the path, ends included, else 0."""


class Sudoku(NamedTuple):
    """A sudoku and its only solution."""

    puzzle: Grid
    """0 is empty."""
    solution: Grid
    guesses: int
    """How many guesses a solver takes that fills in cells with a single candidate first."""


def carved_maze(cells: int, seed: int) -> Maze:
    """Return a maze of cells × cells whose passages are a spanning tree, by a depth-first walk.

    >>> maze = carved_maze(2, seed=0)
    >>> len(maze.squares), sum(map(sum, maze.path)) in (3, 5, 7)
    (5, True)
    """
    draw = random.Random(seed)
    size = 2 * cells + 1
    squares = [[0] * size for _ in range(size)]
    start, goal = draw.sample([(r, c) for r in range(cells) for c in range(cells)], 2)
    before: dict[tuple[int, int], tuple[int, int] | None] = {start: None}
    stack = [start]
    squares[2 * start[0] + 1][2 * start[1] + 1] = 1
    while stack:
        r, c = stack[-1]
        around = [(r + 1, c), (r - 1, c), (r, c + 1), (r, c - 1)]
        others = [(y, x) for y, x in around if 0 <= y < cells > x >= 0 and (y, x) not in before]
        if not others:
            stack.pop()
            continue
        there = draw.choice(others)
        before[there] = (r, c)
        squares[r + there[0] + 1][c + there[1] + 1] = 1  # the wall between
        squares[2 * there[0] + 1][2 * there[1] + 1] = 1
        stack.append(there)
    path = [[0] * size for _ in range(size)]
    here: tuple[int, int] | None = goal
    while here is not None:
        path[2 * here[0] + 1][2 * here[1] + 1] = 1
        then = before[here]
        if then is not None:
            path[here[0] + then[0] + 1][here[1] + then[1] + 1] = 1
        here = then
    squares[2 * start[0] + 1][2 * start[1] + 1] = 2
    squares[2 * goal[0] + 1][2 * goal[1] + 1] = 3
    return Maze(squares, path)


class Solver:
    """Solves sudokus by candidates: cells with the fewest first, guesses where there are several.

    Args:
        rows: The rows of a box.
        columns: The columns of a box.

    Example:
        >>> empty = [[0] * 4 for _ in range(4)]
        >>> solver = Solver(2, 2)
        >>> len([*solver.solutions(empty, most=2)])
        2

    """

    def __init__(self, rows: int, columns: int) -> None:
        self.rows, self.columns, self.size = rows, columns, rows * columns
        self.guesses = 0
        """How many guesses were taken since it was last set."""

    def solutions(self, grid: Grid, most: int, draw: random.Random | None = None) -> Iterator[Grid]:
        """Yield up to so many solutions; ``draw`` puts guesses in a random order."""
        size = self.size
        self.used = [[0] * size for _ in range(3)]  # digits of rows, columns and boxes, as bits
        self.grid = [[0] * size for _ in range(size)]
        for r, row in enumerate(grid):
            for c, digit in enumerate(row):
                if digit:
                    if self._taken(r, c) >> digit & 1:
                        return
                    self._put(r, c, digit)
        for index, found in enumerate(self._search(draw), start=1):
            yield found
            if index == most:
                return

    def _box(self, r: int, c: int) -> int:
        return r // self.rows * self.rows + c // self.columns

    def _taken(self, r: int, c: int) -> int:
        return self.used[0][r] | self.used[1][c] | self.used[2][self._box(r, c)]

    def _put(self, r: int, c: int, digit: int) -> None:
        bit = 1 << (digit or self.grid[r][c])
        self.grid[r][c] = digit
        for used, index in zip(self.used, (r, c, self._box(r, c)), strict=True):
            used[index] ^= bit

    def _search(self, draw: random.Random | None) -> Iterator[Grid]:
        best: tuple[int, int, list[int]] | None = None
        for r in range(self.size):
            for c in range(self.size):
                if self.grid[r][c]:
                    continue
                taken = self._taken(r, c)
                free = [digit for digit in range(1, self.size + 1) if not taken >> digit & 1]
                if best is None or len(free) < len(best[2]):
                    best = r, c, free
                if len(free) < 2:
                    break
            if best is not None and len(best[2]) < 2:
                break
        if best is None:
            yield [row[:] for row in self.grid]
            return
        r, c, free = best
        if draw is not None:
            draw.shuffle(free)
        self.guesses += len(free) > 1
        for digit in free:
            self._put(r, c, digit)
            yield from self._search(draw)
            self._put(r, c, 0)


def generated_sudoku(rows: int, columns: int, clues: int, seed: int) -> Sudoku:
    """Return a sudoku that is dug out of a random full grid.

    Args:
        rows: The rows of a box.
        columns: The columns of a box.
        clues: Digging ends with so many digits, or when none can be taken away any more.
        seed: Of all that is random.

    Example:
        >>> puzzle, solution, guesses = generated_sudoku(2, 2, 0, seed=0)
        >>> [*Solver(2, 2).solutions(puzzle, most=2)] == [solution]
        True

    """
    draw, solver = random.Random(seed), Solver(rows, columns)
    size = solver.size
    solution = next(solver.solutions([[0] * size for _ in range(size)], 1, draw))
    puzzle = [row[:] for row in solution]
    places = [(r, c) for r in range(size) for c in range(size)]
    draw.shuffle(places)
    left = size * size
    for r, c in places:
        if left <= clues:
            break
        puzzle[r][c], digit = 0, puzzle[r][c]
        left -= 1
        if len([*solver.solutions(puzzle, 2)]) > 1:
            puzzle[r][c] = digit
            left += 1
    return Sudoku(puzzle, solution, _guesses(solver, puzzle))


def graded_sudokus(count: int, difficulty: str) -> list[Sudoku]:
    """Return usual sudokus of a difficulty that the program qqwing knows.

    Args:
        count: How many.
        difficulty: "simple", "easy", "intermediate" or "expert".

    Raises:
        DataError: The program is not there, or writes something else than puzzles with their solutions.

    """
    program = shutil.which("qqwing")
    if program is None:
        raise DataError(
            "expected the program qqwing, which Debian has, for graded sudokus; got none on the PATH"
        )
    options = ["--generate", str(count), "--difficulty", difficulty, "--solution", "--csv"]
    done = subprocess.run([program, *options], capture_output=True, text=True, timeout=60 + count)
    found, solver = [], Solver(3, 3)
    for line in done.stdout.splitlines()[1:]:
        fields = line.split(",")
        texts = [text.replace(".", "0") for text in fields[:2]]
        if len(texts) < 2 or any(len(text) != 81 or not text.isdigit() for text in texts):
            raise DataError(f"expected a puzzle and its solution from qqwing, got {line[:60]!r}")
        puzzle, solution = ([[*map(int, text[n : n + 9])] for n in range(0, 81, 9)] for text in texts)
        found.append(Sudoku(puzzle, solution, _guesses(solver, puzzle)))
    if len(found) != count:
        raise DataError(f"expected {count} puzzles from qqwing, got {len(found)}: {done.stderr.strip()[:80]}")
    return found


def _guesses(solver: Solver, puzzle: Grid) -> int:
    solver.guesses = 0
    next(solver.solutions(puzzle, 1))
    return solver.guesses
