"""Iterations on images, of one network or of several: crop, find the loss, follow its gradient."""

from abc import abstractmethod
from contextlib import nullcontext

import torch
from torch import Tensor
from torch.nn import functional as F

from torchpact.models import ResNet
from torchpact_recipes.data import BatchOrder, Images, augment
from torchpact_recipes.training.algorithms import deterministic_algorithms, fastest_algorithms
from torchpact_recipes.training.compiling import compiled, many_kinds
from torchpact_recipes.training.config import TrainConfig
from torchpact_recipes.training.cuda_graph import CapturedStep
from torchpact_recipes.training.distillation import Teacher, divergence
from torchpact_recipes.training.iterations import Iterations


class ImageIterations(Iterations):
    """What is left to those that build on it is the order of images, and what their loss is."""

    config: TrainConfig
    model: ResNet
    teacher: Teacher | None
    shared = False
    """Whether processes share the work."""
    data: Images
    order: BatchOrder
    """That of the first network; those of others have as many batches."""
    _permutation: Tensor
    """The order of the epoch, for each network if there are several; on the device."""
    _position: Tensor
    """How far the epoch has come, in batches; on the device."""
    _epoch: int
    """The one whose order the device knows; −1 where it has to be told."""

    def compile_or_capture(self, compile: bool, capture: bool) -> None:
        """Say how iterations are run; they are compiled and captured by the first."""
        self._augment, self._find_loss = self._crop, self._forward
        if compile:
            self._augment, self._find_loss = compiled(self._crop), compiled(self._forward)
        self.captured = CapturedStep(self.device) if capture else None

    def _crop(self, images: Tensor) -> Tensor:
        return augment(images, pad=self.config.pad)

    def objective(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The loss of a batch of images, cropped and flipped, and the sums to report."""
        taught = None if self.teacher is None else self.teacher(images)
        return self._find_loss(images, labels, taught)

    def nll_of(self, logits: Tensor, labels: Tensor, taught: Tensor | None) -> tuple[Tensor, Tensor]:
        """What is to be less for every image by labels and teacher, and what to report: that by labels."""
        smoothing, distill = self.config.label_smoothing, self.config.distill
        nll = F.cross_entropy(logits, labels, reduction="none", label_smoothing=smoothing)
        if taught is not None:
            given = divergence(logits, taught, self.config.distill_temperature)
            nll = distill * given + (1 - distill) * nll
        with torch.no_grad():
            plain = bool(smoothing) or taught is not None
            reported = F.cross_entropy(logits, labels, reduction="none") if plain else nll.detach()
        return nll, reported

    @abstractmethod
    def _forward(self, images: Tensor, labels: Tensor, taught: Tensor | None) -> tuple[Tensor, Tensor]:
        """Of :meth:`objective`, what is compiled; ``taught`` is what the teacher makes of the images."""

    @abstractmethod
    def _set_order(self, epoch: int) -> None:
        """Tell the device the order of an epoch."""

    def turn_to_batch(self) -> None:
        """Put where the next batch is, and in a new epoch its order, on the device."""
        epoch = self.order.epoch(self.iteration)
        within = self.iteration % self.order.batches_per_epoch
        if epoch != self._epoch or within == 0:
            self._set_order(epoch)
            self._position.fill_(within)
            self._epoch = epoch

    def _batch(self) -> tuple[Tensor, Tensor]:
        """The images whose turn it is, cropped and flipped, and their labels; of all networks."""
        within = self._position * self.config.batch + torch.arange(self.config.batch, device=self.device)
        index = self._permutation[..., within].flatten()
        return self._augment(self.data.images[index]), self.data.labels[index]

    def _iterate(self) -> None:
        with deterministic_algorithms() if self.config.deterministic else nullcontext():
            loss, report = self.objective(*self._batch())
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            self.optimizer.step()
        self._sums += report
        self._position += 1

    def _record(self, captured: CapturedStep) -> None:
        """Compile, warm up and record the iteration."""
        with fastest_algorithms(), many_kinds():
            for _ in range(3):
                self._position.zero_()  # there may be fewer batches
                self._iterate()
            captured.record(self._iterate, self.optimizer.zero_grad, warm_up=0)
        self._epoch = -1
