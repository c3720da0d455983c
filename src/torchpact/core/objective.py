"""What is minimised: the negative of the paper's objectives, as a mean over examples."""

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchpact.checks import check_number, readable
from torchpact.core.collect import Ponders
from torchpact.core.halting import log_stick_breaking
from torchpact.core.ponder import Ponder, mean_over_batch
from torchpact.core.priors import TruncatedGeometric

Tau = float | Sequence[float] | Tensor


def map_loss(nll: Tensor, ponders: Ponder | Sequence[Ponder], tau: Tau) -> Tensor:
    """Return the negative MAP objective, E[−log p(y | z, x) + Σ τ_k N_k] (eq. 25 and 27).

    ``nll`` holds −log p(y | z, x) of every example, or is their mean. The cost of a block is averaged over
    its positions, as they weigh: the paper's τ/(HW). It is charged at its ``tau``: one number, or one for
    each block. It is the log-prior in closed form, up to a constant. With ACT blocks the cost is the ponder
    cost ρ.

    Every ponder pays. If a network is called twice for a loss, as for the two texts of a pair, the loss pays
    for both calls, where ``ponders.cost`` is their mean: multiply ``tau`` by a half for the price of one.

    In the hard modes this is a number to report, not to train by: decisions pass no gradient on, so the
    heads would only learn of the price. Train relaxed, or with :func:`reinforce_loss`. There is a warning if
    gradients flow, at a price, from a network that is thresholded because it is in ``eval()``.

    Args:
        nll: The negative log-likelihood of each example, of shape (batch,), or their mean.
        ponders: What a block did, or what each of several blocks did.
        tau: The price of a step: one number, or one for each block.

    Returns:
        A scalar.

    Raises:
        TypeError: ``ponders`` holds something else.
        ValueError: Shapes do not fit, or a price is negative or not finite.

    Example:
        >>> step = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        >>> block = tp.AdaptiveBlock(step, nn.Linear(8, 1), max_steps=5)
        >>> output, ponder = block(torch.randn(4, 8))
        >>> nll = nn.functional.cross_entropy(output, torch.tensor([0, 3, 1, 7]), reduction="none")
        >>> map_loss(nll, ponder, tau=0.01).backward()

    """
    free = isinstance(tau, int | float) and tau == 0
    if isinstance(ponders, Ponders) and ponders.thresholded_by_eval and torch.is_grad_enabled() and not free:
        warnings.warn(
            "expected a network in train(), got a thresholded one, as eval() makes it, whose heads learn of "
            "the price only: call net.train(), or torch.no_grad() to evaluate",
            stacklevel=2,
        )
    nll, blocks = _check(nll, ponders, scalar=True)
    return mean_over_batch(nll) + _prior_cost(blocks, tau)


def reinforce_loss(
    nll: Tensor,
    ponders: Ponder | Sequence[Ponder],
    tau: Tau,
    baseline: Callable[[Tensor], Tensor] | float | None = None,
) -> Tensor:
    """Return a loss whose gradient is REINFORCE's estimate for the discrete model (eq. 26).

    Three terms: the likelihood, differentiable along the path taken; (log p − c)·∇ log q(z), the
    score function with ``baseline`` c, where q is that of all positions and blocks of an example; and
    the expected steps N_k, whose dependence on the decisions of earlier blocks (and, where steps take the
    gate, of earlier iterations) is neglected. The value itself is of no interest; report :func:`map_loss`.

    Args:
        nll: The negative log-likelihood of each example, of shape (batch,).
        ponders: What one or several blocks did, in discrete mode.
        tau: The price of a step: one number, or one for each block.
        baseline: c: a number, or a function of the rewards −nll such as :class:`EMABaseline`; None is 0.

    Returns:
        A scalar.

    Raises:
        TypeError: The baseline, or one of the ponders, is something else.
        ValueError: Shapes do not fit, a ponder is of another mode, or a price is negative or not finite.

    Example:
        >>> step = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        >>> block = tp.AdaptiveBlock(step, nn.Linear(8, 1), max_steps=5, mode="discrete")
        >>> output, ponder = block(torch.randn(4, 8))
        >>> nll = nn.functional.cross_entropy(output, torch.tensor([0, 3, 1, 7]), reduction="none")
        >>> reinforce_loss(nll, ponder, tau=0.01, baseline=tp.EMABaseline()).backward()

    """
    nll, blocks = _check(nll, ponders)
    if not (baseline is None or callable(baseline) or isinstance(baseline, int | float)):
        raise TypeError(f"expected a baseline like EMABaseline(), a number or None; got {baseline!r}")
    reward = -nll.detach()
    c = torch.as_tensor(baseline(reward) if callable(baseline) else (baseline or 0.0)).detach()
    if c.shape not in ((), reward.shape):
        raise ValueError(f"expected a baseline of shape () or {tuple(reward.shape)}, got {tuple(c.shape)}")
    return mean_over_batch(nll - (reward - c) * _log_q(blocks, reward)) + _prior_cost(blocks, tau)


