import csv
import json
import sys
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import torchpact as tp
from torchpact.cli import make_app
from torchpact.engines import ENGINES, Unsupported
from torchpact.engines.base import NO_CONTEXT
from torchpact.engines.generic.dense import Dense, PlainUnits
from torchpact.engines.timing import in_turns
from torchpact.flops.conv import conv_block_flops, plain_conv_flops
from torchpact.flops.count import max_flops
from torchpact.models import ResidualUnit, ResNetConfig
from torchpact.specs import block_spec
from torchpact_recipes.bench.blobs import block_with_blobs, with_blobs
from torchpact_recipes.bench.bottleneck import bottlenecks_with_blobs
from torchpact_recipes.bench.dense import dense_alternatives
from torchpact_recipes.bench.rows import BottleneckBench, NetworkBench, Setting, runners_of
from torchpact_recipes.commands import bench as command

SETTING = Setting(torch.device("cpu"), torch.float32, 0.01, compiling=False)
TINY = ["--network", "none", "--seconds", "0.01", "--no-compile", "--device", "cpu"]


def run(*arguments):
    return CliRunner().invoke(make_app(), ["bench", *TINY, *arguments])


def test_rows_are_printed_stored_and_drawn(tmp_path):
    choice = ["--block", "16x8", "--batch", "1", "--batch", "3", "--active", "0.5", "--active", "1"]
    result = run(*choice, "-o", str(tmp_path))
    assert result.exit_code == 0, result.output
    with (tmp_path / "bench.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["work"], row["batch"], row["masks"]) for row in rows] == [
        ("16×8×8", batch, masks) for batch in ("1", "3") for masks in ("blobs 50%", "blobs 100%")
    ]
    for row in rows:
        measured = float(row["best_dense_ms"]) / float(row["deployed_ms"])
        assert float(row["speedup"]) == pytest.approx(measured, abs=0.1 * measured)
        assert bool(row["p99_ms"]) == (row["batch"] == "1")
    assert "of theory" in result.output
    assert (tmp_path / "bench.png").stat().st_size > 1000


def test_rows_as_json(tmp_path):
    result = run("--block", "16x4", "--batch", "2", "--active", "0.5", "--json", "-o", str(tmp_path))
    found = json.loads(result.stdout)
    assert found["rows"][0]["best_dense"] in ("eager", "channels_last", "folded")
    assert len(found["files"]) == 3


def test_without_matplotlib_only_the_figure_is_left_out(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = run("--block", "16x4", "--batch", "2", "--active", "0.5", "-o", str(tmp_path))
    assert result.exit_code == 0, result.output
    said = (
        "no figure: expected the package matplotlib to be installed (from a clone: "
        'pip install "./src/torchpact_recipes[plot]")'
    )
    assert said in result.stderr.splitlines()
    assert "of theory" in result.stdout
    assert result.stdout.endswith(f"{tmp_path / 'bench.csv'}\n")
    assert [path.name for path in tmp_path.iterdir()] == ["bench.csv"]


@pytest.mark.parametrize(("count", "said"), [(1, "1 thread"), (2, "2 threads")])
def test_threads_of_a_cpu_are_counted(monkeypatch, count, said):
    monkeypatch.setattr(torch, "get_num_threads", lambda: count)
    assert command._name(torch.device("cpu")).endswith(f", {said}")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--block", "64"], "expected a block as channels x size, such as 64x56, or none; got '64'"),
        (["--block", "0x8"], "got '0x8'"),
        (
            ["--network", "resnet51"],
            "expected networks among resnet32, resnet110, resnet50 and none; got 'resnet51'",
        ),
        (["--block", "none", "--network", "none"], "expected a block, a network or a model to measure"),
        (["--active", "1.5"], r"expected active in \(0, 1\], got 1.5"),
        (["--batch", "0"], "expected batch to be an integer of at least 1, got 0"),
        (["--precision", "fp8"], "expected a precision of fp32, bf16, fp16; got 'fp8'"),
    ],
)
def test_what_cannot_be_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        CliRunner().invoke(make_app(), ["bench", *arguments], catch_exceptions=False)


def test_of_a_network_alone_no_block_is_measured(tmp_path, monkeypatch):
    def measure(setting, blocks, networks, *_):
        assert (blocks, networks) == ([], [5])
        return []

    monkeypatch.setattr("torchpact_recipes.commands.bench._measure", measure)
    assert run("--block", "none", "--network", "resnet32", "-o", str(tmp_path)).exit_code == 0


