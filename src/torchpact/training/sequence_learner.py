"""One network learning from sequences: fresh examples of a task, or a text read window by window.

As for images, everything random is a function of the seed and the iteration. The states that a text
leaves behind are part of the state of training.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from torchpact import _state
from torchpact._state import State
from torchpact.baseline import EMABaseline
from torchpact.models.sequence import SequenceNet
from torchpact.training.learns import Metrics
from torchpact.training.sequence import Outcome, lengths_of, sequence_loss
from torchpact.training.sequence_config import SequenceTrainConfig, make_task
from torchpact.training.state import check_same_tensors, collect, derived_seed, make_room
from torchpact.training.text import Streams


class SequenceLearner:
    """A network and its optimizer on one device; ``text`` is what to read, for those that read.

    >>> from torchpact.training.sequence_presets import sequence_preset
    >>> learner = SequenceLearner(sequence_preset("parity", "tiny", hidden=8))
    >>> learner.advance()
    >>> learner.metrics().iterations
    1
    """

    def __init__(
        self, config: SequenceTrainConfig, device: torch.device | str = "cpu", text: Tensor | None = None
    ) -> None:
        self.config = config
        self.device = torch.device(device)
        self.iteration = 0
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derived_seed(config.seed, "weights"))
            model = SequenceNet(config.network, config.training_mode())
        self.model = model.to(self.device).train()
        self.baseline = EMABaseline(config.baseline_decay).to(self.device)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=config.lr)
        self.streams: Streams | None = None
        self._states: list[State] = []
        if config.is_text:
            if text is None:
                raise ValueError(f"expected a text to learn {config.task} from, got none")
            self.streams = Streams(text.to(self.device), config.batch, config.window)
            self._states = self.model.zero_states(config.batch)
        else:
            self.task = make_task(config.task, config.sizes)
        self._sums = torch.zeros(3 + config.network.layers, dtype=torch.double, device=self.device)
        self._since = 0

    @property
    def pace(self) -> tuple[str, int]:
        """Characters or sequences, and how many of them in an iteration."""
        config = self.config
        return ("characters", config.batch * config.window) if config.is_text else ("sequences", config.batch)

    def advance(self) -> None:
        """Train for one iteration."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.learning_rate(self.iteration)
        torch.manual_seed(derived_seed(self.config.seed, "iteration", self.iteration))
        outcome = self._read() if self.streams is not None else self._try()
        self.optimizer.zero_grad(set_to_none=True)
        outcome.loss.backward()
        clip_grad_norm_(self.model.parameters(), self.config.clip_norm)
        self.optimizer.step()
        self._sums += outcome.report
        self.iteration += 1
        self._since += 1

    def _try(self) -> Outcome:
        """The outcome of fresh examples."""
        seed = derived_seed(self.config.seed, "examples", self.iteration)
        batch = self.task.sample(self.config.batch, torch.Generator(self.device).manual_seed(seed))
        return self._outcome(batch.inputs, batch.targets, lengths=lengths_of(batch))

    def _read(self) -> Outcome:
        """The outcome of the next window, which begins with the states after the last."""
        assert self.streams is not None
        number = self.iteration % len(self.streams)
        if number == 0:
            self._states = self.model.zero_states(self.config.batch)
        inputs, targets = self.streams[number]
        outcome = self._outcome(inputs, targets.unsqueeze(2), states=self._states)
        assert outcome.states is not None
        self._states = [_state.map_state(lambda part: part.detach(), state) for state in outcome.states]
        return outcome

    def _outcome(self, inputs: Tensor, targets: Tensor, **options: Any) -> Outcome:
        options |= {"baseline": self.baseline, "tau": self.config.price(self.iteration)}
        return sequence_loss(self.model, inputs, targets, self.config, **options)

    def wait(self) -> None:
        """Wait until the device has done all that was asked of it."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def metrics(self) -> Metrics:
        """Read the means since the last call; waits for the device."""
        sums = (self._sums / max(self._since, 1)).tolist()
        count, self._since = self._since, 0
        self._sums.zero_()
        return Metrics(sums[0], sums[1], sums[2], sums[3:], count)

    def state(self) -> dict[str, Tensor]:
        """All tensors that make up the state of training, by name; not copies."""
        tensors = collect(self.model, self.baseline, self.optimizer)
        for layer, state in enumerate(self._states):
            for number, part in enumerate(_state.parts(state)):
                tensors[f"states.{layer}.{number}"] = part
        return tensors

    @torch.no_grad()
    def load_state(self, tensors: dict[str, Tensor], iteration: int) -> None:
        """Continue from a state that :meth:`state` gave, at that iteration."""
        make_room(self.model, self.optimizer, tensors)
        own = self.state()
        check_same_tensors(own, tensors)
        for name, value in own.items():
            value.copy_(tensors[name])
        self.iteration, self._since = iteration, 0
        self._sums.zero_()
