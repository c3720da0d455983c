"""One network learning: a whole iteration on the device, from picking the images to the new weights.

On a GPU the forward pass is compiled and the iteration captured in a CUDA graph, so that the host does
nothing but start it. Everything random is a function of the seed and the iteration, and of nothing else:
there is no generator state to save, and a run does not depend on what else is trained beside it, unless they
are joined; see ``joint``.

Where there is a process group, its processes share the work of each iteration; see ``distributed``.
"""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from torchpact import EMABaseline, map_loss, reinforce_loss
from torchpact.models import HaltingHead, ResNet, build
from torchpact_recipes.data import BatchOrder, Images
from torchpact_recipes.training import distributed
from torchpact_recipes.training.config import TrainConfig
from torchpact_recipes.training.distillation import Teacher
from torchpact_recipes.training.image_iterations import ImageIterations
from torchpact_recipes.training.inputs import as_input, casting
from torchpact_recipes.training.random_halting import halt_at_random
from torchpact_recipes.training.state import (
    check_same_tensors,
    collect,
    copies,
    derived_seed,
    make_room,
    put_back,
    seeded,
)


class Learner(ImageIterations):
    """A network, its optimizer and its data on one device; ``advance`` is one iteration of training.

    In a process group every process has one, and all advance and read their metrics together.
    """

    def __init__(
        self,
        config: TrainConfig,
        data: Images,
        device: torch.device | str = "cpu",
        *,
        teacher: ResNet | None = None,
        compile: bool | None = None,
        capture: bool | None = None,
    ) -> None:
        self.config = config
        self.device = torch.device(device)
        on_gpu = self.device.type == "cuda"
        self.shared = distributed.world() > 1
        if self.shared and (compile or capture):
            raise ValueError("expected neither compile nor capture where processes share the work")
        if config.deterministic and compile:
            raise ValueError("expected no compile in a deterministic run: the compiler picks kernels by time")
        may_compile = on_gpu and not self.shared and not config.deterministic
        self.compile = may_compile if compile is None else compile
        self.capture = on_gpu and not self.shared if capture is None else capture
        self.iteration = 0
        with seeded(derived_seed(config.seed, "weights"), torch.device("cpu")):
            mode = config.training_mode()
            model = build(config.network, distributed.with_global_noise(mode) if self.shared else mode)
        if config.method == "random":
            halt_at_random(model, config.random_steps)
        if self.shared:
            distributed.with_global_norms(model)
        memory = torch.channels_last if on_gpu else torch.contiguous_format
        self.model: ResNet = model.to(self.device, memory_format=memory)  # type: ignore[call-overload]
        self.use_kernels = on_gpu and self.compile and config.precision == "bf16"
        if self.use_kernels:
            # they need Triton, which comes with torch for CUDA but not for CPUs
            from torchpact_recipes.training.kernels import with_fused_kernels

            self.model = with_fused_kernels(self.model)
        # it averages gradients over processes; the network keeps its names, and is evaluated by itself
        self._called: nn.Module = DistributedDataParallel(self.model) if self.shared else self.model
        if (teacher is None) != (config.distill == 0):
            raise ValueError(
                f"expected a teacher where distill is not 0, and only there; it is {config.distill:g}"
            )
        self.teacher = None
        if teacher is not None:
            self.teacher = Teacher(teacher, self.device, config.precision, self.compile)
        self.baseline = EMABaseline(config.baseline_decay).to(self.device)
        self.optimizer = make_optimizer(self.model, config, self.first_rate())
        self.data = data
        self.order = BatchOrder(
            len(data), config.batch, derived_seed(config.seed, "order"), device=self.device
        )
        self._share = distributed.share(config.batch)
        # where the iteration finds its images: the order of the epoch, and how far it has come
        self._permutation = torch.zeros(
            self.order.batches_per_epoch * config.batch, dtype=torch.long, device=self.device
        )
        self._position = torch.zeros((), dtype=torch.long, device=self.device)
        self._epoch = -1
        self._price = config.tau
        self._tau = torch.tensor(config.tau, device=self.device)
        blocks = len(self.model.blocks) if config.network.adaptive else 0
        self._sums = torch.zeros(3 + blocks, dtype=torch.double, device=self.device)
        self._since = 0
        self._rate = config.lr
        self.compile_or_capture(self.compile, self.capture)

    def _forward(self, images: Tensor, labels: Tensor, taught: Tensor | None) -> tuple[Tensor, Tensor]:
        config = self.config
        with casting(self.device, config.precision):
            logits, ponders = self._called(as_input(images))
        logits = logits.float()
        nll, known = self.nll_of(logits, labels, taught)
        if config.method == "reinforce":
            loss = reinforce_loss(nll, ponders, self._tau, self._past_reward)
        else:
            loss = map_loss(nll, ponders, self._tau)
        with torch.no_grad():
            reported = loss if config.method != "reinforce" else map_loss(nll, ponders, self._tau)
            right = (logits.argmax(1) == labels).float().mean()
            sums = [reported, known.mean(), right, *(p.expected_steps.mean() for p in ponders)]
            report = torch.stack([s.detach().float() for s in sums]).double()
        return loss, report

    def _past_reward(self, reward: Tensor) -> Tensor:
        """The baseline of the rewards, which all processes see the mean of."""
        past: Tensor = self.baseline(distributed.mean(reward.mean()) if self.shared else reward)
        return past

    def _batch(self) -> tuple[Tensor, Tensor]:
        """The share of this process in the batch whose turn it is, cropped and flipped."""
        images, labels = super()._batch()
        # cropping is cheap: that of the whole batch is the same for any number of processes
        return (images[self._share], labels[self._share]) if self.shared else (images, labels)

    def _set_order(self, epoch: int) -> None:
        self._permutation.copy_(self.order.whole_epoch(epoch))

    def _set_price(self) -> None:
        price = self.config.price(self.iteration)
        if price != self._price:
            self._price = price
            self._tau.fill_(price)

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Within it the learner can be used in any way; after it, training goes on as if it had not been."""
        self.wait()
        with self.on_stream():
            before = copies(self.state())
            self.turn_to_batch()
            position = self._position.clone()
            try:
                yield
            finally:
                put_back(self.state(), before)
                self._position.copy_(position)

    def batch(self, number: int | None = None) -> tuple[Tensor, Tensor]:
        """Return images, cropped and flipped, and labels: of the next batch, or one of this epoch."""
        if number is not None:
            self._position.fill_(number)
        return self._batch()

    @torch.enable_grad()
    def gradients(self, images: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        """The gradients of the loss of a batch, one for each of those that learn, with fresh noise."""
        loss, _ = self.objective(images, labels)
        return torch.autograd.grad(loss, list(self.learning().values()))

    def learning(self) -> dict[str, nn.Parameter]:
        """The parameters that learn, by name."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    @property
    def pace(self) -> tuple[str, int]:
        """Images, and how many of them in an iteration."""
        return "images", self.config.batch

    def wait(self) -> None:
        """Wait until the device has done all that was asked of it."""
        if self.captured is not None:
            self.captured.stream.synchronize()

    def state(self) -> dict[str, Tensor]:
        """All tensors that make up the state of training, by name; not copies."""
        return collect(self.model, self.baseline, self.optimizer)

    @torch.no_grad()
    def load_state(self, tensors: dict[str, Tensor], iteration: int) -> None:
        """Continue from a state that :meth:`state` gave, at that iteration."""
        with self.on_stream():
            make_room(self.model, self.optimizer, tensors, self.capture)
        own = self.state()
        check_same_tensors(own, tensors)
        self.iteration, self._epoch, self._since = iteration, -1, 0
        with self.on_stream():
            for name, value in own.items():
                value.copy_(tensors[name])
            self._sums.zero_()
            self.set_learning_rate()
            self._set_price()


