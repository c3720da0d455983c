"""Train adapted networks with the ``Trainer`` of transformers: the price in its loss, ponders in its logs.

With ``PonderMixin``::

    class AdaptiveTrainer(PonderMixin, Trainer):
        tau = 0.01

Training is relaxed and evaluation thresholded, since the Trainer calls ``train()`` and ``eval()``.
Checkpoints include the heads, and :func:`~torchpact.from_pretrained` loads them. Checkpoints of a network
that peft wraps have the adapters only; the heads are saved in a file beside them, which is read when training
resumes.

How the Trainer scales a loss (transformers 5.23): where the model takes ``num_items_in_batch``, the number of
labels other than −100 in all micro-batches of an optimizer step, a loss is expected to be the *sum* over a
micro-batch divided by that number; the Trainer multiplies it by the number of processes, over which DDP
averages, and adds up micro-batches. Otherwise a loss is a mean, which the Trainer divides by the number of
micro-batches. A price is a mean over examples: :func:`price_scale` returns the factor that it needs. Some
models take the number and return a mean, see :func:`ignores_item_count`.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

import torchpact as tp
from torchpact import Ponders
from torchpact.adapt.adapting import adaptation_of
from torchpact.adapt.saving import HEADS, set_thresholds, thresholds_of

Tau = float | Tensor


def price_scale(trainer: Trainer, num_items_in_batch: Tensor | int | None = None) -> float:
    """Return the factor for a price, which is a mean over a micro-batch, in ``Trainer.compute_loss``.

    With it, the gradient of the price is that of its mean over all micro-batches of an optimizer step, if
    these have equally many examples. In evaluation the factor is 1.

    Args:
        trainer: The Trainer whose ``compute_loss`` it is called in.
        num_items_in_batch: As ``compute_loss`` was given it.

    Returns:
        One over the number of micro-batches where the Trainer does not divide by it, and 1 otherwise.

    Raises:
        ValueError: The Trainer uses ``nn.DataParallel``, under which nothing is collected.

    Example:
        ::

            loss = tp.map_loss(loss, ponders, tau * price_scale(self, num_items_in_batch))

    """
    if trainer.args.n_gpu > 1:
        raise ValueError(
            "expected one GPU a process, got nn.DataParallel, under which ponders are not collected"
        )
    if not torch.is_grad_enabled():
        return 1.0
    scaled = trainer.loss_is_scaled_for_ga
    if scaled is None:  # as in Trainer.training_step
        counted = trainer.model_accepts_loss_kwargs and num_items_in_batch is not None
        scaled = counted or trainer.compute_loss_func is not None
    return 1 / int(trainer.current_gradient_accumulation_steps) if scaled else 1.0


def ignores_item_count(model: nn.Module, batch: Mapping[str, Any]) -> bool:
    """Return whether a network accepts ``num_items_in_batch`` but ignores it, and returns a mean.

    Classifiers of BERT, RoBERTa, DistilBERT, Llama and others do (transformers 5.23). The Trainer does not
    divide such a loss by the micro-batches of an optimizer step, and multiplies it by the number of
    processes, so that a price beside it weighs too little. For them set ``loss_is_scaled_for_ga = False`` in
    the Trainer, and leave ``num_items_in_batch`` out of the call of its ``compute_loss``, as
    :class:`PonderMixin` does.

    Args:
        model: A network of Hugging Face's, which may be wrapped. It is called twice, in evaluation.
        batch: What it is called with, labels included.

    Returns:
        Whether the loss is the same for another count.

    Raises:
        TypeError: The network does not take ``num_items_in_batch``.

    Example:
        >>> from transformers import BertConfig, BertForSequenceClassification
        >>> sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "vocab_size": 10}
        >>> net = BertForSequenceClassification(BertConfig(**sizes))
        >>> ignores_item_count(net, {"input_ids": torch.ones(2, 3).long(), "labels": torch.tensor([0, 1])})
        True

    """
    training = [(module, module.training) for module in model.modules()]
    losses = []
    model.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            for count in (1, 2):
                found = model(**batch, num_items_in_batch=torch.tensor(count, device=_device(batch)))
                losses.append(float(found["loss"] if isinstance(found, dict) else found[0]))
    finally:
        for module, before in training:
            module.training = before
    one, half = losses
    return abs(half - one) < abs(one) / 4


def _device(batch: Mapping[str, Any]) -> torch.device | None:
    return next((each.device for each in batch.values() if isinstance(each, Tensor)), None)


class _Sums:
    """Sums over examples since the last reset, in the precision and on the device of the ponders."""

    def __init__(self) -> None:
        self.totals: dict[str, Tensor] = {}
        self.examples = 0

    def add(self, ponders: Ponders) -> None:
        examples = 0
        for name, each in ponders.by_block.items():
            count = sum(ponder.steps.size(0) for ponder in each)
            for key, value in (("cost", each.cost), ("steps", each.steps)):
                self._add(f"ponder/{key}", value, count)
                self._add(f"ponder/{name}/{key}", value, count)
            examples = max(examples, count)
        self.examples += examples

    def _add(self, key: str, value: Tensor, count: int) -> None:
        total = value.detach() * count
        self.totals[key] = self.totals[key] + total if key in self.totals else total

    def means(self) -> dict[str, float]:
        """Return the means over examples, and begin anew."""
        found = {key: round(float(total) / max(self.examples, 1), 4) for key, total in self.totals.items()}
        self.totals, self.examples = {}, 0
        return found


class PonderCallback(TrainerCallback):
    """Adds ponders to the logs of a ``Trainer``: ``ponder/cost`` and ``ponder/steps``, in total and by block.

    These are means over the examples since the last log, of this process. Those of an evaluation are called
    ``eval_ponder/steps`` and so on; they are metrics, so that ``metric_for_best_model`` may name them.

    Call ``PonderCallback.of(trainer).add(ponders)`` in a ``compute_loss`` of your own;
    :class:`PonderMixin` does it.

    Example:
        ::

            def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
                with tp.collect(model) as ponders:
                    outputs = model(**inputs)
                PonderCallback.of(self).add(ponders)
                loss = tp.map_loss(outputs.loss, ponders, tau=0.01)
                return (loss, outputs) if return_outputs else loss

    """

    def __init__(self) -> None:
        self._training, self._evaluation = _Sums(), _Sums()

    @classmethod
    def of(cls, trainer: Trainer) -> "PonderCallback":
        """Return the callback of a Trainer; one that has none gets it before those that report.

        Args:
            trainer: The Trainer.

        """
        callbacks = trainer.callback_handler.callbacks
        found = next((each for each in callbacks if isinstance(each, cls)), None)
        if found is None:
            found = cls()
            callbacks.insert(0, found)
        return found

    def add(self, ponders: Ponders) -> None:
        """Count what was collected in a pass of training, or without gradients, in one of evaluation.

        Args:
            ponders: What :class:`~torchpact.collect` gave.

        """
        (self._training if torch.is_grad_enabled() else self._evaluation).add(ponders)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **_: Any,
    ) -> None:
        """Add the means to a log, and to the history."""
        if logs is None:
            return
        prefix = next((key.removesuffix("loss") for key in logs if key.endswith("_loss")), "")
        if "loss" in logs:
            added = self._training.means()
        else:
            added = {f"{prefix}{key}": mean for key, mean in self._evaluation.means().items()}
        logs.update(added)
        if state.log_history:
            state.log_history[-1].update(added)

    def on_save(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        **_: Any,
    ) -> None:
        """Write the heads of a network that peft wraps into its checkpoint."""
        if model is not None and state.is_world_process_zero and _saves_adapters_only(model):
            adaptation = adaptation_of(model)
            heads = {name: value.detach().contiguous() for name, value in adaptation.state_dict().items()}
            thresholds = {"thresholds": json.dumps(thresholds_of(adaptation.runs))}
            save_file(heads, Path(args.output_dir) / f"checkpoint-{state.global_step}" / HEADS, thresholds)

    def on_train_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        **_: Any,
    ) -> None:
        """Load the heads of the best checkpoint, where the Trainer has loaded the adapters of peft."""
        best = state.best_model_checkpoint
        if model is not None and args.load_best_model_at_end and best and _saves_adapters_only(model):
            _load_heads(model, best)


def _saves_adapters_only(model: nn.Module) -> bool:
    """Whether a network is wrapped by peft, whose checkpoints leave the heads out."""
    return hasattr(model, "get_base_model")


def _load_heads(model: nn.Module, folder: str) -> None:
    file = Path(folder) / HEADS
    if not file.is_file():
        raise ValueError(f"expected the heads of this network in {file}, beside the adapters of peft")
    adaptation = adaptation_of(model)
    adaptation.load_state_dict(load_file(file))
    with safe_open(file, "pt") as opened:
        thresholds = json.loads((opened.metadata() or {}).get("thresholds", "{}"))
    set_thresholds(adaptation.runs, thresholds)


class PonderMixin:
    """A base class before ``Trainer`` that makes it minimise −log p + τ·N and log ponders.

    In evaluation, ``eval_loss`` is the loss of the thresholded network plus τ times the steps that it ran.

    Example:
        >>> from transformers import Trainer
        >>> class AdaptiveTrainer(PonderMixin, Trainer):
        ...     tau = 0.01
        >>> AdaptiveTrainer.compute_loss is PonderMixin.compute_loss
        True

    """

    tau: Tau = 0.0
    """The price of a step, as :func:`~torchpact.map_loss` takes it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        PonderCallback.of(self)
        self._scaling_checked = False

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train, as ``Trainer.train`` does; resumed with the heads of the checkpoint.

        Args:
            resume_from_checkpoint: A folder, or true for the last checkpoint.
            args: For ``Trainer.train``.
            kwargs: For ``Trainer.train``.

        Returns:
            What ``Trainer.train`` returns.

        Raises:
            ValueError: The checkpoint of a network that peft wraps has no heads beside the adapters.

        """
        trainer: Any = self
        if resume_from_checkpoint and _saves_adapters_only(trainer.model):
            last = resume_from_checkpoint
            folder = get_last_checkpoint(trainer.args.output_dir) if last is True else str(last)
            if folder is not None:  # otherwise the Trainer says so
                _load_heads(trainer.model, folder)
        return super().train(resume_from_checkpoint, *args, **kwargs)  # type: ignore[misc]

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Return the objective, as ``Trainer.compute_loss`` does its loss.

        Args:
            model: The network.
            inputs: What it is called with.
            return_outputs: Whether its outputs are returned, too.
            num_items_in_batch: The number of labels of the optimizer step, as the Trainer counts them.

        Returns:
            The loss plus the price, or a pair of this and the outputs.

        Raises:
            ValueError: The network is not adapted, or nothing was collected.

        """
        trainer: Any = self
        if not self._scaling_checked and num_items_in_batch is not None:
            self._check_scaling(trainer, model, inputs)
        if trainer.loss_is_scaled_for_ga is False:
            num_items_in_batch = None  # a mean
        scale = price_scale(trainer, num_items_in_batch)
        with tp.collect(model) as ponders:
            loss, outputs = super().compute_loss(  # type: ignore[misc]
                model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch
            )
        PonderCallback.of(trainer).add(ponders)
        loss = tp.map_loss(loss, ponders, self.tau * scale)
        return (loss, outputs) if return_outputs else loss

    def _check_scaling(self, trainer: Any, model: nn.Module, inputs: dict[str, Any]) -> None:
        """Check once whether the network ignores the count, and set ``loss_is_scaled_for_ga`` if so."""
        self._scaling_checked = True
        several = trainer.args.gradient_accumulation_steps * trainer.args.world_size > 1
        known = trainer.loss_is_scaled_for_ga is not None
        other = trainer.compute_loss_func is not None or trainer.label_smoother is not None
        if several and trainer.model_accepts_loss_kwargs and not known and not other:
            with trainer.compute_loss_context_manager():
                if ignores_item_count(model, inputs):
                    trainer.loss_is_scaled_for_ga = False
