"""Training speed on one GPU, in images a second, with the ratio to the plain network of the same run.

    python benchmarks/training.py [--out benchmarks/training.csv]

Batch 128, bf16, compiled, the whole iteration in a CUDA graph; images are random, as the speed does not
depend on them. `together` is the number of networks trained at once, each on a stream of its own or, `joint`,
by kernels that are for all of them; its ratio is to one such network.
"""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from gpu_timing import iterations_per_second
from table import write_csv

from torchpact.models import ResNetConfig
from torchpact_recipes.data import Images
from torchpact_recipes.training import Learner, preset
from torchpact_recipes.training.ensemble.images import ImageEnsemble

CASES = [  # units, method, together, joint, iterations to time
    (5, "plain", 1, False, 1500),
    (5, "relaxed", 1, False, 1500),
    (5, "act", 1, False, 1000),
    (5, "reinforce", 1, False, 1000),
    (5, "relaxed", 2, False, 1000),
    (5, "relaxed", 4, False, 600),
    (5, "relaxed", 8, False, 300),
    (5, "relaxed", 8, True, 300),
    (18, "plain", 1, False, 500),
    (18, "relaxed", 1, False, 500),
]


def make(units: int, method: str, seed: int, data: Images) -> Learner:
    network = ResNetConfig(units=units, adaptive=method != "plain")
    config = preset("fast", method=method, network=network, precision="bf16", seed=seed)
    return Learner(config, data, data.images.device)


def images_per_second(learners: Sequence[Learner | ImageEnsemble], networks: int, iterations: int) -> float:
    rate = iterations_per_second(learners, iterations, warm_up=30)
    return networks * learners[0].config.batch * rate


def main() -> None:
    parser = argparse.ArgumentParser(description="training speed on one GPU")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".csv"))
    parser.add_argument(
        "--cases", type=int, nargs="*", default=range(len(CASES)), help="only these, by number"
    )
    arguments = parser.parse_args()
    generator = torch.Generator("cuda").manual_seed(0)
    images = torch.randint(0, 256, (50_000, 3, 32, 32), dtype=torch.uint8, device="cuda", generator=generator)
    data = Images(images, torch.randint(0, 10, (50_000,), device="cuda", generator=generator))
    rows: list[dict[str, object]] = []
    alone: dict[tuple[int, str], float] = {}
    kept: dict[tuple[int, str], list[Learner]] = {}
    for number in arguments.cases:
        units, method, together, joint, iterations = CASES[number]
        started = time.perf_counter()
        # those that join must be new
        learners = [] if joint else kept.setdefault((units, method), [])
        learners += [make(units, method, seed, data) for seed in range(len(learners), together)]
        moving: Sequence[Learner | ImageEnsemble] = (
            [ImageEnsemble(learners)] if joint else learners[:together]
        )
        for one in moving:
            one.advance()
        setup = time.perf_counter() - started
        speed = images_per_second(moving, together, iterations)
        if together == 1:
            alone[units, method] = speed
        plain = alone.get((units, "plain"))
        row: dict[str, object] = {
            "network": f"ResNet-{6 * units + 2}",
            "method": method,
            "together": together,
            "joint": "yes" if joint else "",
            "images_per_second": round(speed),
            "step_to_plain": round(plain / speed, 3) if plain and together == 1 else "",
            "total_to_one": round(speed / alone[units, method], 2) if together > 1 else "",
            "setup_seconds": round(setup, 1),
        }
        rows.append(row)
        print(*row.values(), sep="\t", flush=True)
        write_csv(arguments.out, rows)


if __name__ == "__main__":
    main()