def test_blocks_are_compiled_where_dense_ones_are(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)  # which takes long
    block, u = block_with_blobs(16, 4, 1, 0.5)
    assert "compiled" not in runners_of(block, u)
    assert "compiled" in runners_of(block, u, compiling=True)


def test_engines_that_refuse_a_map_are_left_out(monkeypatch):
    class ChoosyRunner(PlainUnits):
        def tune(self, u, context):
            raise Unsupported(f"got {tuple(u.shape)}")

    class Choosy(Dense):
        def build(self, spec, example=NO_CONTEXT):
            return ChoosyRunner(spec)

    block, u = block_with_blobs(16, 4, 1, 0.5)
    monkeypatch.setitem(ENGINES, "choosy", Choosy())
    assert "choosy" not in runners_of(block, u)


def test_a_network_is_measured_with_its_memory():
    config = ResNetConfig(units=2, image_size=16)
    bench = NetworkBench(SETTING, config, torch.zeros(2, 3, 16, 16))
    row = bench.row("blobs 50%", *with_blobs(config, 2, 0.5), engines=["dense", "sparse"])
    assert bench.plain_flops == max_flops(bench.plain, (16, 16))
    assert row["of_theory"] == pytest.approx(row["speedup"] / row["flops_speedup"], abs=0.05)
    assert row["plain_MiB"] < row["act_MiB"]
    assert row["dense_ms"] > 0
    assert row["sparse_ms"] > 0


SMALL_NET: dict[str, Any] = {"size": 64, "units": (2, 3), "channels": (64, 128)}


def test_a_network_of_bottlenecks_is_measured():
    bench = BottleneckBench(SETTING, 2, **SMALL_NET)
    row = bench.row(0.5)
    assert set(row["engine"].split("+")) <= {"dense", "sparse", "native"}  # on a CPU others decline
    assert 1.1 < row["flops_speedup"] < 2.0
    assert row["of_theory"] == pytest.approx(row["speedup"] / row["flops_speedup"], abs=0.05)


@torch.no_grad()
def test_flops_of_bottlenecks_are_those_of_their_layers():
    """Of units that run everywhere, by what PyTorch counts; of a corner pixel, by hand."""
    net: Any
    net, images = bottlenecks_with_blobs(1, 1.0, **SMALL_NET)
    u = net.enter(images)
    for block in net.blocks:
        size = block(u)[0].shape[2:]
        spec = block_spec(block)
        assert plain_conv_flops(spec, *size) == tp.count_flops(torch.nn.Sequential(*block.steps), u).mean
        corner = torch.ones(1, 1, *size, dtype=torch.long)
        once = conv_block_flops(spec, corner, *size)
        corner[0, 0, 0, 0] = 2
        second, head = block.steps[1], block.halting[0]
        more = 4 * second.conv1.weight.numel() + second.conv2.weight.numel() + second.conv3.weight.numel()
        if len(block.halting) > 1:  # the pixel is asked once more
            more += head.conv.weight.numel() + head.linear.weight.numel()
        assert conv_block_flops(spec, corner, *size) - once == 2 * more
        u, _ = block(u)


@pytest.mark.parametrize("active", [0.25, 0.5, 1.0])
def test_blobs_are_as_large_as_they_should_be(active):
    block, u = block_with_blobs(16, 12, 3, active, units=4)
    with torch.no_grad():
        steps = block(u)[1].steps
    assert (steps == 4).double().mean().item() == pytest.approx(active, abs=1 / 144)
    assert ((steps == 1) | (steps == 4)).all()


@torch.no_grad()
def test_dense_alternatives_compute_the_same():
    unit = ResidualUnit(16, 16).eval()
    u = torch.randn(2, 16, 6, 6)
    for call in dense_alternatives(unit, unit, u, compiling=False).values():
        found = call()
        assert isinstance(found, torch.Tensor)
        assert torch.allclose(found, unit(u), atol=1e-5)


def test_all_take_as_many_turns():
    turns = in_turns({"a": lambda: None, "b": lambda: None}, seconds=0, least=4, most=9)
    assert {name: len(times) for name, times in turns.items()} == {"a": 4, "b": 4}
