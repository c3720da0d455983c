"""The library beside torch and safetensors alone."""

import json
import re

import torchpact as tp
from tests.packaging.conftest import ROOT

MISSING = ["numpy", "PIL", "typer", "rich", "matplotlib", "torchpact_recipes", "hypothesis", "pytest"]


def test_nothing_else_can_be_imported(alone):
    """Or the tests below would say little."""
    source = f"""
import importlib.util, torch, safetensors, torchpact
assert "installed" in torchpact.__file__, torchpact.__file__
print([name for name in {MISSING} if importlib.util.find_spec(name)])
"""
    done = alone("-c", source)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[]\n"


def test_the_first_example_of_the_readme_runs(alone):
    example = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert example is not None
    assert "tp.deploy" in example[1]
    done = alone("-c", example[1] + "\nassert ponder.steps.shape == (32, 1), ponder.steps.shape\n")
    assert done.returncode == 0, done.stderr


def test_importing_it_imports_no_compiler_and_no_package_but_torch(alone):
    source = """
import sys, json, torch
before = set(sys.modules)
import torchpact
print(json.dumps(sorted(set(sys.modules) - before)))
"""
    done = alone("-c", source)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert "torchpact.engines.deploy" in found
    compilers = r"(triton|cuda|torch\._dynamo|torch\._inductor|torch\.utils\.cpp_extension|torch\.onnx)\b"
    assert not [name for name in found if re.match(compilers, name)]
    tops = {name.split(".")[0] for name in found}
    assert not tops & {*MISSING, "safetensors", "subprocess", "sympy", "networkx"}


def test_without_the_packages_of_the_command_line_a_line_says_what_to_install(alone):
    for arguments in ((), ("--version",), ("demo",)):
        done = alone("-m", "torchpact", *arguments)
        assert done.returncode == 2
        assert done.stdout == ""
        assert done.stderr == (
            "torchpact: expected the packages of the command line to be installed: "
            "pip install 'torchpact[cli]'\n"
        )


def test_without_recipes_the_command_line_says_so_in_a_line(with_cli):
    done = with_cli("-m", "torchpact")
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(
        r"torchpact: expected a distribution with commands, found none: pip install torchpact-recipes .*\n",
        done.stderr,
    )
    done = with_cli("-m", "torchpact", "demo")
    assert done.returncode == 2
    assert re.fullmatch(r"torchpact: .*demo.*\n", done.stderr), done.stderr
    done = with_cli("-m", "torchpact", "--version")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"torchpact {tp.__version__}, torch ")


def test_without_weights_a_line_says_what_to_install(alone):
    source = """
import torchpact as tp
calls = {
    "zoo": lambda: tp.models.zoo,
    "import": lambda: exec("from torchpact.models import zoo"),
    "pretrained": lambda: tp.models.psact_resnet32(pretrained="tau0.01"),
    "plain": lambda: tp.models.resnet110(pretrained="plain"),
}
for name, call in calls.items():
    try:
        call()
    except ModuleNotFoundError as error:
        print(error)
"""
    done = alone("-c", source)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 4
    for line in lines:
        assert line.startswith(
            "expected pretrained weights to be installed, found none: pip install torchpact-recipes"
        )
