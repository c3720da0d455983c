"""Deployed ResNets beside OpenVINO on a machine on which other programs compete for the cores.

    python benchmarks/busy.py [--only resnet32-1 …] [--busy 0 2 4] [--rounds 8] [--old OLD/src]

Each contender runs in a process of its own and calls its network again and again for a second; they take
turns, while as many other processes as ``busy`` says do nothing but count. ``torchpact`` is the adaptive
network of the zoo, deployed; ``openvino`` is the plain network of equal depth, in single precision. ``old``
is torchpact from another source folder, if one is given. ``slowdown`` is the median of the calls of all turns
divided by that of the same contender when nothing competes; ``slowdown_p90`` and ``slowdown_mean`` are the
same of the 90th percentile and the mean, which tell of short calls that lose their core now and then. A turn
in which other programs took more than a tenth of a core is repeated, but not for ever: ``disturbed`` is the
share of turns that stayed so. Rows of the cases that are measured replace those of earlier runs in the CSV.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import IO

CASES = ("resnet32-1", "resnet32-64", "resnet110-1", "resnet110-64")
NETWORKS = {"resnet32": ("psact_resnet32", "tau0.05"), "resnet110": ("psact_resnet110", "tau0.005")}
COUNTING = "import os\nwhile os.getppid() == {}:\n    for _ in range(10**6): pass"
PATIENCE = 4
"""Tries of a turn that nobody is to disturb."""


def call_of(contender: str, case: str) -> Callable[[], object]:
    """Return what calls the network of a case as a contender does."""
    import torch

    import torchpact as tp

    name, batch = case.split("-")
    torch.manual_seed(0)
    images = torch.randn(int(batch), 3, 32, 32)
    make, weights = NETWORKS[name]
    if contender != "openvino":
        from torchpact_recipes.data import load_sample, standardize

        images = standardize(load_sample("test").images)[: int(batch)]
        net = getattr(tp.models, make)(mode="thresholded", pretrained=weights)
        fast = tp.deploy(net, images, engines=["native"], details=False)
        return lambda: fast(images)
    import openvino  # type: ignore[import-not-found, import-untyped, unused-ignore]

    class Logits(torch.nn.Module):
        def __init__(self, net: torch.nn.Module) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(x)[0]  # type: ignore[no-any-return]

    plain = Logits(getattr(tp.models, name)(pretrained="plain").eval())
    model = openvino.convert_model(plain, example_input=images, input=[tuple(images.shape)])
    made = openvino.compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    request, given = made.create_infer_request(), images.numpy()
    return lambda: request.infer([given], share_inputs=True, share_outputs=True)


def work(contender: str, case: str, pipe: IO[str]) -> None:
    """Make calls for as many seconds as a line of standard input says, and tell how long each took."""
    warnings.simplefilter("ignore")
    call = call_of(contender, case)
    call()
    print("ready", file=pipe, flush=True)
    for line in sys.stdin:
        times: list[float] = []
        begin = time.perf_counter()
        while time.perf_counter() - begin < float(line):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        print(*times, file=pipe, flush=True)


def turn(worker: "subprocess.Popen[str]", seconds: float) -> list[float]:
    assert worker.stdin is not None
    assert worker.stdout is not None
    print(seconds, file=worker.stdin, flush=True)
    return [float(word) for word in worker.stdout.readline().split()]


def spent(processes: "list[subprocess.Popen[str]]") -> tuple[float, float, float]:
    """Return seconds: of the clock; of all cores that were at work; of these processes."""
    tick = os.sysconf("SC_CLK_TCK")
    user, nice, system, _, _, *rest = map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9])
    own = 0
    for process in processes:
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        own += int(fields[11]) + int(fields[12])
    return time.monotonic(), (user + nice + system + sum(rest)) / tick, own / tick


def undisturbed_turn(
    worker: "subprocess.Popen[str]", seconds: float, processes: "list[subprocess.Popen[str]]"
) -> tuple[list[float], bool]:
    """Return the times of a turn, and whether others took part in it all the same."""
    for _ in range(PATIENCE):
        before = spent(processes)
        times = turn(worker, seconds)
        wall, used, own = (after - each for after, each in zip(spent(processes), before, strict=True))
        if used - own < 0.1 * wall:
            return times, False
    return times, True


def measured(case: str, arguments: argparse.Namespace) -> list[dict[str, object]]:
    """Return the rows of a case: one for each contender and each number of busy processes."""
    sources = {"torchpact": None, "openvino": None} | ({"old": arguments.old} if arguments.old else {})
    workers = {}
    for name, source in sources.items():
        paths = {} if source is None else {"PYTHONPATH": str(source.resolve())}
        command = [sys.executable, __file__, "--work", name, "--only", case]
        workers[name] = subprocess.Popen(
            command, env={**os.environ, **paths}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
    for worker in workers.values():
        assert worker.stdout is not None
        worker.stdout.readline()
        turn(worker, arguments.seconds)  # warms up
    rows: list[dict[str, object]] = []
    alone: dict[str, list[float]] = {}
    for count in arguments.busy:
        busy = [
            subprocess.Popen([sys.executable, "-c", COUNTING.format(os.getpid())], text=True)
            for _ in range(count)
        ]
        try:
            times: dict[str, list[float]] = {name: [] for name in workers}
            disturbed = dict.fromkeys(workers, 0)
            for number in range(arguments.rounds):
                for name in list(workers)[:: 1 if number % 2 else -1]:
                    processes = [*workers.values(), *busy]
                    found, was = undisturbed_turn(workers[name], arguments.seconds, processes)
                    times[name] += found
                    disturbed[name] += was
        finally:
            for process in busy:
                process.kill()
                process.wait()
        for name, each in times.items():
            of_all = statistics.median(each), statistics.quantiles(each, n=10)[-1], statistics.mean(each)
            ms = [1e3 * seconds for seconds in of_all]
            first = alone.setdefault(name, ms)
            rows.append(
                {
                    "case": case,
                    "busy": count,
                    "contender": name,
                    "median_ms": round(ms[0], 3),
                    "p90_ms": round(ms[1], 3),
                    "mean_ms": round(ms[2], 3),
                    "slowdown": round(ms[0] / first[0], 2),
                    "slowdown_p90": round(ms[1] / first[1], 2),
                    "slowdown_mean": round(ms[2] / first[2], 2),
                    "calls": len(each),
                    "disturbed": round(disturbed[name] / arguments.rounds, 2),
                }
            )
            print(*rows[-1].values(), sep="\t", flush=True)
    for worker in workers.values():
        assert worker.stdin is not None
        worker.stdin.close()
        worker.wait()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description="deployed networks on a busy machine")
    parser.add_argument("--only", nargs="*", choices=CASES, default=CASES)
    parser.add_argument("--busy", type=int, nargs="*", default=[0, 2, 4], help="processes; 0 comes first")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=1.0, help="of a turn")
    parser.add_argument("--old", type=Path, help="the sources of another version, as a third contender")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".csv"))
    parser.add_argument("--work", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        work(arguments.work, arguments.only[0], sys.stdout)
        return
    from table import read_rows, write_csv

    for case in arguments.only:
        new = measured(case, arguments)
        kept: list[dict[str, object]] = [dict(r) for r in read_rows(arguments.out) if r["case"] != case]
        by_case = sorted([*kept, *new], key=lambda row: CASES.index(str(row["case"])))
        write_csv(arguments.out, by_case)


if __name__ == "__main__":
    main()
