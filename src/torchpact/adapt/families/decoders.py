"""Decoders of text, which run with a cache of keys and values, and so decide for tokens only."""

from typing import Any

from torchpact.adapt.families.registry import Family, register_family

_LLAMA_LIKE = {
    "llama": "LlamaDecoderLayer",
    "mistral": "MistralDecoderLayer",
    "qwen2": "Qwen2DecoderLayer",
    "qwen3": "Qwen3DecoderLayer",
    "phi3": "Phi3DecoderLayer",
    "olmo2": "Olmo2DecoderLayer",
    "smollm3": "SmolLM3DecoderLayer",
}


def _by_mlp(layer: Any) -> int:
    width: int = layer.mlp.down_proj.out_features
    return width


register_family(
    Family(
        "Llama",
        layers=tuple(
            f"transformers.models.{model}.modeling_{model}.{name}" for model, name in _LLAMA_LIKE.items()
        ),
        width=_by_mlp,
        per=("token",),
        causal=True,
    )
)
register_family(
    Family(
        "GPT-2",
        layers=("transformers.models.gpt2.modeling_gpt2.GPT2Block",),
        width=lambda layer: int(layer.ln_1.normalized_shape[0]),
        per=("token",),
        causal=True,
    )
)
