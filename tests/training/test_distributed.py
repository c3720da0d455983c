import json
import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import spawn

from tests.training.small import METHODS, burst, config, images
from torchpact_recipes.training import Trainer, TrainingError, distributed, load_checkpoint
from torchpact_recipes.training.distributed import FirstFailed
from torchpact_recipes.training.distributed_layers import GlobalBatchNorm2d, with_global_norms

WORLD = 2
# Few small steps: what is compared is the sharing of work, not how rounding grows in training. Sums in
# another order may turn a ReLU, whose weights then get another gradient: 3e-3 in the worst of the tensors
# when weights were changed by a rounding 25 times (with a step of 0.1, 2e-1). Other examples: 1e-1 and more.
SETTINGS = {"iterations": 4, "lr": 1e-3, "log_every": 2, "validate_every": 4, "checkpoint_every": 2}
TOLERANCE = 1e-2


def settings(method, **others):
    return config(method, network={"halting_norm": method == "act"}, **(SETTINGS | others))


def trainer(folder, method, **options):
    return Trainer(settings(method), folder, images(), images("test", 40), **options)


def relative(one, two):
    """The norm of the difference relative to that of the second, in the tensor where it is largest."""
    return max(
        ((one[name].double() - value.double()).norm() / value.double().norm().clamp(min=1e-9)).item()
        for name, value in two.items()
    )


def assert_close(one, two):
    torch.testing.assert_close(one, two, rtol=1e-5, atol=2e-5, check_dtype=False)


def tensors(folder):
    return load_checkpoint(folder / "last.safetensors").tensors


@pytest.mark.parametrize("world", [1, 2, 3, 6])
def test_shares_partition_the_batch_in_order(monkeypatch, world):
    monkeypatch.setattr(distributed, "world", lambda: world)
    shares = []
    for rank in range(world):
        monkeypatch.setattr(distributed, "rank", lambda rank=rank: rank)
        shares += list(range(12))[distributed.share(12)]
    assert shares == list(range(12))
    assert len(range(12)[distributed.share(12)]) == 12 // world


def taught(folder, name):
    """A network that learns from the one in the folder's ``teacher``."""
    teacher = folder / "teacher" / "last.safetensors"
    taught = settings("act", distill=0.5)
    return Trainer(taught, folder / name, images(), images("test", 40), teacher=teacher)


# ---- what each of two processes does; what they find is left in files ----


def _process(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=WORLD)
    found = {"norm": _norm(), "states": {}, "files": {}, "results": {}}
    for method in METHODS:
        # each in a folder of its own shows who writes
        own = folder / f"{method}-{rank}"
        run = trainer(own, method)
        found["results"][method] = run.run()
        found["states"][method] = run.learner.state()
        found["files"][method] = sorted(p.name for p in own.glob("*"))
    run = taught(folder, f"taught-{rank}")
    run.run()
    found["states"]["taught"] = run.learner.state()
    for method in ("relaxed", "reinforce"):
        broken = trainer(folder / f"broken-{method}", method)
        burst(broken)
        resumed = trainer(folder / f"broken-{method}", method, resume=True)
        assert resumed.learner.iteration == 2
        resumed.run()
        found["states"][f"broken-{method}"] = resumed.learner.state()
    other_world = trainer(folder / "alone-then-shared", "act", resume=True)
    assert other_world.learner.iteration == 2
    other_world.run()
    found["errors"] = [
        _error(lambda: _explode(folder, rank)),
        _error(lambda: trainer(folder / "act-0", "act")),
    ]
    found["uneven"] = _error(lambda: Trainer(settings("plain", batch=9), folder / "x", images(), images()))
    # the last: a process that goes away
    last = trainer(folder / "left", "plain")
    torch.save(found, folder / f"found{rank}.pt")
    if rank == 1:
        os._exit(0)
    error = _error(last.run)
    torch.save(error, folder / "left.pt")
    os._exit(0)  # there is nobody left to part from in good order


def _norm():
    """Outputs, gradients and statistics of this process's share of a batch."""
    model = nn.Sequential(nn.BatchNorm2d(3, eps=1e-3))
    with_global_norms(model)
    x = _norm_batch()[distributed.share(8)].requires_grad_()
    y = model(x)
    (y * _norm_weights()[distributed.share(8)]).sum().backward()
    return {"y": y.detach(), "gradient": x.grad, "weight": model[0].weight.grad, "state": model.state_dict()}