def make_optimizer(model: nn.Module, config: TrainConfig, lr: float | Tensor) -> torch.optim.Optimizer:
    """Return the optimizer of a run; weights of convolutions and linear layers decay.

    A learning rate that lives on the device is for iterations that are captured; that of a group of
    parameters is some ``times`` as large.
    """
    decayed = {id(m.weight) for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear)}
    slow = set() if config.head_lr == 1 else {id(p) for p in _of_heads(model)}
    groups: list[dict[str, Any]] = []
    for of_head, decays in itertools.product((False, True), (True, False)):
        chosen = [p for p in model.parameters() if (id(p) in slow, id(p) in decayed) == (of_head, decays)]
        if chosen:
            times = config.head_lr if of_head else 1.0
            decay = config.weight_decay if decays else 0.0
            groups.append({"params": chosen, "weight_decay": decay, "times": times, "lr": lr * times})
    captured = isinstance(lr, Tensor)
    fused = True if captured else None  # whose kernels take such a rate
    if config.optimizer == "adam":
        return torch.optim.Adam(groups, lr=lr, fused=fused, capturable=captured)
    return torch.optim.SGD(groups, lr=lr, momentum=config.momentum, nesterov=config.nesterov, fused=fused)


def _of_heads(model: nn.Module) -> Iterator[nn.Parameter]:
    for module in model.modules():
        if isinstance(module, HaltingHead):
            yield from module.parameters()