def rloo_loss(
    nll: Tensor | Sequence[Tensor], ponders: Ponder | Sequence[Ponder] | Sequence[Sequence[Ponder]], tau: Tau
) -> Tensor:
    """Return REINFORCE's loss of K sampled runs of a batch, with leave-one-out baselines (RLOO).

    The baseline of a run is, for each example, the mean reward log p of the other runs. It depends on the
    example, which that of :class:`EMABaseline` does not, has no state, and is independent of the run's own
    decisions, so that the gradient stays unbiased. All else is as in :func:`reinforce_loss`.

    Runs are handed in as a list, or stacked: K copies of the batch, one after the other, in one pass.

    Cost: K forward and backward passes; at least 2.

    Args:
        nll: The negative log-likelihoods, K tensors of shape (batch,), or one of shape (K, batch).
        ponders: What one or several blocks did in discrete mode: K of those that :func:`reinforce_loss` takes
            or, with a stacked ``nll``, those of the one pass over K·batch examples.
        tau: The price of a step: one number, or one for each block.

    Returns:
        A scalar.

    Raises:
        TypeError: One of the ponders is something else.
        ValueError: There are fewer than two runs, shapes do not fit, a ponder is of another mode, or a price
            is negative or not finite.

    Example:
        >>> block = tp.AdaptiveBlock(nn.Linear(8, 8), nn.Linear(8, 1), max_steps=5, mode="discrete")
        >>> inputs, labels = torch.randn(4, 8), torch.tensor([0, 3, 1, 7])
        >>> output, ponder = block(inputs.repeat(3, 1))  # three runs in one pass
        >>> nll = nn.functional.cross_entropy(output, labels.repeat(3), reduction="none")
        >>> rloo_loss(nll.view(3, 4), ponder, tau=0.01).backward()

    """
    if isinstance(nll, Tensor):
        if nll.dim() != 2:
            raise ValueError(f"expected a stacked nll of shape (runs, batch), got {tuple(nll.shape)}")
        stacked = nll
        flat, blocks = _check(nll.flatten(), ponders)
        log_q, cost = _log_q(blocks, flat).view(nll.shape), _prior_cost(blocks, tau)
    else:
        if isinstance(ponders, Ponder) or len(nll) != len(ponders):
            given = "one Ponder" if isinstance(ponders, Ponder) else f"those of {len(ponders)}"
            raise ValueError(f"expected the ponders of {len(nll)} runs, as many as in nll; got {given}")
        runs = [_check(*run) for run in zip(nll, ponders, strict=True)]
        if len({each.shape for each, _ in runs}) > 1:
            raise ValueError(
                f"expected runs of one batch, got {', '.join(str(len(n)) for n, _ in runs)} examples"
            )
        if len(runs) > 1:
            stacked = torch.stack([each for each, _ in runs])
            log_q = torch.stack([_log_q(blocks, each) for each, blocks in runs])
            cost = sum((_prior_cost(blocks, tau) for _, blocks in runs), start=0.0) / len(runs)
    if len(nll) < 2:
        raise ValueError(f"expected at least 2 runs, each the baseline of the others; got {len(nll)}")
    reward = -stacked.detach()
    others = (reward.sum(0) - reward) / (len(reward) - 1)
    return mean_over_batch(stacked - (reward - others) * log_q) + cost


