"""Every example of a task for looped networks is solved again, by plain Python."""

import itertools
import os
import stat

import pytest
import torch

from torchpact_recipes.data import (
    DataError,
    DigitAddition,
    Mazes,
    PrefixSums,
    ResetParity,
    Sudokus,
)


def sample(task, count=60, seed=0):
    batch = task.sample(count, torch.Generator().manual_seed(seed))
    assert len(batch) == count
    assert batch.inputs.shape == batch.targets.shape
    assert 0 <= int(batch.inputs.min()) <= int(batch.inputs.max()) < task.symbols
    assert 0 <= int(batch.targets.min()) <= int(batch.targets.max()) < task.classes
    return batch


def lists(batch):
    return zip(batch.inputs.tolist(), batch.targets.tolist(), batch.difficulty.tolist(), strict=True)


def test_prefix_sums_are_parities_of_all_bits_so_far():
    for bits, answer, hard in lists(sample(PrefixSums(20))):
        assert answer == [sum(bits[: n + 1]) % 2 for n in range(20)]
        assert hard == 20


def test_parity_begins_anew_at_a_reset():
    batch = sample(ResetParity(24, resets=0.15, without=0.3), 600)
    none = 0
    for tokens, answer, hard in lists(batch):
        parity, run, longest = 0, 0, 0
        for token, given in zip(tokens, answer, strict=True):
            parity = 0 if token == 2 else parity ^ token
            run = 0 if token == 2 else run + 1
            longest = max(longest, run)
            assert given == parity
        assert hard == longest
        none += 2 not in tokens
    # 0.3, and 0.85^24 = 0.02 of the others: 0.314 ± 0.019
    assert none / 600 == pytest.approx(0.314, abs=0.08)
    assert not (sample(ResetParity(8, resets=0, without=0)).inputs == 2).any()
    assert (sample(ResetParity(8, resets=1, without=0)).targets == 0).all()


def test_digits_are_those_of_the_sum_and_difficulty_is_the_longest_carry():
    hardest = set()
    for pairs, answer, hard in lists(sample(DigitAddition(6), 300)):
        first, second = (
            sum(d * 10**n for n, d in enumerate(each))
            for each in zip(*map(divmod, pairs, [10] * 7), strict=True)
        )
        assert sum(d * 10**n for n, d in enumerate(answer)) == first + second
        carries = [first % 10 ** (n + 1) + second % 10 ** (n + 1) >= 10 ** (n + 1) for n in range(7)]
        runs = [len([*group]) for carried, group in itertools.groupby(carries) if carried]
        assert hard == max(runs, default=0)
        hardest.add(hard)
    assert hardest >= {0, 1, 2, 3, 4}


@pytest.mark.parametrize("cells", [2, 4, 7])
def test_a_maze_is_a_tree_and_its_path_the_only_one(cells):
    size = 2 * cells + 1
    for squares, path, hard in lists(sample(Mazes(cells), 40)):
        free = {(r, c) for r in range(size) for c in range(size) if squares[r][c]}
        assert sum(r % 2 and c % 2 for r, c in free) == cells**2
        assert all(r % 2 or c % 2 for r, c in free)
        assert len(free) == 2 * cells**2 - 1  # of a connected map: a tree, so that paths are unique
        start, goal = (next(p for p in free if squares[p[0]][p[1]] == kind) for kind in (2, 3))
        steps, edge = {start: 0}, [start]
        while edge:  # breadth first
            edge = [
                there
                for r, c in edge
                for there in ((r + 1, c), (r - 1, c), (r, c + 1), (r, c - 1))
                if there in free and there not in steps and steps.setdefault(there, steps[r, c] + 1)
            ]
        assert set(steps) == free
        on = {(r, c) for r in range(size) for c in range(size) if path[r][c]}
        assert on <= free
        assert {start, goal} <= on
        assert hard == len(on) == steps[goal] + 1
        assert sorted(steps[each] for each in on) == [*range(hard)]


def boxes(grid, rows, columns):
    size = rows * columns
    for top, left in itertools.product(range(0, size, rows), range(0, size, columns)):
        yield [grid[top + r][left + c] for r in range(rows) for c in range(columns)]


