"""Engines: how the active positions of a block get computed. Modes decide, engines execute.

Deploy a network     deploy, Deployed, Report
Looped networks      stream
The contract         Engine, Runner, NetworkRunner, Unsupported
The table            ENGINES, register_engine
"""

from torchpact.engines.attention import rows  # noqa: F401 (registers how attention skips halted tokens)
from torchpact.engines.attention.engine import AttentionEngine
from torchpact.engines.base import Engine, NetworkRunner, Runner, Unsupported
from torchpact.engines.conv.native.engine import NATIVE
from torchpact.engines.conv.onchip import ONCHIP
from torchpact.engines.conv.sparse import SPARSE
from torchpact.engines.conv.triton.engine import GPU
from torchpact.engines.deploy import deploy
from torchpact.engines.deployed import Deployed
from torchpact.engines.generic import positionwise  # noqa: F401 (and how residual steps by position do)
from torchpact.engines.generic.compact import Compact
from torchpact.engines.generic.compiled import COMPILED
from torchpact.engines.generic.dense import DENSE
from torchpact.engines.generic.rows import RowsEngine
from torchpact.engines.generic.stream import stream
from torchpact.engines.generic.stream_engine import StreamEngine
from torchpact.engines.recurrent.compact import CompactRecurrent
from torchpact.engines.recurrent.gpu import GPURecurrent
from torchpact.engines.recurrent.native import NativeRecurrent
from torchpact.engines.registry import ENGINES, register_engine
from torchpact.engines.report import Report

for _engine in (
    DENSE,
    Compact(),
    StreamEngine(),
    RowsEngine(),
    AttentionEngine(),
    SPARSE,
    NATIVE,
    GPU,
    ONCHIP,
    NativeRecurrent(),
    GPURecurrent(),
    CompactRecurrent(),
    COMPILED,
):
    register_engine(_engine)

__all__ = [
    "ENGINES",
    "Deployed",
    "Engine",
    "NetworkRunner",
    "Report",
    "Runner",
    "Unsupported",
    "deploy",
    "register_engine",
    "stream",
]
