"""What a step, a head, a block and a network are, for whatever executes or prices them.

Specs are data: frozen records of tensors and settings in the field's terms. Networks produce them through
providers (:func:`register_step` and the like); engines and FLOPs read only them, never the classes of
networks.

Steps      ConvUnit, AttentionLayer, PositionwiseResidual, RecurrentCell, Opaque
Heads      ConvHead, LinearHead, RowHead, NeverHead, CriterionHead, Opaque
Parts      Projection; LayerContext is what one call of an attention layer is given
Wholes     BlockSpec, NetworkSpec
Providers  register_step, register_head, register_block, register_network; block_spec, network_spec,
           called_as_a_whole
Prices     register_price, price_of: what a step of one's own costs
Execution  register_gated, run_gated, dense_execution: how gated steps skip closed positions, or do not
"""

from torchpact.specs.attention import AttentionLayer, LayerContext, Projection
from torchpact.specs.blocks import BlockSpec, NetworkSpec
from torchpact.specs.gated import (
    dense_execution,
    gated_execution,
    has_gated_execution,
    register_gated,
    run_gated,
)
from torchpact.specs.heads import ConvHead, CriterionHead, HeadSpec, LinearHead, NeverHead, RowHead
from torchpact.specs.prices import price_of, register_price
from torchpact.specs.providers import (
    block_spec,
    called_as_a_whole,
    network_spec,
    register_block,
    register_head,
    register_network,
    register_step,
    step_spec,
)
from torchpact.specs.steps import (
    Conv,
    ConvUnit,
    Norm,
    Opaque,
    PositionwiseResidual,
    RecurrentCell,
    StepSpec,
)

__all__ = [
    "AttentionLayer",
    "BlockSpec",
    "Conv",
    "ConvHead",
    "ConvUnit",
    "CriterionHead",
    "HeadSpec",
    "LayerContext",
    "LinearHead",
    "NetworkSpec",
    "NeverHead",
    "Norm",
    "Opaque",
    "PositionwiseResidual",
    "Projection",
    "RecurrentCell",
    "RowHead",
    "StepSpec",
    "block_spec",
    "called_as_a_whole",
    "dense_execution",
    "gated_execution",
    "has_gated_execution",
    "network_spec",
    "price_of",
    "register_block",
    "register_gated",
    "register_head",
    "register_network",
    "register_price",
    "register_step",
    "run_gated",
    "step_spec",
]
