"""The layers of ``torch.nn``."""

from torchpact.adapt.families import attention_specs as specs
from torchpact.adapt.families.registry import Family, register_family

register_family(
    Family(
        "torch.nn",
        layers=("torch.nn.modules.transformer.TransformerEncoderLayer",),
        width=lambda layer: int(layer.self_attn.embed_dim),
        spec=specs.torch_layer,
        batch_dim=lambda layer: 0 if layer.self_attn.batch_first else 1,
        settings={"use_nested_tensor": False},  # only layers without hooks take nested tensors
    )
)
register_family(
    Family(
        "torch.nn's decoder",
        layers=("torch.nn.modules.transformer.TransformerDecoderLayer",),
        width=lambda layer: int(layer.self_attn.embed_dim),
        batch_dim=lambda layer: 0 if layer.self_attn.batch_first else 1,
    )
)
