"""What every docstring example may use without importing it."""

import importlib.util
import os
from typing import Any

import pytest
import torch
from hypothesis import settings
from torch import nn

# before Triton is imported: without a GPU, its kernels run in its interpreter
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import torchpact as tp

# the first call of a torch function may load a library: a deadline would blame the example
settings.register_profile("torchpact", deadline=None)
settings.load_profile("torchpact")

collect_ignore_glob = (
    [] if importlib.util.find_spec("triton") else ["**/narrow_conv.py", "**/*gpu_kernels.py"]
)
if not importlib.util.find_spec("huggingface_hub"):
    collect_ignore_glob.append("**/models/hub.py")

# the workers share the cores already, and small tensors are slower on two
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _example_names(doctest_namespace: dict[str, Any]) -> None:
    doctest_namespace.update(tp=tp, torch=torch, nn=nn)
    torch.manual_seed(0)
