"""Decoders of text, which run with a cache of keys and values, and so decide for tokens only."""

from typing import Any

from torchpact.adapt.families import attention_specs as specs
from torchpact.adapt.families.registry import Family, register_family

_LLAMA_LIKE = {
    "llama": "LlamaDecoderLayer",
    "mistral": "MistralDecoderLayer",
    "qwen2": "Qwen2DecoderLayer",
    "qwen3": "Qwen3DecoderLayer",
}
_OTHERS = {"phi3": "Phi3DecoderLayer", "olmo2": "Olmo2DecoderLayer", "smollm3": "SmolLM3DecoderLayer"}
"""Decoders whose layers differ from Llama's in a way that engines do not know."""


def _by_mlp(layer: Any) -> int:
    width: int = layer.mlp.down_proj.out_features
    return width


def _named(classes: dict[str, str]) -> tuple[str, ...]:
    return tuple(f"transformers.models.{model}.modeling_{model}.{name}" for model, name in classes.items())


register_family(
    Family(
        "Llama",
        layers=_named(_LLAMA_LIKE),
        width=_by_mlp,
        per=("token",),
        causal=True,
        spec=specs.llama_layer,
    )
)
register_family(Family("decoder", layers=_named(_OTHERS), width=_by_mlp, per=("token",), causal=True))
register_family(
    Family(
        "GPT-2",
        layers=("transformers.models.gpt2.modeling_gpt2.GPT2Block",),
        width=lambda layer: int(layer.ln_1.normalized_shape[0]),
        per=("token",),
        causal=True,
        spec=specs.gpt2_layer,
    )
)
