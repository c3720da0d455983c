"""Networks of one kind that read one text, trained by the same kernels; a single one, too, in fewer of them.

They read the same windows, each from states of its own. Their weights have a dimension more, the first; see
``joint_lstm`` for what is made of them.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchpact._state import State
from torchpact.training.capturing import Captured
from torchpact.training.iterations import Iterations
from torchpact.training.joint_text import LSTMState, can_read, read_text
from torchpact.training.sequence_config import SequenceTrainConfig
from torchpact.training.state import copies, put_back

if TYPE_CHECKING:
    from torchpact.training.sequence_learner import SequenceLearner


def join_sequences(learners: Sequence["SequenceLearner"]) -> list["SequenceJoint"]:
    """Have all that can be trained by the same kernels be so, from now on."""
    groups: list[list[SequenceLearner]] = []
    for one in learners:
        for group in groups:
            if can_join_sequences([group[0], one]):
                group.append(one)
                break
        else:
            groups.append([one])
    return [SequenceJoint(group) for group in groups if can_join_sequences(group)]


def can_join_sequences(learners: Sequence["SequenceLearner"]) -> bool:
    """Whether these can be trained by the same kernels: LSTMs on one text, of one kind, at one iteration.

    Their seeds and prices may differ, and how long steps are free. Not for REINFORCE, nor with dropout.
    """
    first = learners[0]
    kind = _kind(first.config)
    return (
        first.streams is not None
        and first.config.method in ("plain", "repeat", "relaxed", "act")
        and can_read(first.model)
        and all(
            _kind(one.config) == kind
            and (one.iteration, one.device, one.capture) == (first.iteration, first.device, first.capture)
            and one.streams is not None
            and one.streams.text is first.streams.text
            and one.joined is None
            for one in learners
        )
    )


def _kind(config: SequenceTrainConfig) -> SequenceTrainConfig:
    return replace(config, tau=0.0, seed=0, free=0.0)


class SequenceJoint(Iterations):
    """Learners that advance together; from now on their weights and states are parts of larger tensors.

    What each draws depends on all of them, unlike where they have streams of their own. On a GPU products are
    of tf32 numbers, with ten bits after the first.

    >>> from torchpact.data import load_sample_text
    >>> from torchpact.training import SequenceLearner, sequence_preset
    >>> text = load_sample_text("train")
    >>> configs = [sequence_preset("enwik8", "tiny", hidden=8, batch=4, seed=seed) for seed in range(3)]
    >>> learners = [SequenceLearner(config, text=text) for config in configs]
    >>> SequenceJoint(learners).advance()
    >>> [one.metrics().iterations for one in learners]
    [1, 1, 1]
    """

    config: SequenceTrainConfig

    def __init__(self, learners: Sequence["SequenceLearner"]) -> None:
        if not can_join_sequences(learners):
            raise ValueError("expected LSTMs of one kind that read one text, at the same iteration")
        first = learners[0]
        assert first.streams is not None
        self.learners, self.streams, self.capture = list(learners), first.streams, first.capture
        self.config, self.device, self.iteration = first.config, first.device, first.iteration
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # what was loaded may still be on its way, on other streams
        self.weights = self._stacked_weights()
        self.lr = torch.tensor(self.config.lr, device=self.device) if self.capture else self.config.lr
        self.optimizer = make_adam(self.weights.values(), self.lr)
        self._stack_moments()
        self._states: list[LSTMState] = self._stacked_states()
        self._symbols, self._targets = (x.clone() for x in self.streams[0])
        self._prices = [one.config.tau for one in self.learners]
        self._tau = torch.tensor(self._prices, device=self.device)
        count = len(self.learners)
        self._sums = torch.zeros(count, len(first._sums), dtype=torch.double, device=self.device)
        self._since, self._rate = 0, self.config.lr
        self.captured = Captured(self.device) if self.capture else None
        for one, sums in zip(self.learners, self._sums, strict=True):
            one.captured, one._sums, one.joined = self.captured, sums, self

    def _stacked_weights(self) -> dict[str, nn.Parameter]:
        """The weights of all, of which theirs become views."""
        own = [dict(one.model.named_parameters()) for one in self.learners]
        found = {}
        for name in own[0]:
            found[name] = nn.Parameter(torch.stack([each[name].detach() for each in own]))
            for each, part in zip(own, found[name].detach(), strict=True):
                each[name].data = part
        return found

    def _stack_moments(self) -> None:
        """Make what Adam would in its first step, or take it from all; learners have views of it."""
        own = [dict(one.model.named_parameters()) for one in self.learners]
        for name, stacked in self.weights.items():
            states = [one.optimizer.state[each[name]] for one, each in zip(self.learners, own, strict=True)]
            steps = torch.zeros((), device=self.device if self.capture else None)
            steps.copy_(states[0].get("step", steps))
            moments = self.optimizer.state[stacked] = {"step": steps}
            for key in ("exp_avg", "exp_avg_sq"):
                blank = torch.zeros_like(stacked[0].detach())
                moments[key] = torch.stack([state.get(key, blank) for state in states])
                for state, part in zip(states, moments[key], strict=True):
                    state[key] = part
            for state in states:
                state["step"] = steps  # the same for all

    def _stacked_states(self) -> list[LSTMState]:
        """The states of all, of which theirs become views."""
        found = []
        for layer in range(self.config.network.layers):
            h, c = (torch.stack([one._states[layer][part] for one in self.learners]) for part in range(2))
            found.append((h, c))
            for number, one in enumerate(self.learners):
                view: State = (h[number], c[number])
                one._states[layer] = view
        return found

    def advance(self) -> None:
        """Train all for one iteration."""
        self.iteration = self.learners[0].iteration
        super().advance()
        for one in self.learners:
            one.iteration += 1
            one._since += 1

    def _objective(self) -> tuple[Tensor, Tensor, list[LSTMState]]:
        """The sum of the losses of all networks, what to report of each, and their states."""
        logits, after, ponderings = read_text(
            self.learners[0].model, self.weights, self._symbols, self._states
        )
        count, targets = len(logits), self._targets.t().flatten()
        nll = F.cross_entropy(logits.flatten(0, 2), targets.repeat(count), reduction="none")

        def means(each: Tensor) -> Tensor:
            """Of what is known of every character, for each network."""
            return each.reshape(count, -1).mean(1)

        losses = means(nll)
        for pondering in ponderings:
            losses = losses + self._tau * means(pondering.cost)
        with torch.no_grad():
            right = (logits.flatten(1, 2).argmax(-1) == targets).float()
            steps = [means(pondering.expected_steps) for pondering in ponderings]
            report = torch.stack([losses, means(nll), means(right), *steps], 1).double()
        return losses.sum(), report, after

    def _iterate(self) -> None:
        loss, report, after = self._objective()
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        clip_each([weight.grad for weight in self.weights.values()], self.config.clip_norm)
        self.optimizer.step()
        self._sums += report
        for kept, new in zip(self._states, after, strict=True):
            for mine, part in zip(kept, new, strict=True):
                mine.copy_(part)

    def _turn_to_batch(self) -> None:
        number = self.iteration % len(self.streams)
        if number == 0:
            for h, c in self._states:
                h.zero_()
                c.zero_()
        symbols, targets = self.streams[number]
        self._symbols.copy_(symbols)
        self._targets.copy_(targets)

    def _set_price(self) -> None:
        prices = [one.config.price(self.iteration) for one in self.learners]
        if prices != self._prices:
            self._prices = prices
            self._tau.copy_(torch.tensor(prices))

    @torch.enable_grad()
    def _prepare(self) -> None:
        """Warm up and capture the iteration if need be, then put everything back as it was."""
        if self.captured is None or self.captured.recorded:
            return
        torch.cuda.synchronize(self.device)
        before = copies(self.state())
        with tf32_products():
            self.captured.record(self._iterate, lambda: self.optimizer.zero_grad(set_to_none=True))
        put_back(self.state(), before)
        self._sums.zero_()

    def state(self) -> dict[str, Tensor]:
        """What an iteration changes, by name; not copies."""
        tensors: dict[str, Tensor] = {name: weight.detach() for name, weight in self.weights.items()}
        for name, weight in self.weights.items():
            tensors |= {f"{key}.{name}": value for key, value in self.optimizer.state[weight].items()}
        for layer, state in enumerate(self._states):
            tensors |= {f"states.{layer}.{number}": part for number, part in enumerate(state)}
        return tensors


def make_adam(weights: Iterable[nn.Parameter], lr: float | Tensor) -> torch.optim.Adam:
    """Adam; a learning rate that lives on the device is for iterations that are captured."""
    captured = isinstance(lr, Tensor)
    # fused kernels take such a rate
    return torch.optim.Adam(list(weights), lr=lr, fused=True if captured else None, capturable=captured)


def clip_each(gradients: Sequence[Tensor | None], limit: float) -> None:
    """Scale the gradients of each network, the first dimension, to a norm of at most ``limit``.

    >>> gradients = [torch.tensor([[3.0], [0.3]]), torch.tensor([[4.0], [0.4]])]
    >>> clip_each(gradients, 1.0)
    >>> torch.cat(gradients, 1)
    tensor([[0.6000, 0.8000],
            [0.3000, 0.4000]])
    """
    found = [gradient for gradient in gradients if gradient is not None]
    norms = [torch.linalg.vector_norm(gradient.flatten(1), dim=1) for gradient in found]
    norm = torch.linalg.vector_norm(torch.stack(norms), dim=0)
    scale = (limit / (norm + 1e-6)).clamp(max=1.0)
    for gradient in found:
        gradient.mul_(scale.view(-1, *[1] * (gradient.dim() - 1)))


@contextmanager
def tf32_products() -> Iterator[None]:
    """Within it, products of single precision on a GPU are made of tf32 numbers.

    >>> with tf32_products():
    ...     torch.get_float32_matmul_precision()
    'high'
    """
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
