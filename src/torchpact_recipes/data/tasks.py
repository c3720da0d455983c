"""The four synthetic tasks of Graves' adaptive computation time, as many examples as one likes.

Every task asks, at some time steps of a sequence, ``outputs`` questions with ``classes`` answers each.
How much work a time step takes is known, so that it can be compared with the work that was done.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from torchpact.checks import check_count

UNASKED = -100
"""The target where nothing is asked; what torch's losses leave out."""


@dataclass(frozen=True, eq=False)
class TaskBatch:
    """Examples of a task; a sequence that ends early is followed by zeros, about which nothing is asked."""

    inputs: Tensor
    """Floats of shape (batch, time, features)."""
    targets: Tensor
    """Classes, int64, of shape (batch, time, outputs); −100 where nothing is asked."""
    lengths: Tensor
    """The number of time steps of each sequence, int64, of shape (batch,)."""
    difficulty: Tensor
    """What makes a time step hard, int64, of shape (batch, time); 0 after the end. See each task."""

    def __len__(self) -> int:
        return len(self.lengths)


class Task:
    """What a network must know of a task, and how to make examples of it.

    >>> task = Parity(size=8)
    >>> batch = task.sample(100, torch.Generator().manual_seed(0))
    >>> batch.inputs.shape, batch.targets.shape
    (torch.Size([100, 1, 8]), torch.Size([100, 1, 1]))
    """

    @property
    def features(self) -> int:
        """The number of inputs of a time step."""
        raise NotImplementedError

    @property
    def outputs(self) -> int:
        """The number of questions of a time step."""
        return 1

    @property
    def classes(self) -> int:
        """The number of answers to each question."""
        return 2

    def sample(self, count: int, generator: torch.Generator | None = None) -> TaskBatch:
        """Draw ``count`` examples, on the device of the generator."""
        check_count("count", count)
        return self._sample(count, _Random(generator))

    def _sample(self, count: int, random: "_Random") -> TaskBatch:
        raise NotImplementedError


@dataclass(frozen=True)
class Parity(Task):
    """Whether an odd number of the elements of a vector are 1; a single time step.

    From ``low`` to ``high`` elements, as many as ``difficulty`` says, are 1 or −1, the rest 0. All
    numbers and places are equally likely. ``high`` defaults to ``size``; to train on easy examples and
    test on hard ones, use Parity(96, high=48) and Parity(96, low=49).
    """

    size: int = 64
    low: int = 1
    high: int | None = None

    def __post_init__(self) -> None:
        check_count("size", self.size)
        check_count("low", self.low)
        check_count("high", self._high, self.low, self.size)

    @property
    def _high(self) -> int:
        return self.size if self.high is None else self.high

    @property
    def features(self) -> int:
        """The elements of the vector."""
        return self.size

    def _sample(self, count: int, random: "_Random") -> TaskBatch:
        used = random.integers(self.low, self._high, count, 1)
        chosen = random.uniform(count, self.size).argsort(1).argsort(1) < used
        x = torch.where(chosen, 2 * random.integers(0, 1, count, self.size) - 1, 0)
        return TaskBatch(
            inputs=x.float().unsqueeze(1),
            targets=((x == 1).sum(1) % 2).view(count, 1, 1),
            lengths=torch.ones(count, dtype=torch.long, device=x.device),
            difficulty=used,
        )


GATES: Mapping[str, tuple[int, int, int, int]] = {
    "NOR": (1, 0, 0, 0),
    "Xq": (0, 1, 0, 0),
    "ABJ": (0, 0, 1, 0),
    "XOR": (0, 1, 1, 0),
    "NAND": (1, 1, 1, 0),
    "AND": (0, 0, 0, 1),
    "XNOR": (1, 0, 0, 1),
    "if/then": (1, 1, 0, 1),
    "then/if": (1, 0, 1, 1),
    "OR": (0, 1, 1, 1),
}
"""Graves' ten gates: their values at (p, q) = (0, 0), (0, 1), (1, 0) and (1, 1)."""


