"""What help() shows of public names: their arguments, and an example that runs as a test."""

import inspect

import pytest

import torchpact as tp

CALLABLES = [name for name in tp.__all__ if callable(getattr(tp, name))]


@pytest.mark.parametrize("name", CALLABLES)
def test_public_names_say_what_they_take(name):
    thing = getattr(tp, name)
    if inspect.isclass(thing) and issubclass(thing, tuple):
        return  # each field has a docstring of its own
    own = thing.__init__ if inspect.isclass(thing) else thing
    taken = {*inspect.signature(own).parameters} - {"self", "args", "kwargs"}
    assert not taken or "Args:" in (inspect.getdoc(thing) or ""), taken


@pytest.mark.parametrize("name", [name for name in CALLABLES if not inspect.isclass(getattr(tp, name))])
def test_public_functions_show_an_example(name):
    assert ">>>" in (inspect.getdoc(getattr(tp, name)) or "")
