"""What is the same wherever several networks are trained by the same kernels, on images or on text."""

from collections.abc import Callable, Sequence
from typing import Generic, NoReturn, TypeVar

import torch
from torch import Tensor

from torchpact_recipes.training.loop import BaseLearner, Metrics

L = TypeVar("L", bound=BaseLearner)


def groups(learners: Sequence[L], can_form_ensemble: Callable[[Sequence[L]], bool]) -> list[list[L]]:
    """Divide learners into those that can join each other; one that can join nobody is alone."""
    found: list[list[L]] = []
    for one in learners:
        for group in found:
            if can_form_ensemble([group[0], one]):
                group.append(one)
                break
        else:
            found.append([one])
    return found


def compatible(learners: Sequence[BaseLearner]) -> bool:
    """Whether all are at one iteration, on one device, captured or not, and none has joined others."""
    places = {(one.iteration, one.device, one.capture) for one in learners}
    return len(places) == 1 and all(one.ensemble is None for one in learners)


class Ensemble(BaseLearner, Generic[L]):
    """Iterations of several learners, who from now on advance by this; each has its own price and metrics.

    Those that build on it make weights, optimizer and ``captured``, then call :meth:`attach`.
    """

    def __init__(self, learners: Sequence[L]) -> None:
        self.learners = list(learners)
        first = learners[0]
        self.config, self.device, self.iteration = first.config, first.device, first.iteration
        self.capture = first.capture
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # weights may still be on their way, from another stream
        self.rate = self.config.lr
        self._prices = [one.config.tau for one in learners]
        self.taus = torch.tensor(self._prices, device=self.device)
        self.sums = torch.stack([one.sums for one in learners])

    def attach(self) -> None:
        """Have the learners know that they are trained here, and share what is captured and summed up."""
        for one, sums in zip(self.learners, self.sums, strict=True):
            one.captured, one.sums, one.ensemble = self.captured, sums, self

    @property
    def together(self) -> int:
        """How many networks these are."""
        return len(self.learners)

    @property
    def pace(self) -> tuple[str, int]:
        """What each reads, and how much in an iteration."""
        return self.learners[0].pace

    def advance(self) -> None:
        """Train all for one iteration."""
        places = sorted({one.iteration for one in self.learners})
        if len(places) > 1:
            raise ValueError(f"expected all that have joined at the same iteration, got {places}")
        if places[0] != self.iteration:  # they were given another state
            self.iteration = places[0]
        super().advance()
        for one in self.learners:
            one.iteration += 1
            one.since += 1

    def metrics(self) -> Metrics:
        """Refuse: each learner has its own."""
        raise TypeError("expected one of the joint learners to be asked for its metrics, not all at once")

    def __deepcopy__(self, memo: dict[int, object]) -> NoReturn:
        """Refuse: copied weights are no parts of larger tensors, and would never change."""
        raise TypeError("expected learners to be copied before they join, or their models and states alone")

    def set_price(self) -> None:
        """Set the price of a step of each network to that of this iteration."""
        prices = [one.config.price(self.iteration) for one in self.learners]
        if prices != self._prices:
            self._prices = prices
            self.taus.copy_(torch.tensor(prices))


def means(each: Tensor, networks: int) -> Tensor:
    """Average what is known of every example, for each network; theirs lie one after the other."""
    return each.reshape(networks, -1).mean(1)
