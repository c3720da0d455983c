"""The few names of torchvision that timm's models ask for: timm cannot be imported without them."""

import sys
import types

import pytest


def timm_models():
    """Return ``timm.models``, by a stand-in for torchvision that is gone after the import."""
    if "timm.models" in sys.modules:
        return sys.modules["timm.models"]
    pytest.importorskip("PIL", reason="timm needs Pillow")
    before = {name for name in sys.modules if name.startswith("torchvision")}
    if not before:
        stubs = {
            "torchvision": {},
            "torchvision.ops": {},
            "torchvision.ops.misc": {"FrozenBatchNorm2d": type("FrozenBatchNorm2d", (), {})},
        }
        for name, content in stubs.items():
            module = types.ModuleType(name)
            module.__path__ = []
            vars(module).update(content)
            sys.modules[name] = module
    # timm.data is about reading images, and asks for most of torchvision
    data = types.ModuleType("timm.data")
    vars(data)["__getattr__"] = _constant
    sys.modules.setdefault("timm.data", data)
    try:
        return pytest.importorskip("timm.models", reason="timm is not installed")
    finally:
        for name in [name for name in sys.modules if name.startswith("torchvision") and name not in before]:
            del sys.modules[name]


def _constant(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return (0.5, 0.5, 0.5)
