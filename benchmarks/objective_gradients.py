"""Bias and variance of the gradients of halting logits, by objective, against the exact gradient.

    python benchmarks/objective_gradients.py

Eight examples have random states after each of six steps, a smooth loss of the state that differs in level
from example to example, and random halting logits. The gradient of E_q[loss_z + τ·z] is that of exact_loss,
which the tests compare with enumeration. Bias is the distance of the mean gradient from it, with its standard
error; variance is that of one call. Both are relative to the exact gradient; variance_a_pass is variance ×
forward passes.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from table import write_csv
from torch import Tensor

import torchpact as tp

STEPS, EXAMPLES, COPIES, BATCHES, TAU = 6, 8, 250, 200, 0.1

STATES = torch.randn(STEPS, EXAMPLES, 2, dtype=torch.double, generator=torch.Generator().manual_seed(0))
LEVELS = torch.linspace(0, 4, EXAMPLES, dtype=torch.double)
LOGITS = torch.randn(STEPS, EXAMPLES, dtype=torch.double, generator=torch.Generator().manual_seed(1)) - 1


def nll(u: Tensor) -> Tensor:
    """Return the loss of states (…, examples, 2)."""
    return 0.5 * (u[..., 0] - 0.5) ** 2 + 0.5 * torch.sin(3 * u[..., 1]) + LEVELS


def run(mode: tp.Mode, logits: Tensor) -> tuple[Tensor, tp.Ponder]:
    """Return the nll of copies of the examples, and their ponder; logits are (STEPS, copies, EXAMPLES)."""
    loop, output = tp.HaltingLoop.start(mode, STEPS), torch.zeros(())
    for each, u in zip(logits, STATES, strict=True):
        loop, weight = tp.decide(loop, each.flatten())
        weight = loop.remaining if weight is None else weight
        assert weight is not None
        output = output + weight.view_as(each).unsqueeze(-1) * u
    return nll(output).flatten(), loop.ponder()


def rloo(runs: int) -> Callable[[Tensor], Tensor]:
    def loss(logits: Tensor) -> Tensor:
        each, ponder = run(tp.Discrete(), logits.repeat(1, runs, 1))
        return tp.rloo_loss(each.view(runs, -1), ponder, TAU)

    return loss


def main() -> None:
    baseline = tp.EMABaseline().double()
    leaf = LOGITS.clone().requires_grad_()
    (exact,) = torch.autograd.grad(EXAMPLES * tp.exact_loss(nll(STATES), leaf, TAU), leaf)
    size = exact.norm().item()
    objectives: list[tuple[str, int, Callable[[Tensor], Tensor]]] = [
        *(
            (f"map_loss, relaxed, λ = {t:.2g}", 1, lambda x, t=t: tp.map_loss(*run(tp.Relaxed(t), x), TAU))
            for t in (0.2, 2 / 3, 2.0)
        ),
        ("reinforce_loss", 1, lambda x: tp.reinforce_loss(*run(tp.Discrete(), x), TAU)),
        (
            "reinforce_loss, EMABaseline",
            1,
            lambda x: tp.reinforce_loss(*run(tp.Discrete(), x), TAU, baseline),
        ),
        ("rloo_loss, 2 runs", 2, rloo(2)),
        ("rloo_loss, 4 runs", 4, rloo(4)),
        ("exact_loss", 1, lambda x: tp.exact_loss(nll(STATES).unsqueeze(1).expand(x.shape), x, TAU)),
    ]
    rows: list[dict[str, object]] = []
    for name, passes, objective in objectives:
        torch.manual_seed(0)
        found = []
        for _ in range(BATCHES):
            copies = LOGITS.unsqueeze(1).expand(-1, COPIES, -1).clone().requires_grad_()
            loss = objective(copies) * EXAMPLES * COPIES  # a sum: every copy has the gradient of its own
            found.append(torch.autograd.grad(loss, copies)[0])
        samples = torch.cat(found, 1)
        variance = samples.var(1).sum().item() / size**2
        rows.append(
            {
                "objective": name,
                "passes": passes,
                "bias": f"{(samples.mean(1) - exact).norm().item() / size:.4f}",
                "standard_error": f"{(variance / samples.size(1)) ** 0.5:.4f}",
                "variance": f"{variance:.3g}",
                "variance_a_pass": f"{variance * passes:.3g}",
            }
        )
        print(*rows[-1].values(), sep=", ")
    write_csv(Path(__file__).with_suffix(".csv"), rows)


if __name__ == "__main__":
    main()
