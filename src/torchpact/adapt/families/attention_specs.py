"""Specs of the layers of known transformers, read from their attributes."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from torchpact.core.call_args import CallArgs
from torchpact.specs import AttentionLayer, LayerContext, Projection

ReadCall = Callable[[CallArgs], LayerContext | None]

_SOFTMAX_ATTENTION = {None, "eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention"}
"""Implementations of attention in transformers that compute the same; users may register others."""


def linear(layer: Any) -> Projection:
    """Return the projection of a linear layer.

    Raises:
        TypeError: It is no plain one: it was quantised, or has an adapter.

    """
    if type(layer) is not nn.Linear:
        kind = f"{type(layer).__module__}.{type(layer).__qualname__}"
        raise TypeError(f"expected it to have plain linear layers, got a {kind}")
    return Projection.of(layer)


def transposed(layer: Any) -> Projection:
    """Return the projection of a layer whose weight is (inputs, outputs), as GPT-2's are.

    Raises:
        TypeError: It is no plain one.

    """
    if type(layer).__name__ != "Conv1D":
        raise TypeError(f"expected it to have layers of the kind Conv1D, got a {type(layer).__name__}")
    return Projection(layer.weight.t(), layer.bias)


def bert_layer(layer: Any) -> AttentionLayer:
    """Return what a layer of BERT is, and of its relatives with the same parts."""
    if getattr(layer, "add_cross_attention", False):
        raise ValueError("expected it to have no cross-attention")
    attention, after = layer.attention.self, layer.attention.output
    return AttentionLayer(
        norm1=after.LayerNorm,
        norm2=layer.output.LayerNorm,
        query=linear(attention.query),
        key=linear(attention.key),
        value=linear(attention.value),
        out=linear(after.dense),
        up=linear(layer.intermediate.dense),
        down=linear(layer.output.dense),
        activation=layer.intermediate.intermediate_act_fn,
        heads=attention.num_attention_heads,
        causal=bool(layer.is_decoder),
        order="post",
        index=attention.layer_idx or 0,
        read_call=hugging_face_call(layer, attention.layer_idx),
    )


def distilbert_layer(layer: Any) -> AttentionLayer:
    """Return what a layer of DistilBERT is."""
    attention = layer.attention
    return AttentionLayer(
        norm1=layer.sa_layer_norm,
        norm2=layer.output_layer_norm,
        query=linear(attention.q_lin),
        key=linear(attention.k_lin),
        value=linear(attention.v_lin),
        out=linear(attention.out_lin),
        up=linear(layer.ffn.lin1),
        down=linear(layer.ffn.lin2),
        activation=layer.ffn.activation,
        heads=attention.n_heads,
        order="post",
        read_call=hugging_face_call(layer),
    )


def albert_layer(layer: Any) -> AttentionLayer:
    """Return what a layer of ALBERT is."""
    attention = layer.attention
    return AttentionLayer(
        norm1=attention.LayerNorm,
        norm2=layer.full_layer_layer_norm,
        query=linear(attention.query),
        key=linear(attention.key),
        value=linear(attention.value),
        out=linear(attention.dense),
        up=linear(layer.ffn),
        down=linear(layer.ffn_output),
        activation=layer.activation,
        heads=attention.num_attention_heads,
        order="post",
        read_call=hugging_face_call(layer),
    )


def llama_layer(layer: Any) -> AttentionLayer:
    """Return what a layer of Llama is, or of Mistral or Qwen, which may normalise queries and keys."""
    attention, mlp = layer.self_attn, layer.mlp
    keys = linear(attention.k_proj)
    return AttentionLayer(
        norm1=layer.input_layernorm,
        norm2=layer.post_attention_layernorm,
        query=linear(attention.q_proj),
        key=keys,
        value=linear(attention.v_proj),
        out=linear(attention.o_proj),
        up=linear(mlp.up_proj),
        gate=linear(mlp.gate_proj),
        down=linear(mlp.down_proj),
        activation=mlp.act_fn,
        heads=attention.q_proj.out_features // attention.head_dim,
        kv_heads=keys.outputs // attention.head_dim,
        head_size=attention.head_dim,
        scale=attention.scaling,
        q_norm=getattr(attention, "q_norm", None),
        k_norm=getattr(attention, "k_norm", None),
        rotary=True,
        causal=True,
        window=getattr(attention, "sliding_window", None),
        index=attention.layer_idx,
        read_call=hugging_face_call(layer, attention.layer_idx, causal=True),
    )


def gpt2_layer(layer: Any) -> AttentionLayer:
    """Return what a layer of GPT-2 is."""
    if hasattr(layer, "crossattention"):
        raise ValueError("expected it to have no cross-attention")
    attention = layer.attn
    return AttentionLayer(
        norm1=layer.ln_1,
        norm2=layer.ln_2,
        qkv=transposed(attention.c_attn),
        out=transposed(attention.c_proj),
        up=transposed(layer.mlp.c_fc),
        down=transposed(layer.mlp.c_proj),
        activation=layer.mlp.act,
        heads=attention.num_heads,
        scale=attention.scaling,
        causal=True,
        index=attention.layer_idx,
        read_call=hugging_face_call(layer, attention.layer_idx, causal=True),
    )


def modernbert_layer(layer: Any) -> AttentionLayer:
    """Return what a layer of ModernBERT is; masks tell of its windows."""
    attention, mlp, qkv = layer.attn, layer.mlp, linear(layer.attn.Wqkv)
    both, down = linear(mlp.Wi), linear(mlp.Wo)
    return AttentionLayer(
        norm1=layer.attn_norm,
        norm2=layer.mlp_norm,
        qkv=qkv,
        out=linear(attention.Wo),
        gate=both.rows(0, down.inputs),
        up=both.rows(down.inputs, both.outputs),
        down=down,
        activation=mlp.act,
        heads=qkv.outputs // (3 * attention.head_dim),
        head_size=attention.head_dim,
        rotary=True,
        index=attention.layer_idx or 0,
        read_call=hugging_face_call(layer),
    )


def whisper_layer(layer: Any) -> AttentionLayer:
    """Return what a layer of Whisper's encoder is."""
    attention = layer.self_attn
    if attention.q_proj.weight.dtype == torch.float16:
        raise ValueError("expected it in another precision than float16, in which it clamps its outputs")
    return AttentionLayer(
        norm1=layer.self_attn_layer_norm,
        norm2=layer.final_layer_norm,
        query=linear(attention.q_proj),
        key=linear(attention.k_proj),
        value=linear(attention.v_proj),
        out=linear(attention.out_proj),
        up=linear(layer.fc1),
        down=linear(layer.fc2),
        activation=layer.activation_fn,
        heads=attention.num_heads,
        scale=attention.scaling,
        read_call=hugging_face_call(layer),
    )