def ponder_loss(losses: Tensor, logits: Tensor, tau: float, beta: float = 0.01) -> Tensor:
    """Return E_q[loss] + β·KL(q ‖ p) of halting after each iteration, as a mean over examples.

    ``losses`` hold the loss of every example had it halted after iteration 1 … L, and ``logits`` those of
    the halting probabilities, both of shape (L, batch); the last logit is not read. The prior p is the
    truncated geometric of ``tau``: PonderNet's λ is 1 − exp(−τ). Nothing is sampled, so it is for a single
    decision an example: two of them have L² outcomes.

    Args:
        losses: Of each example after each iteration, (L, batch).
        logits: Of the halting probabilities, (L, batch).
        tau: The price of a step in the prior.
        beta: The weight of the divergence from the prior.

    Returns:
        A scalar.

    Raises:
        ValueError: Shapes differ, or a number is negative or not finite.

    Example:
        >>> losses, logits = torch.tensor([[1.0], [0.0]]), torch.zeros(2, 1)
        >>> ponder_loss(losses, logits, tau=0, beta=1)  # both equally likely, as in the prior
        tensor(0.5000)

    """
    check_number("tau", tau, 0, open_high=True)
    check_number("beta", beta, 0, open_high=True)
    if losses.dim() != 2 or losses.shape != logits.shape:
        raise ValueError(
            "expected losses and logits of shape (iterations, batch), "
            f"got {tuple(losses.shape)} and {tuple(logits.shape)}"
        )
    log_q = log_stick_breaking(logits)
    # where q is 0 its logarithm may be −∞, and their product is to be 0
    log_q = log_q.clamp(min=torch.finfo(log_q.dtype).min)
    q = log_q.exp()
    # made on the device, and not looked at: an iteration that is captured cannot
    prior = TruncatedGeometric(q.new_full((), float(tau)), len(q), validate_args=False)
    log_p = prior.log_prob(prior.enumerate_support()).unsqueeze(1)
    return mean_over_batch((q * losses).sum(0)) + beta * mean_over_batch((q * (log_q - log_p)).sum(0))


def _check(nll: Tensor, ponders: Any, scalar: bool = False) -> tuple[Tensor, list[Ponder]]:
    """Check a loss of each example, or where it will do, a ``scalar``, and the ponders beside it."""
    if not isinstance(nll, Tensor) or nll.dim() not in ((0, 1) if scalar else (1,)):
        given = f"shape {tuple(nll.shape)}" if isinstance(nll, Tensor) else type(nll).__name__
        if isinstance(nll, Tensor) and nll.dim() > 1:
            given += ": average over positions first"
        raise ValueError(f"expected one nll per example, as from reduction='none'; got {given}")
    if isinstance(ponders, Ponders) and not ponders:
        raise ValueError(
            "expected the ponders of at least one call, got none: call the network within "
            "`with tp.collect(net) as ponders:`"
        )
    if not isinstance(ponders, Iterable):
        raise TypeError(f"expected a Ponder for each block, got {type(ponders).__name__}")
    blocks = [ponders] if isinstance(ponders, Ponder) else list(ponders)
    for ponder in blocks:
        if not isinstance(ponder, Ponder):
            raise TypeError(f"expected a Ponder for each block, got {type(ponder).__name__}")
        if nll.dim() and ponder.steps.shape[:1] != nll.shape:
            raise ValueError(
                f"expected positions of {len(nll)} examples, as in nll; got shape {tuple(ponder.steps.shape)}"
            )
    return nll, blocks


def _log_q(blocks: list[Ponder], nll: Tensor) -> Tensor:
    """Return log q of all decisions taken for each example, those of padding left out."""
    log_q = torch.zeros_like(nll)
    for index, ponder in enumerate(blocks):
        if ponder.log_prob is None:
            raise ValueError(f"expected ponders of blocks in Discrete mode, got no log_prob in block {index}")
        log_prob = ponder.log_prob
        if ponder.weights is not None:  # what is padding decides nothing
            log_prob = torch.where(ponder.weights > 0, log_prob, torch.zeros_like(log_prob))
        log_q = log_q + log_prob.unsqueeze(-1).flatten(1).sum(1)
    return log_q


def _prior_cost(blocks: list[Ponder], tau: Tau) -> Tensor | float:
    """Return Σ τ_k·cost_k, the cost averaged over examples and positions."""
    return sum(
        (
            t * mean_over_batch(ponder.cost, ponder.weights)
            for t, ponder in zip(prices(tau, len(blocks)), blocks, strict=True)
        ),
        start=0.0,
    )


def prices(tau: Tau, count: int) -> list[float | Tensor]:
    """Return the price of a step of each of ``count`` blocks, once they are seen to be prices.

    >>> prices(0.1, 2)
    [0.1, 0.1]
    """
    if isinstance(tau, Tensor):
        # a look at a tensor on the GPU would make every training step wait for it
        if tau.dim() > 1:
            raise ValueError(f"expected one tau, or one per block; got shape {tuple(tau.shape)}")
        if not tau.is_cuda and readable(tau) and not ((tau >= 0) & tau.isfinite()).all():
            raise ValueError(f"expected tau in [0, inf), got {tau.tolist()}")
        taus: list[float | Tensor] = list(tau.unbind()) if tau.dim() else [tau] * count
    elif isinstance(tau, Sequence) and not isinstance(tau, str):
        taus = [check_number("tau", t, 0, open_high=True) for t in tau]
    else:
        taus = [check_number("tau", tau, 0, open_high=True)] * count
    if len(taus) != count:
        raise ValueError(f"expected one tau, or {count} of them for {count} blocks; got {len(taus)}")
    return taus
