"""The recipes use torchpact as anybody may: its public names."""

from pathlib import Path

import pytest

from tests.rules.checker import private_imports, read_sources

SOURCES = read_sources(Path(__file__).parents[2] / "src")
ROOMS = ["torchpact", *(f"torchpact.{room}" for room in ("models", "engines", "flops", "specs", "svo"))]

HELPERS = {
    "torchpact.checks": "checks of what users hand in",
    "torchpact.files": "files that are there in full or not at all",
    "torchpact.plugins": "how commands and weights are registered",
}
DEEP = {
    "torchpact.budget.search": "thresholds from a record of exits, without running the network again",
    "torchpact.core.call_args": "what an engine is given as the call",
    "torchpact.core.halting": "the equations for one iteration, which kernels of training copy",
    "torchpact.core.modes": "the table of modes by name",
    "torchpact.core.relaxation": "noise, and how it decides",
    "torchpact.core.state": "what a block iterates on",
    "torchpact.engines.build_cache": "caches of compilers that are used here too",
    "torchpact.engines.graphs": "CUDA graphs, which benchmarks and training record too",
    "torchpact.engines.timing": "interleaved timing, for benchmarks",
    "torchpact.flops.conv": "what a block costs, for benchmarks",
    "torchpact.nn.conv_units": "parts of units and heads, for kernels of training that replace them",
    "torchpact.nn.resnet_config": "the type of a setting",
    "torchpact.nn.sequence": "the loss of a sequence",
}
"""Modules that have no name in a room of their own, and what recipes need them for."""
BENCH = {
    "torchpact.engines.conv.folded": "the dense competitor with its norms folded",
    "torchpact.engines.registry": "the engines that are tried on a device",
}
"""Modules for ``torchpact_recipes.bench`` only, which compares engines by themselves."""


def found_in(bench: bool, allowed: dict[str, str]) -> list[str]:
    """What modules of the recipes, those of ``bench`` or all others, import that is not public."""
    parts = {
        name: text
        for name, text in SOURCES.items()
        if name.startswith("torchpact.")
        or name in ROOMS
        or bench == name.startswith("torchpact_recipes.bench")
    }
    return private_imports(parts, "torchpact_recipes", ROOMS, allowed)


@pytest.mark.parametrize("bench", [True, False])
def test_recipes_import_public_names_only(bench):
    found = found_in(bench, {**HELPERS, **DEEP, **(BENCH if bench else {})})
    assert not found, "\n".join(found)


def test_no_exception_is_left_over():
    found = found_in(True, {}) + found_in(False, {})
    for module in (*DEEP, *BENCH):
        assert any(f" {module} " in each or f" {module}." in each for each in found), module


LIBRARY = {
    "torchpact": "__all__ = ['Block', 'deploy', 'models']",
    "torchpact.models": "__all__ = ['ResNet']",
    "torchpact.core.block": "class Block: ...",
    "torchpact.core.state": "",
}


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("from torchpact import Block, deploy", 0),
        ("from torchpact import models", 0),
        ("import torchpact", 0),
        ("from torchpact.models import ResNet", 0),
        ("from torchpact.core.state import State", 0),
        ("from torchpact.core import state", 0),
        ("from torchpact_recipes.zoo import load", 0),
        ("from torchpact.core.block import Block", 1),
        ("from torchpact.models import Unit", 1),
        ("from torchpact import Hidden", 1),
        ("from torchpact.engines.conv import onchip", 1),
        ("def f():\n    from torchpact.nn.resnet import ResNet", 1),
        ("import torchpact.engines.conv.onchip", 1),
        ("from torchpact.core.state import Block", 1),
    ],
)
def test_a_planted_import_is_found(source, count):
    sources = {**LIBRARY, "torchpact_recipes.planted": source}
    found = private_imports(
        sources, "torchpact_recipes", ["torchpact", "torchpact.models"], {"torchpact.core.state": "states"}
    )
    assert len(found) == count, found
