"""Training on images: the network and its optimizer, the batch and its loss, validation.

On a GPU the forward pass is compiled and the iteration captured in a CUDA graph, so that the host does
nothing but start it.
"""

import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from torchpact import EMABaseline, map_loss, reinforce_loss
from torchpact.models import ResNet, build, warm_start
from torchpact_recipes import zoo
from torchpact_recipes.data import BatchOrder, Images, as_input, augment
from torchpact_recipes.training import distributed
from torchpact_recipes.training.algorithms import deterministic_algorithms, fastest_algorithms
from torchpact_recipes.training.checkpoint import load_network
from torchpact_recipes.training.compiling import compiled, many_kinds
from torchpact_recipes.training.config import TrainConfig
from torchpact_recipes.training.cuda_graph import CapturedStep
from torchpact_recipes.training.distillation import Teacher, divergence
from torchpact_recipes.training.distributed_layers import with_global_noise, with_global_norms
from torchpact_recipes.training.evaluate import casting, evaluate_modes
from torchpact_recipes.training.loop import BaseLearner
from torchpact_recipes.training.random_halting import halt_at_random
from torchpact_recipes.training.run import TrainingRun
from torchpact_recipes.training.run_files import Event, describe
from torchpact_recipes.training.state import derived_seed, make_optimizer, seeded
from torchpact_recipes.training.variance import gradient_variance


