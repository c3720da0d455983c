"""Bias and variance of the gradient estimators, measured against exact enumeration.

    python benchmarks/gradient_estimators.py

The problem: a chain of six dependent binary variables and a smooth f, small enough that E_q f and its
gradient are a sum over 64 terms. For every estimator the bias is the distance of the mean gradient from
the exact one, with the standard error of that distance; the variance is that of one sample's gradient.
Both are relative to the norm of the exact gradient. Writes gradient_estimators.csv beside itself, and the
figure in docs/images.
"""

import argparse
import csv
import itertools
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from matplotlib.ticker import NullLocator
from table import write_csv
from torch import Tensor

import torchpact as tp
from torchpact import svo

HERE = Path(__file__).parent
LENGTH, SAMPLES = 6, 200_000
TEMPERATURES = (0.1, 0.2, 0.4, 2 / 3, 1.0, 2.0)


def f(z: Tensor) -> Tensor:
    weights = torch.linspace(-2, 2, LENGTH, dtype=z.dtype)
    return torch.sin(z @ weights) + 2 * z[:, 0] * z[:, 3] - (z[:, 1] + z[:, 4] - 0.3) ** 2


def make_q() -> svo.LinearChain:
    generator = torch.Generator().manual_seed(1)
    q = svo.LinearChain(LENGTH).double()
    with torch.no_grad():
        for parameter in q.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.double))
    return q


def exact_gradient(q: svo.LinearChain) -> Tensor:
    z = torch.tensor(list(itertools.product([0.0, 1.0], repeat=LENGTH)), dtype=torch.double)
    gradients = torch.autograd.grad((q().log_prob(z).exp() * f(z)).sum(), list(q.parameters()))
    return torch.cat([g.flatten() for g in gradients])


def measure() -> list[dict[str, str | float]]:
    torch.manual_seed(0)
    q = make_q()
    exact = exact_gradient(q)
    size = exact.norm().item()
    estimators: list[tuple[str, str | float, svo.Estimator]] = [
        ("REINFORCE", "", svo.Reinforce(baseline=None)),
        ("REINFORCE, baseline", "", svo.Reinforce(baseline=tp.EMABaseline())),
        *(("Concrete", round(t, 3), svo.Concrete(t)) for t in TEMPERATURES),
    ]
    rows: list[dict[str, str | float]] = []
    for name, temperature, estimator in estimators:
        statistics = svo.gradient_statistics(f, q, estimator, samples=SAMPLES, chunk=500)
        rows.append(
            {
                "estimator": name,
                "temperature": temperature,
                "bias": (statistics.mean - exact).norm().item() / size,
                "standard_error": statistics.variance.sum().div(SAMPLES).sqrt().item() / size,
                "variance": statistics.variance.sum().item() / size**2,
            }
        )
        print(*(v if isinstance(v, str) else f"{v:.4g}" for v in rows[-1].values()), sep=", ")
    return rows


def plot(rows: list[dict[str, str]], path: Path) -> None:
    relaxed = [row for row in rows if row["estimator"] == "Concrete"]
    others = [row for row in rows if row["estimator"] != "Concrete"]
    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3.2), layout="constrained")
    x = [float(row["temperature"]) for row in relaxed]
    for axis, column in ((left, "bias"), (right, "variance")):
        axis.plot(x, [float(row[column]) for row in relaxed], "o-", label="Concrete")
        axis.set(
            xscale="log",
            yscale="log",
            xlabel="temperature λ",
            ylabel=f"{column}, relative to the exact gradient",
        )
        axis.set_xticks(x, [f"{t:g}" for t in x], minor=False)
        axis.xaxis.set_minor_locator(NullLocator())
    left.plot(x, [float(row["standard_error"]) for row in relaxed], ":", color="0.5", label="standard error")
    for row, style, colour in zip(others, ("-", "--"), ("tab:red", "black"), strict=True):
        right.axhline(float(row["variance"]), color=colour, linestyle=style, label=row["estimator"])
    for axis in (left, right):
        axis.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description="bias and variance of gradient estimators")
    parser.add_argument("--plot", action="store_true", help="only redraw the figure from the CSV")
    table = HERE / "gradient_estimators.csv"
    if not parser.parse_args().plot:
        rows = measure()
        write_csv(table, [{k: v if isinstance(v, str) else f"{v:.4g}" for k, v in r.items()} for r in rows])
    with table.open(newline="") as file:
        plot(list(csv.DictReader(file)), HERE.parent / "docs" / "images" / "gradient_estimators.png")


if __name__ == "__main__":
    main()
