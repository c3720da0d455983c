"""Engines: how the active positions of a block get computed. Modes decide, engines execute.

Deploy a network     deploy, Report; Deployed, DeployedNetwork (one of your own), DeployedBlock
Its engines          ENGINES: dense, compact, sparse, native, gpu, onchip, compiled; for a block, a Runner
Whole networks       NETWORK_ENGINES: onchip; for engines that do not go block by block
On a GPU             graphs: blocks run in CUDA graphs, one for each size of the images
Any block            CompactBlock: halted examples leave the batch
"""

from torchpact.engines.attention import rows  # noqa: F401 (registers how attention skips halted tokens)
from torchpact.engines.block_spec import FoldedBlock, Runner, Unsupported
from torchpact.engines.deployed import Deployed, DeployedBlock
from torchpact.engines.deployment import deploy
from torchpact.engines.generic import positionwise  # noqa: F401 (likewise of residual steps by position)
from torchpact.engines.generic.compact import CompactBlock
from torchpact.engines.own import DeployedNetwork
from torchpact.engines.registry import ENGINES, NETWORK_ENGINES
from torchpact.engines.report import Report

__all__ = [
    "ENGINES",
    "NETWORK_ENGINES",
    "CompactBlock",
    "Deployed",
    "DeployedBlock",
    "DeployedNetwork",
    "FoldedBlock",
    "Report",
    "Runner",
    "Unsupported",
    "deploy",
]
