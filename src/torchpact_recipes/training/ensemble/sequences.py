"""Networks of one kind that read one text, trained by the same kernels; a single one, too, in fewer of them.

They read the same windows, each from states of its own. Their weights have a dimension more, the first; see
``lstm`` for what is made of them.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchpact.core.state import State
from torchpact_recipes.training.cuda_graph import CapturedStep
from torchpact_recipes.training.ensemble.base import Ensemble, compatible, groups, means
from torchpact_recipes.training.ensemble.text import LSTMState, can_read, read_text
from torchpact_recipes.training.sequence_config import SequenceTrainConfig
from torchpact_recipes.training.state import make_adam

if TYPE_CHECKING:
    from torchpact_recipes.training.sequences import SequenceLearner


def form_sequence_ensembles(learners: Sequence["SequenceLearner"]) -> list["SequenceEnsemble"]:
    """Have all that can be trained by the same kernels be so, from now on; a single one, too.

    As each has all of them advance, their trainers are to be run by ``train_together``.
    """
    found = groups(learners, can_form_sequence_ensemble)
    return [SequenceEnsemble(group) for group in found if can_form_sequence_ensemble(group)]


def can_form_sequence_ensemble(learners: Sequence["SequenceLearner"]) -> bool:
    """Whether these can be trained by the same kernels: LSTMs on one text, of one kind, at one iteration.

    Their seeds and prices may differ, and how long steps are free. Not for REINFORCE, nor with dropout.
    """
    first = learners[0]
    config = first.config
    return (
        first.streams is not None
        and config.method in ("plain", "repeat", "relaxed", "act")
        and can_read(first.model)
        and compatible(learners)
        and all(
            replace(one.config, tau=config.tau, seed=config.seed, free=config.free) == config
            and one.streams is not None
            and one.streams.text is first.streams.text
            for one in learners
        )
    )


class SequenceEnsemble(Ensemble["SequenceLearner"]):
    """Learners that advance together; from now on their weights and states are parts of larger tensors.

    What each draws depends on all of them, unlike where they have streams of their own. On a GPU products are
    of tf32 numbers, with ten bits after the first.

    >>> from torchpact_recipes.data import load_sample_text
    >>> from torchpact_recipes.training import SequenceLearner, sequence_preset
    >>> text = load_sample_text("train")
    >>> configs = [sequence_preset("enwik8", "tiny", hidden=8, batch=4, seed=seed) for seed in range(3)]
    >>> learners = [SequenceLearner(config, text=text) for config in configs]
    >>> SequenceEnsemble(learners).advance()
    >>> [one.metrics().iterations for one in learners]
    [1, 1, 1]
    """

    config: SequenceTrainConfig

    def __init__(self, learners: Sequence["SequenceLearner"]) -> None:
        if not can_form_sequence_ensemble(learners):
            raise ValueError("expected LSTMs of one kind that read one text, at the same iteration")
        super().__init__(learners)
        assert learners[0].streams is not None
        self.streams = learners[0].streams
        self.weights = self._stacked_weights()
        rate = torch.tensor(self.config.lr, device=self.device) if self.capture else self.config.lr
        self.optimizer = make_adam(self.weights.values(), rate)
        self._stack_moments()
        self.states: list[LSTMState] = self._stacked_states()
        self._symbols, self._targets = (x.clone() for x in self.streams[0])
        self.captured = CapturedStep(self.device) if self.capture else None
        self.attach()

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
            h, c = (torch.stack([one.states[layer][part] for one in self.learners]) for part in range(2))
            found.append((h, c))
            for number, one in enumerate(self.learners):
                view: State = (h[number], c[number])
                one.states[layer] = view
        return found

    def loss(self) -> tuple[Tensor, Tensor]:
        """Return the sum of the losses of all networks, and what to report of each."""
        logits, self._after, ponderings = read_text(
            self.learners[0].model, self.weights, self._symbols, self.states
        )
        count, targets = len(logits), self._targets.t().flatten()
        nll = F.cross_entropy(logits.flatten(0, 2), targets.repeat(count), reduction="none")
        losses = means(nll, count)
        for pondering in ponderings:
            losses = losses + self.taus * means(pondering.cost, count)
        with torch.no_grad():
            right = (logits.flatten(1, 2).argmax(-1) == targets).float()
            found = [nll, right, *(pondering.expected_steps for pondering in ponderings)]
            report = torch.stack([losses, *(means(each, count) for each in found)], 1).double()
        return losses.sum(), report

    def clip_gradients(self) -> None:
        """Limit the norm of the gradients of each network."""
        clip_each([weight.grad for weight in self.weights.values()], self.config.clip_norm)

    def finish_step(self) -> None:
        """Keep the states that the next window begins with."""
        for kept, new in zip(self.states, self._after, strict=True):
            for mine, part in zip(kept, new, strict=True):
                mine.copy_(part)

    def next_batch(self) -> None:
        """Put the next windows of all where the iteration looks for them."""
        number = self.iteration % len(self.streams)
        if number == 0:
            for h, c in self.states:
                h.zero_()
                c.zero_()
        symbols, targets = self.streams[number]
        self._symbols.copy_(symbols)
        self._targets.copy_(targets)

    def record(self, captured: CapturedStep) -> None:
        """Warm up and record a step."""
        with tf32_products():
            captured.record(self.step, self.optimizer.zero_grad)

    def state(self) -> dict[str, Tensor]:
        """What an iteration changes, by name; not copies."""
        tensors: dict[str, Tensor] = {name: weight.detach() for name, weight in self.weights.items()}
        for name, weight in self.weights.items():
            tensors |= {f"{key}.{name}": value for key, value in self.optimizer.state[weight].items()}
        for layer, state in enumerate(self.states):
            tensors |= {f"states.{layer}.{number}": part for number, part in enumerate(state)}
        return tensors


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

    But for programs that have chosen by ``torch.backends.cuda.matmul.fp32_precision``: it is as they chose.

    >>> with tf32_products():
    ...     torch.get_float32_matmul_precision()
    'high'
    """
    try:
        before = torch.get_float32_matmul_precision()
    except RuntimeError:  # torch wants no mixing of the two ways to choose
        yield
        return
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
