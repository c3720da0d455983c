"""Every example is decoded from its inputs and solved again, by plain Python."""

import pytest
import torch

from torchpact_recipes.data.tasks import GATES, TASKS, UNASKED, Addition, Logic, Parity, Sort, task

EVERY = [(name, size) for name in TASKS for size in TASKS[name]]


def sample(problem, count=300, seed=0):
    return problem.sample(count, torch.Generator().manual_seed(seed))


def examples(problem, count=300):
    """The sequences of a sample without what follows their end: inputs, targets and difficulty as lists."""
    batch = sample(problem, count)
    for x, y, length, hard in zip(batch.inputs, batch.targets, batch.lengths, batch.difficulty, strict=True):
        yield x[:length].tolist(), y[:length].tolist(), hard[:length].tolist()


SIZES = [Parity(64), Parity(8), Parity(96, low=49), Parity(96, high=48), Parity(1)]


@pytest.mark.parametrize("problem", SIZES, ids=str)
def test_parity_is_that_of_the_number_of_ones(problem):
    seen = set()
    for (x,), ((y,),), (hard,) in examples(problem):
        assert len(x) == problem.size
        assert set(x) <= {-1, 0, 1}
        assert hard == sum(value != 0 for value in x)
        assert y == x.count(1) % 2
        seen.add(hard)
    assert min(seen) >= problem.low
    assert max(seen) <= (problem.high or problem.size)
    assert len(seen) > 0.9 * ((problem.high or problem.size) - problem.low)


def test_parity_uses_all_elements_and_both_signs_alike():
    x = sample(Parity(8), 20_000).inputs[:, 0]
    for value, share in ((-1, 4.5 / 16), (0, 3.5 / 8), (1, 4.5 / 16)):
        torch.testing.assert_close((x == value).float().mean(0), torch.full((8,), share), rtol=0, atol=0.02)


def gate(name, p, q):
    """The gates in words."""
    return {
        "NOR": not (p or q),
        "Xq": not p and q,
        "ABJ": p and not q,
        "XOR": p != q,
        "NAND": not (p and q),
        "AND": p and q,
        "XNOR": p == q,
        "if/then": not p or q,
        "then/if": p or not q,
        "OR": p or q,
    }[name]


@pytest.mark.parametrize("problem", [Logic(), Logic(3, 2), Logic(1, 1)], ids=str)
def test_logic_is_the_chain_of_gates_with_the_bit_handed_on(problem):
    lengths, counts = set(), set()
    for x, y, hard in examples(problem):
        lengths.add(len(x))
        previous = None
        for row, (target,), gates in zip(x, y, hard, strict=True):
            codes = [row[2 + 10 * i : 12 + 10 * i] for i in range(problem.max_gates)]
            assert [sum(code) for code in codes] == [1] * gates + [0] * (problem.max_gates - gates)
            counts.add(gates)
            bits = [bool(row[0] if previous is None else previous), bool(row[1])]
            assert previous is None or row[0] == 0
            for code in codes[:gates]:
                bits.append(gate(list(GATES)[code.index(1)], bits[-2], bits[-1]))
            assert target == bits[-1]
            previous = target
    assert lengths == set(range(1, problem.max_length + 1))
    assert counts == set(range(1, problem.max_gates + 1))


def test_the_ten_gates_are_all_that_heed_both_bits():
    assert len(set(GATES.values())) == 10
    for a, b, c, d in GATES.values():
        assert (a, b) != (c, d), "does not depend on p"
        assert (a, c) != (b, d), "does not depend on q"


@pytest.mark.parametrize("problem", [Addition(), Addition(3, 2), Addition(7, 1)], ids=str)
def test_addition_is_the_running_sum_digit_by_digit(problem):
    lengths, counts, longest = set(), set(), 0
    for x, y, hard in examples(problem, 1000):
        lengths.add(len(x))
        total = 0
        for time, (row, target, digits) in enumerate(zip(x, y, hard, strict=True)):
            codes = [row[10 * i : 10 * i + 10] for i in range(problem.max_digits)]
            assert [sum(code) for code in codes] == [1] * digits + [0] * (problem.max_digits - digits)
            counts.add(digits)
            total += int("".join(str(code.index(1)) for code in codes[:digits]))
            written = [int(digit) for digit in str(total)]
            longest = max(longest, len(written))
            assert len(target) == problem.outputs
            if time == 0:
                assert target == [UNASKED] * problem.outputs
            else:
                assert target == written + [10] * (problem.outputs - len(written))
    assert lengths == set(range(1, problem.max_numbers + 1))
    assert counts == set(range(1, problem.max_digits + 1))
    assert longest == problem.outputs, "the widest sum was seen"


