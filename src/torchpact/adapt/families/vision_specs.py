"""Specs of the layers of known vision transformers, read from their attributes."""

from typing import Any

from torch import nn

from torchpact.adapt.families.attention_specs import check_parts, hugging_face_call, linear
from torchpact.core.call_args import CallArgs
from torchpact.specs import AttentionLayer, LayerContext


def vit_layer(layer: Any) -> AttentionLayer:
    """Return what a layer of ViT or DeiT of transformers is."""
    attention = layer.attention
    return AttentionLayer(
        norm1=layer.layernorm_before,
        norm2=layer.layernorm_after,
        query=linear(attention.q_proj),
        key=linear(attention.k_proj),
        value=linear(attention.v_proj),
        out=linear(attention.o_proj),
        up=linear(layer.mlp.fc1),
        down=linear(layer.mlp.fc2),
        activation=layer.mlp.activation_fn,
        heads=attention.num_attention_heads,
        head_size=attention.head_dim,
        scale=attention.scaling,
        read_call=hugging_face_call(layer),
    )


def dinov2_layer(layer: Any) -> AttentionLayer:
    """Return what a layer of DINOv2 is, whose residuals are scaled."""
    attention, mlp = layer.attention, layer.mlp
    gated = hasattr(mlp, "gate_proj")
    return AttentionLayer(
        norm1=layer.norm1,
        norm2=layer.norm2,
        query=linear(attention.q_proj),
        key=linear(attention.k_proj),
        value=linear(attention.v_proj),
        out=linear(attention.o_proj),
        gate=linear(mlp.gate_proj) if gated else None,
        up=linear(mlp.up_proj if gated else mlp.fc1),
        down=linear(mlp.down_proj if gated else mlp.fc2),
        activation=mlp.act_fn if gated else mlp.activation_fn,
        heads=attention.num_attention_heads,
        head_size=attention.head_dim,
        scale=attention.scaling,
        scale1=layer.layer_scale1.lambda1,
        scale2=layer.layer_scale2.lambda1,
        read_call=hugging_face_call(layer),
    )


def timm_layer(layer: Any) -> AttentionLayer:
    """Return what a ``Block`` of timm's vision transformers is, in its plain form."""
    check_parts(layer, "timm")
    attention, mlp = layer.attn, layer.mlp
    plain = type(attention).__name__ == "Attention" and type(mlp).__name__ == "Mlp"
    more = _norm(getattr(attention, "norm", None)), _norm(mlp.norm) if plain else None
    if not plain or getattr(attention, "gate", None) is not None or more != (None, None):
        raise ValueError("expected it to have timm's Attention and Mlp, without norms inside or gates")
    return AttentionLayer(
        norm1=layer.norm1,
        norm2=layer.norm2,
        qkv=linear(attention.qkv),
        out=linear(attention.proj),
        up=linear(mlp.fc1),
        down=linear(mlp.fc2),
        activation=mlp.act,
        heads=attention.num_heads,
        scale=attention.scale,
        q_norm=_norm(attention.q_norm),
        k_norm=_norm(attention.k_norm),
        scale1=getattr(layer.ls1, "gamma", None),
        scale2=getattr(layer.ls2, "gamma", None),
        read_call=timm_call,
    )


def timm_call(call: CallArgs) -> LayerContext | None:
    """Return what a call of a block of timm is given; None of one with a mask."""
    given = {**dict(zip(["x", "attn_mask", "is_causal"], call.args, strict=False)), **call.kwargs}
    masked = given.get("attn_mask") is not None or given.get("is_causal")
    return None if masked else LayerContext()


def _norm(module: nn.Module | None) -> nn.Module | None:
    return None if isinstance(module, nn.Identity) else module