def _explode(folder, rank):
    run = trainer(folder / "nan", "plain")
    if rank == 1:
        with torch.no_grad():
            run.learner.model.classifier.bias.fill_(float("nan"))
    run.run()


def _error(work):
    try:
        work()
    except Exception as error:
        return type(error).__name__, str(error)
    return None


def _norm_batch():
    # a level above the spread, which sums of squares would lose digits to
    return 10 + torch.randn(8, 3, 4, 5, generator=torch.Generator().manual_seed(0))


def _norm_weights():
    return torch.randn(8, 3, 4, 5, generator=torch.Generator().manual_seed(1))


# ---- what there is to say about it ----


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """Everything that two processes found, and their folder."""
    folder = tmp_path_factory.mktemp("shared")
    first = trainer(folder / "alone-then-shared", "act")
    burst(first)
    trainer(folder / "teacher", "plain").run()
    spawn(_process, (folder,), nprocs=WORLD)
    return folder, [torch.load(folder / f"found{rank}.pt") for rank in range(WORLD)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The same runs in a single process."""
    folder = tmp_path_factory.mktemp("alone")
    runs = {method: trainer(folder / method, method) for method in METHODS}
    for run in runs.values():
        run.run()
    return folder, runs


def test_the_norm_is_that_of_the_whole_batch(shared):
    found = [each["norm"] for each in shared[1]]
    norm = nn.BatchNorm2d(3, eps=1e-3).double()
    x = _norm_batch().double().requires_grad_()
    y = norm(x)
    (y * _norm_weights()).sum().backward()
    assert_close(torch.cat([f["y"] for f in found]), y.detach())
    assert_close(torch.cat([f["gradient"] for f in found]), x.grad)
    assert_close(found[0]["weight"] + found[1]["weight"], norm.weight.grad)
    for f in found:
        state = {name.removeprefix("0."): value for name, value in f["state"].items()}
        assert state.keys() == norm.state_dict().keys()
        for name, value in norm.state_dict().items():
            assert_close(state[name], value)


def test_alone_the_norm_is_the_usual_one():
    one, two = GlobalBatchNorm2d(3), nn.BatchNorm2d(3)
    assert torch.equal(one(_norm_batch()), two(_norm_batch()))
    for name, value in two.state_dict().items():
        assert torch.equal(one.state_dict()[name], value)


@pytest.mark.parametrize("method", METHODS)
def test_two_processes_give_the_weights_of_one(shared, alone, method):
    state = alone[1][method].learner.state()
    start = trainer(alone[0] / f"start-{method}", method).learner.state()
    for found in shared[1]:
        assert found["states"][method].keys() == state.keys()
        assert relative(found["states"][method], state) < TOLERANCE
    # and the tolerance is far below what training has changed
    assert relative({"weight": start["model.stem.weight"]}, {"weight": state["model.stem.weight"]}) > 1e-4


def test_two_processes_learn_of_a_teacher_as_one_does(shared):
    folder, found = shared
    run = taught(folder, "taught-alone")
    run.run()
    for each in found:
        assert relative(each["states"]["taught"], run.learner.state()) < TOLERANCE
    # and it is not what they learn of labels
    assert relative(found[0]["states"]["taught"], found[0]["states"]["act"]) > 1e-2


@pytest.mark.parametrize("method", METHODS)
def test_two_processes_report_what_one_does(shared, alone, method):
    files = (shared[0] / f"{method}-0" / "history.jsonl", alone[0] / method / "history.jsonl")
    events = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
    for one, two in zip(*events, strict=True):
        assert (one["kind"], one["iteration"]) == (two["kind"], two["iteration"])
        if one["kind"] == "train":
            for name in ("loss", "nll", "accuracy", "expected_steps", "iterations"):
                assert one[name] == pytest.approx(two[name], rel=1e-4)


@pytest.mark.parametrize("method", METHODS)
def test_all_processes_hold_the_same_finite_state(shared, method):
    one, two = (found["states"][method] for found in shared[1])
    assert [name for name in one if not torch.equal(one[name], two[name])] == []
    assert all(value.isfinite().all() for value in one.values())
    assert shared[1][0]["results"][method] == shared[1][1]["results"][method] != {}


@pytest.mark.parametrize("method", METHODS)
def test_only_the_first_process_writes(shared, method):
    names = ["best.safetensors", "history.jsonl", "last.safetensors", "previous.safetensors", "run.json"]
    assert shared[1][0]["files"][method] == names
    assert shared[1][1]["files"][method] == []
    assert json.loads((shared[0] / f"{method}-0" / "run.json").read_text())["processes"] == WORLD


@pytest.mark.parametrize("method", ["relaxed", "reinforce"])
def test_resumed_by_two_processes_a_run_is_as_if_uninterrupted(shared, method):
    for found in shared[1]:
        straight, broken = found["states"][method], found["states"][f"broken-{method}"]
        assert straight.keys() == broken.keys()
        assert [name for name in straight if not torch.equal(straight[name], broken[name])] == []


def test_a_run_begun_by_one_process_can_be_finished_by_two(shared, alone):
    both = [tensors(folder) for folder in (shared[0] / "alone-then-shared", alone[0] / "act")]
    assert relative(*both) < TOLERANCE


def test_a_run_begun_by_two_processes_can_be_finished_by_one(shared, alone, tmp_path):
    os.symlink(shared[0] / "act-0" / "previous.safetensors", tmp_path / "last.safetensors")
    run = trainer(tmp_path, "act", resume=True)
    assert run.learner.iteration == 2
    run.run()
    assert relative(tensors(tmp_path), tensors(alone[0] / "act")) < TOLERANCE


def test_an_error_stops_all_processes(shared):
    (nan, again), (nan_elsewhere, again_elsewhere) = (found["errors"] for found in shared[1])
    assert nan[0] == again[0] == TrainingError.__name__
    assert "loss is nan at iteration 2" in nan[1]
    assert "holds a run already" in again[1]
    assert nan_elsewhere == (FirstFailed.__name__, f"process 0 failed: {nan[1]}")
    assert again_elsewhere == (FirstFailed.__name__, f"process 0 failed: {again[1]}")
    for found in shared[1]:
        assert found["uneven"] == ("ValueError", "expected a batch that 2 processes share evenly, got 9")


def test_a_process_that_goes_away_does_not_leave_the_other_waiting(shared):
    assert torch.load(shared[0] / "left.pt") is not None


SMALL = (
    "--data sample --images 64 --network 2 --preset smoke --iterations 4 --lr 0.001 --batch 16 --method plain"
)


@pytest.mark.slow
def test_torchrun_gives_what_the_plain_command_gives(tmp_path):
    programs = {
        "shared": ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={WORLD}"],
        "alone": [],
    }
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    running = [
        subprocess.Popen(
            [
                sys.executable,
                *words,
                "-m",
                "torchpact",
                "train",
                "images",
                str(tmp_path / name),
                *SMALL.split(),
                "--device",
                "cpu",
                "--json",
            ],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for name, words in programs.items()
    ]
    outputs = [process.communicate(timeout=120) for process in running]
    assert [process.returncode for process in running] == [0, 0], outputs
    # one result on standard output, by the first process
    assert [list(json.loads(out)) for out, _ in outputs] == [[str(tmp_path / name)] for name in programs]
    assert relative(tensors(tmp_path / "shared"), tensors(tmp_path / "alone")) < TOLERANCE
    records = [json.loads((tmp_path / name / "run.json").read_text()) for name in programs]
    assert [(r["status"], r["processes"]) for r in records] == [("finished", WORLD), ("finished", 1)]


def test_a_process_joins_only_what_torchrun_started(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    device = torch.device("cpu")
    assert distributed.join(device) is device
    assert (distributed.rank(), distributed.world()) == (0, 1)
    assert distributed.on_first(lambda: 3) == 3
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(
        ValueError, match="expected device cuda, of which each process takes its own, got cuda:1"
    ):
        distributed.join(torch.device("cuda:1"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(ValueError, match="expected a GPU for every process, got 1 and process 1"):
        distributed.join(torch.device("cuda"))
