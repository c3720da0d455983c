"""distill: a copy of a network learns to leave early, within a budget; its teacher is the network itself."""

import copy
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from torch import nn

from torchpact.adapt import adapt
from torchpact.adapt.heads import Heads
from torchpact.adapt.network import inner_network
from torchpact.budget.budget import Budget
from torchpact.budget.calibration import calibrate
from torchpact.budget.discrepancy import DistillLoss
from torchpact.budget.distillation import Distillation
from torchpact.budget.progress import Report, reporter
from torchpact.budget.stages import DistillConfig
from torchpact.budget.train_exits import train_exits
from torchpact.budget.train_heads import train_heads
from torchpact.core.halting_module import halting_modules
from torchpact.core.layer_run import Per
from torchpact.core.overrides import use_thresholds


def distill(
    net: Any,
    batches: Iterable[Any],
    budget: Budget | float,
    *,
    loss: DistillLoss | None = None,
    held_out: Iterable[Any] | None = None,
    inputs: Callable[[Any], Any] | None = None,
    logits: bool | None = None,
    per: Per | None = None,
    heads: Heads | None = None,
    frozen: bool = False,
    teacher: nn.Module | None = None,
    config: DistillConfig | None = None,
    checkpoint: str | Path | None = None,
    progress: Report | bool | None = None,
) -> Any:
    """Return an adaptive copy of a network that was trained to leave early, and meets a budget.

    Three stages, each with the network as it was as the teacher:

    1. *Exits*: all weights are trained so that the output at every exit is that of the teacher. The weights
       that were best on held-out batches are kept.
    2. *Heads*: weights stay, halting heads are trained to tell where halting is better than going on, at a
       price of a step that moves until the budget is met.
    3. *Calibration*: thresholds are chosen on held-out batches, so that the deployed network meets the
       budget; they are stored in the network.

    It works for all networks that :func:`torchpact.adapt` takes, and for networks that are adaptive already.

    Args:
        net: The network; it is not changed.
        batches: What it is called with, each a mapping by name, a tuple by position, or the only argument;
            all are kept in memory.
        budget: A :class:`~torchpact.Budget`, or a share of the FLOPs.
        loss: A function of output, teacher's output and batch that returns a loss for each example, (batch,),
            or for each of its positions, (batch, length), NaN where there is none. By default, for ``logits``
            KL(teacher ‖ output), and for states and embeddings the relative squared distance. Labels come in
            through a loss of one's own.
        held_out: Batches for the early stop and for calibration; by default the last fifth of ``batches``.
        inputs: Takes what the network is called with out of a batch, as where a batch has labels besides.
        logits: Whether the output is class logits; by default if it has a part of that name.
        per: What halts, as for :func:`torchpact.adapt`; by default whole examples where that is possible.
        heads: Other heads or criteria, as for :func:`torchpact.adapt`.
        frozen: Whether heads alone are trained, and the network's weights stay.
        teacher: Another network to learn from.
        config: How long and how fast to train.
        checkpoint: A folder. The state of training is kept there, and training that was interrupted goes on
            from it, to the same weights bit by bit.
        progress: Is told of progress, see :class:`~torchpact.budget.Progress`; True writes lines to standard
            error, False is quiet, and None writes lines if standard error is a terminal.

    Returns:
        The copy, adaptive, in ``eval()``, with thresholds set.

    Raises:
        TypeError: A single batch is given instead of several.
        ValueError: There are too few batches or one is empty, the budget cannot be met, losses are not finite
            numbers of examples or positions, or the checkpoint is of another training.

    Example:
        >>> layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        >>> net = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False).eval()
        >>> batches = [torch.randn(8, 5, 16) for _ in range(5)]
        >>> short = tp.budget.DistillConfig(exit_updates=4, head_updates=4)
        >>> ada = tp.distill(net, batches, budget=0.7, config=short)
        >>> bool(tp.count_flops(ada, batches[-1]).share <= 0.7)
        True

    """
    ada = adaptive_copy(net, per, heads, frozen)
    root = inner_network(ada)
    work = Distillation(
        root,
        inner_network(net) if teacher is None else teacher,
        batches,
        held_out,
        budget,
        loss,
        inputs,
        logits,
        frozen,
        config or DistillConfig(),
        None if checkpoint is None else Path(checkpoint),
        reporter(progress),
    )
    train_exits(work)
    train_heads(work)
    thresholds = calibrate(
        root, work.held, work.budget, work.score, inputs=lambda item: item.inputs, progress=work.report
    )
    use_thresholds(root, thresholds)
    root.eval()
    return ada


def adaptive_copy(net: Any, per: Per | None, heads: Heads | None, frozen: bool) -> Any:
    """Return a copy of a network that is adaptive: per example, if nothing else is said and that is possible.

    Args:
        net: Any network that :func:`torchpact.adapt` takes, or an adaptive one.
        per: What halts.
        heads: The heads.
        frozen: Whether weights other than those of heads are frozen.

    Raises:
        ValueError: It is adaptive, and ``per`` or ``heads`` are given, too; or it cannot be made adaptive.

    """
    ada = copy.deepcopy(net)
    if halting_modules(inner_network(ada)):
        if per is not None or heads is not None:
            raise ValueError(
                "expected a plain network with per= or heads=, got one that is adaptive already: "
                "tp.use_heads changes its heads"
            )
        return ada
    if per is not None:
        return adapt(ada, per=per, heads=heads, frozen=frozen)
    try:
        return adapt(ada, per="example", heads=heads, frozen=frozen)
    except ValueError:  # as of decoders
        return adapt(ada, heads=heads, frozen=frozen)
