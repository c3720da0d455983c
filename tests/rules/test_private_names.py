"""No private name crosses a module of ours, none of them is imported by a call, no class is swapped."""

from pathlib import Path

import pytest

from tests.rules.checker import FOREIGN, class_assignments, dynamic_imports, private_names, read_sources

SOURCES = read_sources(Path(__file__).parents[2] / "src")


def test_the_rules_look_at_all_of_the_source():
    assert {"torchpact", "torchpact.core.loop", "torchpact.engines.base", "torchpact_recipes.zoo"} <= set(
        SOURCES
    )


@pytest.mark.parametrize("rule", [private_names, dynamic_imports, class_assignments])
def test_the_source_keeps_the_rule(rule):
    found = rule(SOURCES)
    assert not found, "\n".join(found)


OWNER = """
from typing import NamedTuple

def _function(): ...

class Thing:
    _shared = 1
    def __init__(self):
        self._own = self._shared + _function()

_TABLE = {}
"""

PLANTED = {
    "a name": "from torchpact.owner import _function",
    "one among others": "from torchpact.owner import (\n    Thing,\n    _TABLE as table,\n)",
    "in a function": "def f():\n    from torchpact.owner import _function\n    return _function",
    "relatively": "from .owner import _function",
    "of a module": "from torchpact import owner\nowner._function()",
    "of a module by its full name": "import torchpact.owner\ntorchpact.owner._TABLE[0] = 1",
    "of an object": "def f(thing):\n    return thing._own",
    "written": "def f(thing):\n    thing._own = 2",
    "of a base class": "class Other(Thing):\n    def f(self):\n        return self._own",
    "of a class": "from torchpact.owner import Thing\nThing._shared",
    "by getattr": "def f(thing):\n    return getattr(thing, '_own', None)",
    "by setattr": "def f(thing):\n    setattr(thing, '_own', 1)",
    "a private module of another package": "from torchpact.svo._evaluate import evaluate",
    "such a module itself": "import torchpact.svo._evaluate",
    "a private name of torch that is not listed": "import torch\ntorch._weight_norm(v, g)",
}


@pytest.mark.parametrize("source", PLANTED.values(), ids=PLANTED)
def test_a_planted_private_name_is_found(source):
    found = private_names({"torchpact.owner": OWNER, "torchpact.planted": source})
    assert len(found) == 1, found
    assert found[0].startswith("torchpact.planted:")


@pytest.mark.parametrize(
    "source",
    [
        "from torchpact.owner import Thing as _Thing\n_Thing()",
        "from torchpact.core import state as _state\n_state.parts",
        "class Own:\n    def __init__(self):\n        self._own = 1\ndef f(own):\n    return own._own",
        "def f(point):\n    return point._replace(x=1), point.__dict__",
        "for _ in range(3):\n    pass",
        "import torch\ntorch._C",
    ],
)
def test_what_is_allowed_is_not_found(source):
    assert not private_names({"torchpact.owner": OWNER, "torchpact.fine": source})


def test_every_listed_name_of_others_is_used():
    found = "\n".join(private_names(SOURCES, foreign={}))
    assert all(f" {name} " in found or name in ("_apply", "_fields", "_asdict") for name in FOREIGN)


def test_a_private_module_serves_its_own_package():
    sources = {
        "torchpact.svo._evaluate": "",
        "torchpact.svo.one": "from torchpact.svo._evaluate import evaluate",
    }
    assert not private_names(sources)
    sources["torchpact.svo.deep.one"] = "from torchpact.svo._evaluate import evaluate"
    assert not private_names(sources)
    sources["torchpact.svo.one"] = "from torchpact.svo._evaluate import _inner"
    assert private_names(sources) == ["torchpact.svo.one:1: torchpact.svo._evaluate._inner is imported"]


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("import importlib\nimportlib.import_module('torchpact.zoo')", 1),
        ("from importlib import import_module\nimport_module(name)", 1),
        ("from importlib import import_module\nimport_module('.x', __package__)", 1),
        ("__import__('torchpact_recipes')", 1),
        ("import importlib.util\nimportlib.util.find_spec('triton')", 0),
        ("import importlib\nimportlib.import_module('torch.distributed.nn.functional')", 0),
    ],
)
def test_a_planted_dynamic_import_is_found(source, count):
    assert len(dynamic_imports({"torchpact.planted": source})) == count


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("x.__class__ = Other", 1),
        ("x.__class__, y = Other, 1", 1),
        ("setattr(x, '__class__', Other)", 1),
        ("object.__setattr__(x, '__class__', Other)", 1),
        ("x.__class__.__name__", 0),
        ("self.__class__.__new__(self.__class__)", 0),
    ],
)
def test_a_planted_swap_of_a_class_is_found(source, count):
    assert len(class_assignments({"torchpact.planted": source})) == count
