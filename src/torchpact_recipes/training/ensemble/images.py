"""Several networks of one kind, trained by the same kernels.

The kernels of a small network are too small for a GPU, and there are hundreds of them in an iteration. Here
each is for all networks at once: the batch is theirs one after the other, and whatever has weights takes
those of the network that an image belongs to. All else, such as adaptive blocks, sees a larger batch.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from torchpact.models import ResNet, build
from torchpact_recipes.data import as_input
from torchpact_recipes.training.distillation import Teacher
from torchpact_recipes.training.ensemble.base import Ensemble, compatible, groups, means
from torchpact_recipes.training.ensemble.layers import ENSEMBLE_LAYERS, EnsembleNorm
from torchpact_recipes.training.evaluate import casting
from torchpact_recipes.training.images import Learner
from torchpact_recipes.training.module_replacement import replace_modules, with_class
from torchpact_recipes.training.state import make_optimizer


def form_ensembles(learners: Sequence[Learner]) -> list["ImageEnsemble"]:
    """Have all that can be trained by the same kernels be so, from now on.

    As each has all of them advance, their trainers are to be run by ``train_together``.
    """
    found = [group for group in groups(learners, can_form_ensemble) if len(group) > 1]
    for group in found:
        for one in group:
            one.teacher = group[0].teacher  # which knows the same: no need to keep or compare another
    return [ImageEnsemble(group) for group in found]


def can_form_ensemble(learners: Sequence[Learner]) -> bool:
    """Whether these can be trained by the same kernels: of one kind, with the same images, at one iteration.

    Their seeds and prices may differ. Not for iterations that have been captured, decisions per image, heads
    with batch norm, REINFORCE, Adam, different teachers, measurements of the variance, process groups or
    deterministic runs.
    """
    first = learners[0]
    config = first.config
    return (
        config.method in ("plain", "relaxed", "act")
        and config.optimizer == "sgd"
        and not (config.deterministic or config.network.halting_norm or config.variance_samples)
        and config.network.per == "pixel"
        and compatible(learners)
        and all(
            replace(one.config, tau=config.tau, seed=config.seed) == config
            and one.compile == first.compile
            and one.data is first.data
            and _same(one.teacher, first.teacher)
            and not one.shared
            and (one.captured is None or not one.captured.recorded)
            for one in learners
        )
    )


class ImageEnsemble(Ensemble[Learner], Learner):
    """Learners that advance together; from now on their weights are parts of larger tensors.

    What each draws depends on all of them, unlike where they have streams of their own.
    """

    def __init__(self, learners: Sequence[Learner]) -> None:
        if not can_form_ensemble(learners):
            raise ValueError(
                "expected learners of one kind, with the same images, at one iteration and not joined before"
            )
        super().__init__(learners)
        first = learners[0]
        self.model, self.teacher = self._stacked_model(), first.teacher
        rate = torch.tensor(self.config.lr, device=self.device) if self.capture else self.config.lr
        self.optimizer = make_optimizer(self.model, self.config, rate)
        if self.config.momentum:
            self._stack_momenta()
        self.data, self.shared, self.compile = first.data, False, first.compile
        self.make_batches([one.order for one in learners])
        self.compile_or_capture()
        self.attach()

    def _stacked_model(self) -> ResNet:
        """A network whose weights and statistics are those of all, which become views of it."""
        model = build(self.config.network, self.config.training_mode())
        for name, module in model.named_modules():
            others = [one.model.get_submodule(name) for one in self.learners]
            for key, _ in list(module.named_parameters(recurse=False)):
                own = [other.get_parameter(key) for other in others]
                stacked = _stack([parameter.detach() for parameter in own])
                module._parameters[key] = nn.Parameter(stacked)
                for parameter, part in zip(own, stacked, strict=True):
                    parameter.data = part
            for key in module._buffers:
                stacked = _stack([other.get_buffer(key) for other in others])
                module._buffers[key] = stacked
                for other, part in zip(others, stacked, strict=True):
                    other._buffers[key] = part
        return replace_modules(model, self._ensemble_layer).train()

    def _ensemble_layer(self, module: nn.Module) -> nn.Module:
        """Return what a layer with the weights of all becomes."""
        if type(module) not in ENSEMBLE_LAYERS:
            return module
        kind, kernels = ENSEMBLE_LAYERS[type(module)]
        joint = with_class(module, kind)
        if kernels is not None and self.learners[0].use_kernels:
            vars(joint)["kernels"] = kernels()
        if isinstance(joint, EnsembleNorm):
            ticket = torch.zeros(len(self.learners), dtype=torch.int32, device=self.device)
            joint.register_buffer("ticket", ticket, persistent=False)
        layer: nn.Module = joint
        return layer

    def _stack_momenta(self) -> None:
        """Make what the optimizer would in its first step; learners have views of it."""
        parameters = [dict(one.model.named_parameters()) for one in self.learners]
        for name, stacked in self.model.named_parameters():
            momenta = torch.zeros_like(stacked)
            self.optimizer.state[stacked]["momentum_buffer"] = momenta
            for one, known, part in zip(self.learners, parameters, momenta, strict=True):
                state = one.optimizer.state[known[name]]
                if "momentum_buffer" in state:
                    part.copy_(state["momentum_buffer"])
                state["momentum_buffer"] = part

    def _loss_of(self, images: Tensor, labels: Tensor, taught: Tensor | None) -> tuple[Tensor, Tensor]:
        """The sum of the losses of all networks, and what to report of each."""
        count = len(self.learners)
        with casting(self.device, self.config.precision):
            logits, ponders = self.model(as_input(images))
        logits = logits.float()
        nll, known = self.nll_of(logits, labels, taught)
        losses = means(nll, count)
        for ponder in ponders:
            losses = losses + self.taus * means(ponder.cost, count)
        with torch.no_grad():
            right = (logits.argmax(1) == labels).float()
            found = [known, right, *(ponder.expected_steps for ponder in ponders)]
            report = torch.stack([losses, *(means(each.float(), count) for each in found)], 1).double()
        return losses.sum(), report

    def state(self) -> dict[str, Tensor]:
        """What makes up the state of each, by its number and their names; not copies."""
        return {f"{i}.{name}": x for i, one in enumerate(self.learners) for name, x in one.state().items()}


def _same(one: Teacher | None, other: Teacher | None) -> bool:
    """Whether two teachers know the same."""
    if one is None or other is None or one is other:
        return one is other
    state, expected = one.model.state_dict(), other.model.state_dict()
    return state.keys() == expected.keys() and all(
        value.shape == expected[name].shape and torch.equal(value, expected[name])
        for name, value in state.items()
    )


def _stack(tensors: Sequence[Tensor]) -> Tensor:
    """Stack tensors so that each part lies in memory as it did."""
    first = tensors[0]
    storage = torch.empty(len(tensors), first.numel(), dtype=first.dtype, device=first.device)
    stacked = storage.as_strided((len(tensors), *first.shape), (first.numel(), *first.stride()))
    for part, tensor in zip(stacked, tensors, strict=True):
        part.copy_(tensor)
    return stacked
