"""Vision transformers of transformers and timm."""

from typing import Any

from torchpact.adapt.families import vision_specs as specs
from torchpact.adapt.families.registry import Family, register_family


def _by_norm(*names: str) -> Any:
    def width(layer: Any) -> int:
        found = next(getattr(layer, name) for name in names if hasattr(layer, name))
        return int(found.normalized_shape[0])

    return width


register_family(
    Family(
        "ViT",
        layers=(
            "transformers.models.vit.modeling_vit.ViTLayer",
            "transformers.models.deit.modeling_deit.DeiTLayer",
        ),
        width=_by_norm("layernorm_before"),
        spec=specs.vit_layer,
    )
)
register_family(
    Family(
        "ViT",
        layers=("transformers.models.dinov2.modeling_dinov2.Dinov2Layer",),
        width=_by_norm("norm1"),
        spec=specs.dinov2_layer,
    )
)
register_family(
    Family(
        "ViT",
        layers=("timm.models.vision_transformer.Block",),
        width=_by_norm("norm1"),
        spec=specs.timm_layer,
    )
)
