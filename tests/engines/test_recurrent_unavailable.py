"""Where no kernel can be compiled or loaded, the recurrent engine says why in one line, and layers run."""

import pytest
import torch
from torch import nn

import torchpact as tp
from torchpact.core.call_args import CallArgs
from torchpact.engines import cpp_build
from torchpact.engines.base import Unsupported
from torchpact.engines.recurrent import native
from torchpact.specs import block_spec

ENGINE = native.NativeRecurrent()


def layer_and_call():
    torch.manual_seed(0)
    rnn = tp.AdaptiveRNN(nn.LSTMCell(4, 5), max_steps=3, mode="thresholded", halting_bias=0.0)
    return rnn, CallArgs((torch.randn(4, 3, 3),))


@pytest.fixture
def reason(monkeypatch, capfd, recwarn):
    """Return why there is no kernel; nothing is loaded or printed, and no one is warned."""

    def why():
        rnn, call = layer_and_call()
        found = ENGINE.supports(block_spec(rnn), call)
        with pytest.raises(Unsupported) as error:
            ENGINE.build(block_spec(rnn), call)
        assert str(error.value) == found
        with torch.no_grad():
            rnn(*call.args)
        assert not recwarn.list
        assert capfd.readouterr() == ("", "")
        return found

    native.library.cache_clear()
    monkeypatch.setattr("ctypes.CDLL", lambda *_: pytest.fail("a kernel was loaded"))
    yield why
    native.library.cache_clear()


def test_an_environment_variable_forbids_the_compiler(monkeypatch, reason):
    monkeypatch.setattr("subprocess.Popen", lambda *_, **__: pytest.fail("a compiler ran"))
    monkeypatch.setenv("TORCHPACT_NATIVE", "0")
    assert reason() == "no compiled kernels, as TORCHPACT_NATIVE=0 asks"
    with pytest.raises(Unsupported, match=r"^no compiled kernels, as TORCHPACT_NATIVE=0 asks$"):
        native.library()


def test_the_environment_variable_is_heeded_after_a_kernel_was_loaded_too(monkeypatch):
    rnn, call = layer_and_call()
    before = ENGINE.supports(block_spec(rnn), call)
    monkeypatch.setenv("TORCHPACT_NATIVE", "0")
    assert ENGINE.supports(block_spec(rnn), call) == "no compiled kernels, as TORCHPACT_NATIVE=0 asks"
    monkeypatch.delenv("TORCHPACT_NATIVE")
    assert ENGINE.supports(block_spec(rnn), call) == before


def test_without_a_compiler(monkeypatch, reason, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert reason() == "expected a C++ compiler (c++, g++, clang++ or $CXX), found none"


def test_with_a_compiler_that_fails(monkeypatch, reason, tmp_path):
    (tmp_path / "c++").write_text("#!/bin/sh\necho broken >&2\nexit 1\n")
    (tmp_path / "c++").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    monkeypatch.delenv("CXX", raising=False)
    assert reason() == "c++ failed (broken)"


def test_with_a_library_that_cannot_be_loaded(monkeypatch, reason, tmp_path):
    def broken(path):
        raise OSError(f"{path}: wrong\nformat")

    monkeypatch.setattr("ctypes.CDLL", broken)
    monkeypatch.setattr(cpp_build, "build_library", lambda source: tmp_path / "a.so")
    assert reason() == f"no library ({tmp_path}/a.so: wrong format)"