@pytest.mark.parametrize("problem", [Sort(), Sort(2, 3), Sort(1, 1)], ids=str)
def test_sort_asks_for_the_indices_in_order_once_the_numbers_are_known(problem):
    lengths = set()
    for x, y, hard in examples(problem):
        n = len(x) // 2
        lengths.add(n)
        assert hard == [n] * (2 * n)
        numbers = [row[0] for row in x[:n]]
        assert [row[1] for row in x] == [0.0] * (n - 1) + [1.0] + [0.0] * n
        assert x[n:] == [[0.0, 0.0]] * n
        assert y[:n] == [[UNASKED]] * n
        assert [index for (index,) in y[n:]] == sorted(range(n), key=lambda i: numbers[i])
    assert lengths == set(range(problem.min_numbers, problem.max_numbers + 1))


@pytest.mark.parametrize(("name", "size"), EVERY)
def test_shapes_are_as_documented_and_nothing_follows_the_end(name, size):
    problem = task(name, size)
    batch = sample(problem)
    assert len(batch) == 300
    count, time, features = batch.inputs.shape
    assert features == problem.features
    assert batch.targets.shape == (count, time, problem.outputs)
    assert batch.difficulty.shape == (count, time)
    assert batch.lengths.shape == (count,)
    assert batch.lengths.min() >= 1
    assert batch.lengths.max() == time
    assert batch.inputs.dtype == torch.float
    assert {t.dtype for t in (batch.targets, batch.lengths, batch.difficulty)} == {torch.long}
    over = torch.arange(time) >= batch.lengths.unsqueeze(1)
    assert (batch.inputs[over] == 0).all()
    assert (batch.targets[over] == UNASKED).all()
    assert (batch.difficulty > 0).equal(~over)
    asked = batch.targets[batch.targets != UNASKED]
    assert asked.min() == 0
    assert asked.max() == problem.classes - 1


@pytest.mark.parametrize(("name", "size"), EVERY)
def test_examples_are_a_function_of_the_generator(name, size):
    problem = task(name, size)
    state = torch.get_rng_state()
    first, second, other = sample(problem, 20, 1), sample(problem, 20, 1), sample(problem, 20, 2)
    assert torch.equal(torch.get_rng_state(), state), "the global generator is not touched"
    for field in ("inputs", "targets", "lengths", "difficulty"):
        assert torch.equal(getattr(first, field), getattr(second, field))
    assert not torch.equal(first.inputs, other.inputs)
    torch.manual_seed(1)
    assert torch.equal(problem.sample(20).inputs, first.inputs), "without a generator, the global one"


def test_the_sizes_of_the_paper():
    sizes = {name: (t.features, t.outputs, t.classes) for name in TASKS for t in [task(name)]}
    assert sizes == {"parity": (64, 1, 2), "logic": (102, 1, 2), "addition": (50, 6, 11), "sort": (2, 1, 15)}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: task("copy"), "expected a task among parity, logic, addition, sort; got 'copy'"),
        (lambda: task("sort", "huge"), "expected a preset among paper, small, tiny; got 'huge'"),
        (lambda: Parity(8, high=9), "expected high to be an integer of at most 8, got 9"),
        (lambda: Parity(8, low=5, high=4), "expected high to be an integer of at least 5, got 4"),
        (lambda: Parity(0), "expected size to be an integer of at least 1, got 0"),
        (lambda: Logic(max_gates=0), "expected max_gates to be an integer of at least 1, got 0"),
        (lambda: Addition(max_digits=16), "expected max_digits to be an integer of at most 15, got 16"),
        (lambda: Sort(5, 4), "expected max_numbers to be an integer of at least 5, got 4"),
        (lambda: Parity().sample(0), "expected count to be an integer of at least 1, got 0"),
    ],
)
def test_wrong_settings_are_refused_in_one_line(call, message):
    with pytest.raises(ValueError, match=message):
        call()