def torch_layer(layer: Any) -> AttentionLayer:
    """Return what an ``nn.TransformerEncoderLayer`` is, batch first."""
    check_parts(layer, "torch")
    own = layer.self_attn
    if not own.batch_first or own.in_proj_weight is None:
        raise ValueError("expected it to have batch_first=True and keys as wide as queries")
    return AttentionLayer(
        norm1=layer.norm1,
        norm2=layer.norm2,
        qkv=Projection(own.in_proj_weight, own.in_proj_bias),
        out=Projection(own.out_proj.weight, own.out_proj.bias),
        up=linear(layer.linear1),
        down=linear(layer.linear2),
        activation=layer.activation,
        heads=own.num_heads,
        order="pre" if layer.norm_first else "post",
        read_call=torch_call,
    )


def check_parts(layer: nn.Module, package: str) -> None:
    """Refuse a layer one of whose parts has the forward of another package, which a spec would not know.

    Linear layers are checked by :func:`linear`; norms and activations are called as they are.

    Args:
        layer: The layer.
        package: Where the classes of its parts are, such as "transformers".

    Raises:
        ValueError: A part is of another package, or attends by a function of the user's own.

    """
    for part in layer.modules():
        kind = type(part)
        origin = inspect.unwrap(kind.forward).__module__.partition(".")[0]
        if part is not layer and origin not in (package, "torch") and any(True for _ in part.children()):
            raise ValueError(f"expected it to have the parts of {package}, got a {kind.__name__} of {origin}")
        attends_by = getattr(getattr(part, "config", None), "_attn_implementation", None)
        if attends_by not in _SOFTMAX_ATTENTION:
            raise ValueError(f"expected it to attend as sdpa does, got the implementation {attends_by!r:.40}")


def hugging_face_call(layer: nn.Module, index: int | None = None, causal: bool = False) -> ReadCall:
    """Return what reads the calls of a layer, by the names that transformers gives to arguments.

    Args:
        layer: The layer.
        index: Its number, by which it finds its keys and values in a cache; None where it has none.
        causal: Whether tokens see only those before them where there is no mask.

    Raises:
        ValueError: A part of the layer is not of transformers.

    """
    check_parts(layer, "transformers")
    names = [*inspect.signature(inspect.unwrap(type(layer).forward)).parameters][1:]
    return partial(_read_hugging_face, names, index, causal)


def _read_hugging_face(
    names: list[str], index: int | None, causal: bool, call: CallArgs
) -> LayerContext | None:
    given = {**dict(zip(names, call.args, strict=False)), **call.kwargs}
    mask, cache = given.get("attention_mask"), given.get("past_key_values")
    if given.get("output_attentions") or given.get("encoder_hidden_states") is not None:
        return None
    if mask is not None and not (isinstance(mask, Tensor) and mask.dim() == 4):
        return None
    update = None
    if cache is not None:
        if index is None or not hasattr(cache, "update") or hasattr(cache, "cross_attention_cache"):
            return None
        update = partial(_updated, cache, index, causal and mask is None)
    return LayerContext(mask, causal and mask is None, given.get("position_embeddings"), update)


def _updated(
    cache: Any, index: int, without_mask: bool, keys: Tensor, values: Tensor
) -> tuple[Tensor, Tensor]:
    """Write to a cache, and return what tokens attend to."""
    length = keys.size(2)
    keys, values = cache.update(keys, values, index)
    if without_mask and length > 1:
        # transformers leaves out the mask of several tokens only where they begin a sequence; a static cache
        # returns places that are yet to be written, too
        return keys[:, :, :length], values[:, :, :length]
    return keys, values


def torch_call(call: CallArgs) -> LayerContext | None:
    """Return what a call of an ``nn.TransformerEncoderLayer`` is given; None of one with a mask of pairs."""
    names = ["src", "src_mask", "src_key_padding_mask", "is_causal"]
    given = {**dict(zip(names, call.args, strict=False)), **call.kwargs}
    if given.get("src_mask") is not None or given.get("is_causal"):
        return None
    padding = given.get("src_key_padding_mask")
    if padding is None:
        return LayerContext()
    # torch turns booleans into what is added to scores before it calls a layer
    return LayerContext((padding if padding.is_floating_point() else ~padding)[:, None, None, :])