@dataclass(frozen=True)
class Logic(Task):
    """The result of a chain of up to ``max_gates`` logic gates, at each of up to ``max_length`` time steps.

    A time step holds two bits b₀ and b₁, then a one-hot code of ten for each gate, zeros where there is
    none. Gate i gives bᵢ₊₁ from p = bᵢ₋₁ and q = bᵢ; the last of these bits is the target. After the
    first time step b₀ is the target before, and shown as 0. ``difficulty`` is the number of gates.
    """

    max_length: int = 10
    max_gates: int = 10

    def __post_init__(self) -> None:
        check_count("max_length", self.max_length)
        check_count("max_gates", self.max_gates)

    @property
    def features(self) -> int:
        """Two bits and the codes of all gates."""
        return 2 + len(GATES) * self.max_gates

    def _sample(self, count: int, random: "_Random") -> TaskBatch:
        lengths = random.integers(1, self.max_length, count)
        bits = random.integers(0, 1, count, self.max_length, 2)
        bits[:, 1:, 0] = 0
        used = random.integers(1, self.max_gates, count, self.max_length)
        gates = random.integers(0, len(GATES) - 1, count, self.max_length, self.max_gates)
        applies = torch.arange(self.max_gates, device=gates.device) < used.unsqueeze(2)

        table = torch.tensor(list(GATES.values()), device=gates.device)
        result, targets = bits[:, 0, 0], []
        for time in range(self.max_length):
            p, q = result, bits[:, time, 1]
            for index in range(self.max_gates):
                on = applies[:, time, index]
                value = table[gates[:, time, index], 2 * p + q]
                p, q = torch.where(on, q, p), torch.where(on, value, q)
            result = q
            targets.append(result)

        codes = torch.nn.functional.one_hot(gates, len(GATES)) * applies.unsqueeze(3)
        inputs = torch.cat([bits, codes.flatten(2)], 2)
        return _ending(inputs.float(), torch.stack(targets, 1).unsqueeze(2), lengths, used)


@dataclass(frozen=True)
class Addition(Task):
    """The sum of all numbers so far; up to ``max_numbers`` of up to ``max_digits`` digits, drawn one by one.

    A time step holds one number: a one-hot code of ten for each digit, the most significant first, and
    zeros after the last. The target is the sum in the same way, digit by digit, with the class 10 after
    its last. About the first number nothing is asked. ``difficulty`` is the number of digits added.
    """

    max_numbers: int = 5
    max_digits: int = 5

    def __post_init__(self) -> None:
        check_count("max_numbers", self.max_numbers, 2)  # about the first nothing is asked
        check_count("max_digits", self.max_digits, maximum=15)

    @property
    def features(self) -> int:
        """The codes of all digits."""
        return 10 * self.max_digits

    @property
    def outputs(self) -> int:
        """The digits of the largest sum."""
        return len(str(self.max_numbers * (10**self.max_digits - 1)))

    @property
    def classes(self) -> int:
        """Ten digits, and none."""
        return 11

    def _sample(self, count: int, random: "_Random") -> TaskBatch:
        lengths = random.integers(1, self.max_numbers, count)
        used = random.integers(1, self.max_digits, count, self.max_numbers)
        digits = random.integers(0, 9, count, self.max_numbers, self.max_digits)
        place = torch.arange(self.max_digits, device=digits.device)
        there = place < used.unsqueeze(2)
        powers = torch.where(there, 10 ** (used.unsqueeze(2) - 1 - place).clamp(min=0), 0)
        targets = _digits((digits * powers).sum(2).cumsum(1), self.outputs)
        targets[:, 0] = UNASKED
        inputs = (torch.nn.functional.one_hot(digits, 10) * there.unsqueeze(3)).flatten(2)
        return _ending(inputs.float(), targets, lengths, used)


