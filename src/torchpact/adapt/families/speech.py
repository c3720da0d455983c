"""Whisper: an encoder of sound, and a decoder that also attends to what the encoder gives."""

from torchpact.adapt.families import attention_specs as specs
from torchpact.adapt.families.registry import Family, register_family

_WHISPER = "transformers.models.whisper.modeling_whisper."

register_family(
    Family(
        "Whisper's encoder",
        layers=(_WHISPER + "WhisperEncoderLayer",),
        width=lambda layer: int(layer.final_layer_norm.normalized_shape[0]),
        spec=specs.whisper_layer,
    )
)
register_family(
    Family(
        "Whisper's decoder",
        layers=(_WHISPER + "WhisperDecoderLayer",),
        width=lambda layer: int(layer.final_layer_norm.normalized_shape[0]),
        per=("token",),
        causal=True,
    )
)