class Learner(BaseLearner):
    """A network for images that learns; in a process group every process has one.

    Args:
        config: What is trained, and how.
        data: The images, on the device.
        device: Where the network is.
        teacher: A plain network to learn from, where ``config.distill`` is not 0.
        compile: Whether to compile; by default on a GPU.
        capture: Whether to capture iterations in a CUDA graph; by default on a GPU.

    """

    config: TrainConfig
    model: ResNet
    tau: Tensor

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
        self.config, self.data, self.device = config, data, torch.device(device)
        on_gpu = self.device.type == "cuda"
        self.shared = distributed.world() > 1
        if self.shared and (compile or capture):
            raise ValueError("expected neither compile nor capture where processes share the work")
        if config.deterministic and compile:
            raise ValueError("expected no compile in a deterministic run: the compiler picks kernels by time")
        may_compile = on_gpu and not self.shared and not config.deterministic
        self.compile = may_compile if compile is None else compile
        self.capture = on_gpu and not self.shared if capture is None else capture
        self.use_kernels = on_gpu and self.compile and config.precision == "bf16"
        self.model = self._make_model()
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
        rate = torch.tensor(config.lr, device=self.device) if self.capture else config.lr
        self.optimizer = make_optimizer(self.model, config, rate)
        self.rate, self.price = config.lr, config.tau
        self.tau = torch.tensor(config.tau, device=self.device)
        blocks = len(self.model.blocks) if config.network.adaptive else 0
        self.sums = torch.zeros(3 + blocks, dtype=torch.double, device=self.device)
        self.order = BatchOrder(
            len(data), config.batch, derived_seed(config.seed, "order"), device=self.device
        )
        self._share = distributed.share(config.batch)
        self.make_batches([self.order])
        self.compile_or_capture()

    def _make_model(self) -> ResNet:
        config = self.config
        mode = config.training_mode()
        with seeded(derived_seed(config.seed, "weights"), torch.device("cpu")):
            model = build(config.network, with_global_noise(mode) if self.shared else mode)
        if config.method == "random":
            halt_at_random(model, config.random_steps)
        if self.shared:
            with_global_norms(model)
        memory = torch.channels_last if self.device.type == "cuda" else torch.contiguous_format
        placed: ResNet = model.to(self.device, memory_format=memory)  # type: ignore[call-overload]
        if not self.use_kernels:
            return placed
        # they need Triton, which comes with torch for CUDA but not for CPUs
        from torchpact_recipes.training.kernels import with_fused_kernels

        fused: ResNet = with_fused_kernels(placed)
        return fused

    def compile_or_capture(self) -> None:
        """Set how iterations are run; the first one compiles and captures."""
        self.crop, self.find_loss = self._crop, self._loss_of
        if self.compile:
            self.crop, self.find_loss = compiled(self._crop), compiled(self._loss_of)
        self.captured = CapturedStep(self.device) if self.capture else None

    # ---- the batch ----

    def make_batches(self, orders: list[BatchOrder]) -> None:
        """Make room on the device for the order of an epoch, of each network, and the position in it."""
        self.orders = orders
        length = orders[0].batches_per_epoch * self.config.batch
        self._permutation = torch.zeros(len(orders), length, dtype=torch.long, device=self.device)
        self.position = torch.zeros((), dtype=torch.long, device=self.device)
        self.positioned = -1  # the iteration that the position is of

    def next_batch(self) -> None:
        """Put the position of this iteration, and in a new epoch its order, on the device."""
        order, now = self.orders[0], self.iteration
        within = now % order.batches_per_epoch
        if now != self.positioned or within == 0:
            for row, each in zip(self._permutation, self.orders, strict=True):
                row.copy_(each.whole_epoch(order.epoch(now)))
            self.position.fill_(within)
        self.positioned = now + 1

    def batch(self, number: int | None = None) -> tuple[Tensor, Tensor]:
        """Return images, cropped and flipped, and labels: of this iteration, or of a batch of the epoch."""
        if number is not None:
            self.position.fill_(number)
        within = self.position * self.config.batch + torch.arange(self.config.batch, device=self.device)
        index = self._permutation[:, within].flatten()
        images, labels = self.crop(self.data.images[index]), self.data.labels[index]
        # cropping is cheap: that of the whole batch is the same for any number of processes
        return (images[self._share], labels[self._share]) if self.shared else (images, labels)

    def _crop(self, images: Tensor) -> Tensor:
        return augment(images, pad=self.config.pad)

    def finish_step(self) -> None:
        """Move on to the next batch."""
        self.position += 1

    # ---- its loss ----

    def step(self) -> None:
        """Follow the gradient of the batch at hand; all of it runs on the device."""
        with deterministic_algorithms() if self.config.deterministic else nullcontext():
            super().step()

    def loss(self) -> tuple[Tensor, Tensor]:
        """Return the loss of the batch, and what is added to ``sums``."""
        return self.objective(*self.batch())

    def objective(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss of images, cropped and flipped, and what is reported of it."""
        return self.find_loss(images, labels, None if self.teacher is None else self.teacher(images))

    def _loss_of(self, images: Tensor, labels: Tensor, taught: Tensor | None) -> tuple[Tensor, Tensor]:
        """The part of the objective that is compiled; ``taught`` are the teacher's logits."""
        with casting(self.device, self.config.precision):
            logits, ponders = self._called(as_input(images))
        logits = logits.float()
        nll, known = self.nll_of(logits, labels, taught)
        reinforce = self.config.method == "reinforce"
        if reinforce:
            loss = reinforce_loss(nll, ponders, self.tau, self._past_reward)
        else:
            loss = map_loss(nll, ponders, self.tau)
        with torch.no_grad():
            objective = map_loss(nll, ponders, self.tau) if reinforce else loss
            right = (logits.argmax(1) == labels).float().mean()
            sums = [objective, known.mean(), right, *(p.expected_steps.mean() for p in ponders)]
            report = torch.stack([s.detach().float() for s in sums]).double()
        return loss, report

    def nll_of(self, logits: Tensor, labels: Tensor, taught: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return what every image is charged by labels and teacher, and what is reported: that by labels."""
        smoothing, distill = self.config.label_smoothing, self.config.distill
        nll = F.cross_entropy(logits, labels, reduction="none", label_smoothing=smoothing)
        if taught is not None:
            given = divergence(logits, taught, self.config.distill_temperature)
            nll = distill * given + (1 - distill) * nll
        with torch.no_grad():
            plain = bool(smoothing) or taught is not None
            reported = F.cross_entropy(logits, labels, reduction="none") if plain else nll.detach()
        return nll, reported

    def _past_reward(self, reward: Tensor) -> Tensor:
        """The baseline of the rewards, which all processes see the mean of."""
        past: Tensor = self.baseline(distributed.mean(reward.mean()) if self.shared else reward)
        return past

    def record(self, captured: CapturedStep) -> None:
        """Compile, warm up and record a step."""
        with fastest_algorithms(), many_kinds():
            for _ in range(3):
                self.position.zero_()  # there may be fewer batches
                self.step()
            captured.record(self.step, self.optimizer.zero_grad, warm_up=0)
        self.positioned = -1

    @property
    def pace(self) -> tuple[str, int]:
        """Images, and how many of them in an iteration."""
        return "images", self.config.batch


class Trainer(TrainingRun[Learner]):
    """Trains one network on images; several can share a device, see :func:`train_together`.

    ``initial`` is the checkpoint of a plain network to start from, or the folder of one that was saved,
    ``teacher`` that of one to learn from, if the configuration says so; by default the same.
    """

    def __init__(
        self,
        config: TrainConfig,
        folder: str | os.PathLike[str],
        train: Images,
        test: Images,
        *,
        resume: bool = False,
        initial: Path | None = None,
        teacher: Path | None = None,
        report: Callable[[Event], None] = lambda event: None,
        tensorboard: bool = False,
        **learner_options: Any,
    ) -> None:
        taught_by = (teacher or initial) if config.distill else teacher
        known = None if taught_by is None else distributed.on_first(lambda: load_network(taught_by))[0]
        learner = Learner(config, train, train.images.device, teacher=known, **learner_options)

        def validate() -> dict[str, Any]:
            seed = derived_seed(config.seed, "validation")
            modes = evaluate_modes(learner.model, test, config.modes, precision=config.precision, seed=seed)
            if not config.variance_samples:
                return {"modes": modes}
            return {"modes": modes, "gradient_variance": gradient_variance(learner, config.variance_samples)}

        def start() -> None:
            if initial is None:
                return
            plain, _ = distributed.on_first(lambda: load_network(initial))
            try:
                warm_start(learner.model, plain.to(learner.device))
            except ValueError as error:
                raise ValueError(f"{zoo.called(initial)}: {error}") from None

        about = {
            "warm_start": _named(initial),
            "teacher": _named(taught_by),
            "data": describe(train, "images", train.images, train.labels),
        }
        options: dict[str, Any] = {"resume": resume, "report": report, "tensorboard": tensorboard}
        super().__init__(learner, folder, validate, start=start, about=about, **options)


def _named(checkpoint: Path | None) -> str | None:
    """The run and the file; where on this machine it lies is not recorded."""
    return None if checkpoint is None else f"{checkpoint.parent.name}/{checkpoint.name}"
