"""Training speed of adaptive LSTMs on text on one GPU, by kernels for several networks at once and without.

    python benchmarks/text_training.py [--out benchmarks/text_training.csv]

Sizes are those of `torchpact reproduce rnn-enwik8` at the scales fast (256 units, windows of 50) and paper
(1500 units, windows of 100), with batches of 128 streams; the text is random, as the speed does not depend on
it. Where `kernels` is `layers`, a network runs layer by layer, captured in a CUDA graph.
Iterations are those of all networks; `to_layers` is their ratio to those of one such network.
"""

import argparse
import gc
import time
from pathlib import Path

import torch
from gpu_timing import iterations_per_second
from table import write_csv

from torchpact_recipes.training import SequenceLearner, sequence_preset
from torchpact_recipes.training.ensemble.sequences import form_sequence_ensembles

CASES = [  # preset, method, steps, networks, own kernels, iterations to time
    ("small", "plain", 1, 1, False, 60),
    ("small", "relaxed", 3, 1, False, 30),
    ("small", "plain", 1, 1, True, 200),
    ("small", "plain", 1, 3, True, 200),
    ("small", "repeat", 3, 3, True, 100),
    ("small", "relaxed", 3, 1, True, 100),
    ("small", "relaxed", 3, 3, True, 100),
    ("small", "relaxed", 3, 9, True, 100),
    ("small", "act", 3, 9, True, 100),
    ("paper", "plain", 1, 1, True, 20),
    ("paper", "relaxed", 5, 1, True, 10),
    ("paper", "relaxed", 5, 4, True, 5),
]


def main() -> None:
    parser = argparse.ArgumentParser(description="training speed of LSTMs on text on one GPU")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".csv"))
    parser.add_argument(
        "--cases", type=int, nargs="*", default=range(len(CASES)), help="only these, by number"
    )
    arguments = parser.parse_args()
    text = torch.randint(256, (5_000_000,), dtype=torch.uint8, device="cuda")
    rows: list[dict[str, object]] = []
    alone: dict[tuple[str, str], float] = {}
    for number in arguments.cases:
        preset, method, steps, networks, own, iterations = CASES[number]
        started = time.perf_counter()
        configs = [
            sequence_preset("enwik8", preset, method=method, max_steps=steps, seed=n) for n in range(networks)
        ]
        torch.cuda.reset_peak_memory_stats()
        learners = [SequenceLearner(config, "cuda", text) for config in configs]
        if own:
            form_sequence_ensembles(learners)
        learners[0].use_kernels = own
        learners[0].advance()
        torch.cuda.synchronize()
        setup = time.perf_counter() - started
        speed = networks * iterations_per_second(learners[:1], iterations, warm_up=3)
        if not own:
            alone[preset, method] = speed
        before = alone.get((preset, method))
        row: dict[str, object] = {
            "units": configs[0].network.hidden,
            "method": method,
            "max_steps": steps,
            "networks": networks,
            "kernels": "own" if own else "layers",
            "iterations_per_second": round(speed, 2),
            "characters_per_second": round(speed * configs[0].batch * configs[0].window),
            "to_layers": round(speed / before, 2) if before and own else "",
            "peak_MiB": torch.cuda.max_memory_allocated() >> 20,
            "setup_seconds": round(setup, 1),
        }
        rows.append(row)
        print(*row.values(), sep="\t", flush=True)
        write_csv(arguments.out, rows)
        del learners
        gc.collect()  # they refer to themselves, and the next are to have the memory


if __name__ == "__main__":
    main()