@dataclass(frozen=True)
class Sort(Task):
    """The order of ``min_numbers`` to ``max_numbers`` normal variables, smallest first.

    A time step holds a number and a flag, which is 1 with the last number. As many time steps of zeros
    follow, at which the index of the smallest number, of the second smallest, … is asked; indices are
    from 0. ``difficulty`` is how many numbers there are.
    """

    min_numbers: int = 2
    max_numbers: int = 15

    def __post_init__(self) -> None:
        check_count("min_numbers", self.min_numbers)
        check_count("max_numbers", self.max_numbers, self.min_numbers)

    @property
    def features(self) -> int:
        """A number and a flag."""
        return 2

    @property
    def classes(self) -> int:
        """The indices of the numbers."""
        return self.max_numbers

    def _sample(self, count: int, random: "_Random") -> TaskBatch:
        numbers = random.integers(self.min_numbers, self.max_numbers, count, 1)
        values = random.normal(count, self.max_numbers)
        place = torch.arange(self.max_numbers, device=values.device)
        there = place < numbers
        inputs = torch.zeros(count, 2 * self.max_numbers, 2, device=values.device)
        inputs[:, : self.max_numbers, 0] = torch.where(there, values, 0.0)
        inputs[:, : self.max_numbers, 1] = (place == numbers - 1).float()
        order = torch.where(there, values, torch.inf).argsort(dim=1, stable=True)
        targets = torch.full((count, 2 * self.max_numbers), UNASKED, device=values.device)
        # the answers begin where the numbers end, which differs from one sequence to another
        targets.scatter_(1, place + numbers, torch.where(there, order, UNASKED))
        difficulty = numbers.expand(-1, 2 * self.max_numbers)
        return _ending(inputs, targets.unsqueeze(2), 2 * numbers[:, 0], difficulty)


TASKS: Mapping[str, Mapping[str, Task]] = {
    "parity": {"paper": Parity(), "small": Parity(size=16), "tiny": Parity(size=8)},
    "logic": {"paper": Logic(), "small": Logic(4, 4), "tiny": Logic(2, 2)},
    "addition": {"paper": Addition(), "small": Addition(3, 3), "tiny": Addition(2, 1)},
    "sort": {"paper": Sort(), "small": Sort(2, 6), "tiny": Sort(2, 3)},
}


def task(name: str, preset: str = "paper") -> Task:
    """Return a task by name, in the size of Graves' paper or a smaller one.

    >>> task("addition"), task("addition", "tiny")
    (Addition(max_numbers=5, max_digits=5), Addition(max_numbers=2, max_digits=1))
    """
    if name not in TASKS:
        raise ValueError(f"expected a task among {', '.join(TASKS)}; got {name!r}")
    if preset not in TASKS[name]:
        raise ValueError(f"expected a preset among {', '.join(TASKS[name])}; got {preset!r}")
    return TASKS[name][preset]


class _Random:
    """A source of random tensors, all from one generator and on its device."""

    def __init__(self, generator: torch.Generator | None) -> None:
        self.generator = generator
        self.device = "cpu" if generator is None else generator.device

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        """Whole numbers from ``low`` to ``high``, both included."""
        return torch.randint(low, high + 1, shape, generator=self.generator, device=self.device)

    def uniform(self, *shape: int) -> Tensor:
        # in double precision no two are equal, for all purposes
        return torch.rand(shape, generator=self.generator, device=self.device, dtype=torch.double)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, device=self.device)


def _ending(inputs: Tensor, targets: Tensor, lengths: Tensor, difficulty: Tensor) -> TaskBatch:
    """Blank everything after the end of each sequence."""
    over = torch.arange(inputs.size(1), device=inputs.device) >= lengths.unsqueeze(1)
    return TaskBatch(
        inputs=inputs.masked_fill(over.unsqueeze(2), 0.0),
        targets=targets.masked_fill(over.unsqueeze(2), UNASKED),
        lengths=lengths,
        difficulty=difficulty.masked_fill(over, 0),
    )


def _digits(values: Tensor, width: int) -> Tensor:
    """The decimal digits of whole numbers, the most significant first, and 10 after the last."""
    powers = 10 ** torch.arange(width, device=values.device)
    count = (values.unsqueeze(-1) >= powers).sum(-1, keepdim=True).clamp(min=1)
    exponent = count - 1 - torch.arange(width, device=values.device)
    return torch.where(exponent >= 0, values.unsqueeze(-1) // 10 ** exponent.clamp(min=0) % 10, 10)
