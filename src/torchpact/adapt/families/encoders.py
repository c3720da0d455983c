"""Encoders of text: BERT and its relatives, ModernBERT, XLNet, and ALBERT, whose layers share weights."""

from typing import Any

from torchpact.adapt.families import attention_specs as specs
from torchpact.adapt.families.registry import Family, Steps, register_family


def _of_config(layer: Any) -> int:
    """Return the width of a layer by its attention, which keeps the configuration in these classes."""
    width: int = layer.attention.self.config.hidden_size
    return width


def _albert_steps(transformer: Any) -> Steps:
    """Return the layers that an ``AlbertTransformer`` calls: groups of layers, each repeated."""
    config, groups = transformer.config, transformer.albert_layer_groups
    steps: Steps = []
    for call in range(config.num_hidden_layers):
        group = int(call / (config.num_hidden_layers / config.num_hidden_groups))
        layers = groups[group].albert_layers
        steps += [(f"albert_layer_groups.{group}.albert_layers.{i}", layer) for i, layer in enumerate(layers)]
    return steps


def _named(model: str, layer: str, folder: str = "") -> str:
    return f"transformers.models.{folder or model}.modeling_{model}.{layer}"


register_family(
    Family(
        "BERT",
        layers=(
            _named("bert", "BertLayer"),
            _named("roberta", "RobertaLayer"),
            _named("xlm_roberta", "XLMRobertaLayer"),
            _named("camembert", "CamembertLayer"),
            _named("electra", "ElectraLayer"),
        ),
        width=_of_config,
        normalize=False,  # a norm ends each layer
        spec=specs.bert_layer,
    )
)
register_family(
    Family(
        "DistilBERT",
        layers=(_named("distilbert", "TransformerBlock"),),
        width=lambda layer: int(layer.output_layer_norm.normalized_shape[0]),
        normalize=False,
        spec=specs.distilbert_layer,
    )
)
register_family(
    Family(
        "ALBERT",
        layers=(_named("albert", "AlbertLayer"),),
        width=lambda layer: int(layer.full_layer_layer_norm.normalized_shape[0]),
        normalize=False,
        spec=specs.albert_layer,
        owners=(_named("albert", "AlbertTransformer"),),
        sequence=_albert_steps,
    )
)
register_family(
    Family(
        "ModernBERT",
        layers=(_named("modernbert", "ModernBertEncoderLayer"),),
        width=lambda layer: int(layer.mlp_norm.normalized_shape[0]),
        spec=specs.modernbert_layer,
    )
)
register_family(
    Family(
        "XLNet",
        layers=(_named("xlnet", "XLNetLayer"),),
        width=lambda layer: int(layer.ff.layer_norm.normalized_shape[0]),
        per=("token",),  # it may run with the states of earlier tokens
        normalize=False,
        causal=True,
        batch_dim=lambda _: 1,
    )
)