def count_solutions(grid, rows, columns, most=2):
    """Solutions by trying every digit in the first empty cell: slow, and simple."""
    size = rows * columns
    for r, c in itertools.product(range(size), repeat=2):
        if grid[r][c] == 0:
            found = 0
            for digit in range(1, size + 1):
                top, left = r // rows * rows, c // columns * columns
                box = [grid[top + y][left + x] for y in range(rows) for x in range(columns)]
                if digit in grid[r] or digit in box or any(row[c] == digit for row in grid):
                    continue
                grid[r][c] = digit
                found += count_solutions(grid, rows, columns, most - found)
                grid[r][c] = 0
                if found >= most:
                    break
            return found
    return 1


def assert_solved(puzzle, answer, rows, columns):
    size, solution = rows * columns, [[digit + 1 for digit in row] for row in answer]
    for group in (*solution, *zip(*solution, strict=True), *boxes(solution, rows, columns)):
        assert sorted(group) == [*range(1, size + 1)]
    for given, found in zip(puzzle, solution, strict=True):
        assert all(a in (0, b) for a, b in zip(given, found, strict=True))


@pytest.mark.parametrize(("rows", "columns", "count"), [(2, 2, 20), (2, 3, 12), (3, 2, 4), (3, 3, 2)])
def test_a_sudoku_has_one_solution_which_is_the_target(rows, columns, count):
    clues = 45 if rows == columns == 3 else 0  # so that the slow solver is fast enough
    for puzzle, answer, _ in lists(sample(Sudokus(rows, columns, clues), count)):
        assert_solved(puzzle, answer, rows, columns)
        assert any(0 in row for row in puzzle)
        assert count_solutions(puzzle, rows, columns) == 1


def test_digging_ends_at_the_number_of_clues_and_goes_on_to_hard_puzzles():
    given = (sample(Sudokus(2, 3, clues=24), 10).inputs > 0).sum((1, 2))
    assert (given == 24).all()
    batch = sample(Sudokus(2, 3), 60)
    assert int((batch.inputs > 0).sum((1, 2)).max()) < 16
    assert len(batch.difficulty.unique()) > 1


@pytest.mark.parametrize(
    "task", [PrefixSums(8), ResetParity(8), DigitAddition(3), Mazes(3), Sudokus(2, 2)], ids=str
)
def test_a_seed_gives_the_same_examples_again_and_another_gives_others(task):
    one, same, other = sample(task, 20, 1), sample(task, 20, 1), sample(task, 20, 2)
    assert torch.equal(one.inputs, same.inputs)
    assert torch.equal(one.targets, same.targets)
    assert not torch.equal(one.inputs, other.inputs)


@pytest.fixture
def qqwing(tmp_path, monkeypatch):
    """Put a program of that name before all others, which prints a text."""

    def put(text):
        program = tmp_path / "qqwing"
        (tmp_path / "printed").write_text(text)
        program.write_text(f"#!/bin/sh\ncat {tmp_path / 'printed'}\n")
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    return put


PUZZLE = "4.....8.5.3..........7......2.....6.....8.4......1.......6.3.7.5..2.....1.4......"
SOLUTION = "417369825632158947958724316825437169791586432346912758289643571573291684164875293"


def test_graded_sudokus_are_read_from_the_program(qqwing):
    qqwing(f"Puzzle,Solution,\n{PUZZLE},{SOLUTION},\n")
    ((puzzle, answer, guesses),) = lists(sample(Sudokus(3, 3, graded="expert"), 1))
    assert "".join(str(d or ".") for row in puzzle for d in row) == PUZZLE
    assert_solved(puzzle, answer, 3, 3)
    assert guesses > 0


def test_what_the_program_prints_is_checked(qqwing, monkeypatch):
    qqwing("Puzzle,Solution,\n12..,34,\n")
    with pytest.raises(DataError, match=r"expected a puzzle and its solution from qqwing, got '12\.\.,34"):
        Sudokus(3, 3, graded="easy").sample(1)
    qqwing("Puzzle,Solution,\n")
    with pytest.raises(DataError, match="expected 2 puzzles from qqwing, got 0"):
        Sudokus(3, 3, graded="easy").sample(2)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(DataError, match="expected the program qqwing"):
        Sudokus(3, 3, graded="easy").sample(1)


@pytest.mark.parametrize(
    "make",
    [
        lambda: PrefixSums(0),
        lambda: ResetParity(8, resets=2),
        lambda: Mazes(1),
        lambda: Sudokus(1, 4),
        lambda: Sudokus(2, 3, graded="easy"),
        lambda: PrefixSums(8).sample(0),
    ],
)
def test_sizes_that_make_no_task_are_refused(make):
    with pytest.raises(ValueError, match="expected"):
        make()
