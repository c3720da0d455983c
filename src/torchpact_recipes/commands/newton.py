"""torchpact demo --newton: a toy with a known answer."""

import json
import math

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from torchpact.checks import check_count, check_number
from torchpact_recipes import newton as toy


def newton(iterations: int | None, tau: float | None, seed: int, as_json: bool) -> None:
    """Teach Newton's iteration for the square root when to stop, and compare with the exact answer."""
    iterations = check_count("iterations", 500 if iterations is None else iterations)
    tau = check_number("tau", toy.TAU if tau is None else tau, 0, open_high=True)
    torch.manual_seed(seed)
    block = toy.make_block()
    columns = (TextColumn("training"), BarColumn(), TextColumn("{task.fields[shown]}"), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=iterations, shown="")
        toy.train(
            block,
            iterations,
            tau,
            lambda done, steps: bar.update(task, completed=done, shown=f"{steps:.2f} turns expected"),
        )
    result = toy.compare(block, tau=tau)
    if as_json:
        print(
            json.dumps(
                {
                    "tau": tau,
                    "seed": seed,
                    "iterations": iterations,
                    "agreement": result.agreement,
                    "objective": result.objective,
                    "mean_steps": result.mean_steps,
                },
                indent=2,
            )
        )
    else:
        _show(result, tau)


def _show(result: toy.Comparison, tau: float) -> None:
    console = Console()
    by_input = Table(
        title="Turns of u ← (u + x/u)/2 before stopping", caption="mean over the inputs in each range"
    )
    by_input.add_column("x")
    by_input.add_column("learned", justify="right")
    by_input.add_column("exact MAP", justify="right")
    for low in range(-4, 4):
        inside = (result.log_x >= low * math.log(10)) & (result.log_x < (low + 1) * math.log(10))
        if inside.any():
            by_input.add_row(
                f"10^{low} to 10^{low + 1}",
                f"{result.steps[inside].double().mean():.2f}",
                f"{result.map_steps[inside].double().mean():.2f}",
            )
    console.print(by_input, "")

    names = {
        "relaxed": "adaptive, relaxed (as trained)",
        "discrete": "adaptive, discrete",
        "thresholded": "adaptive, thresholded",
        "map": "exact MAP solution",
        "fixed": f"best fixed number of turns ({result.fixed_steps})",
    }
    overall = Table(title=f"What is minimised: mean of nll + {tau:g}·turns")
    overall.add_column("stopping rule")
    overall.add_column("mean turns", justify="right")
    overall.add_column("objective", justify="right")
    for key, name in names.items():
        overall.add_row(name, f"{result.mean_steps[key]:.2f}", f"{result.objective[key]:.3f}")
    console.print(overall)
    console.print(
        f"The learned rule stops exactly at the MAP solution for {result.agreement:.1%} of the inputs."
    )
