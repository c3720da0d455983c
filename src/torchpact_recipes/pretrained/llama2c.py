"""The files of llama2.c: a header of seven integers, weights in single precision, then a tokenizer.

The order of the weights is that of llama2.c's ``checkpoint_init_weights``. There queries and keys of a head
are rotated in neighbouring pairs, in ``LlamaForCausalLM`` in halves, so that their rows have to be permuted.
"""

import math
import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchpact_recipes.data.files import DataError

HEADER = struct.Struct("<7i")


class Header(NamedTuple):
    """What a file says of its network, in the order in which it says so."""

    width: int
    hidden: int
    layers: int
    heads: int
    key_heads: int
    words: int
    """Negative where the read-out has weights of its own."""
    length: int


def read_network(data: bytes) -> tuple[Header, dict[str, Tensor], bytes]:
    """Return the header of a file, its weights by the names of ``LlamaForCausalLM``, and what follows them.

    Args:
        data: The file.

    Raises:
        DataError: It is no file of llama2.c, or is cut off.

    """
    if len(data) < HEADER.size:
        raise DataError(f"expected a file of llama2.c, got {len(data)} bytes")
    header = Header(*HEADER.unpack_from(data))
    if min(header._replace(words=abs(header.words))) < 1 or header.width % header.heads:
        raise DataError(f"expected a header of llama2.c, got {tuple(header)}")
    place, weights = HEADER.size, {}
    for name, shape in _shapes(header):
        count = math.prod(shape)
        if place + 4 * count > len(data):
            raise DataError(f"expected a file of llama2.c with {name}, got one that ends before")
        # a copy: the buffer of bytes cannot be written to
        weights[name] = torch.frombuffer(bytearray(data[place : place + 4 * count]), dtype=torch.float32)
        weights[name] = weights[name].view(shape)
        place += 4 * count
    return header, dict(_by_layer(header, weights)), data[place:]


def _shapes(h: Header) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the tensors of a file in order; those with a leading dimension of layers are called ``*``."""
    keys, head = h.width // h.heads * h.key_heads, h.width // h.heads
    yield "model.embed_tokens.weight", (abs(h.words), h.width)
    yield "*.input_layernorm.weight", (h.layers, h.width)
    yield "*.self_attn.q_proj.weight", (h.layers, h.width, h.width)
    yield "*.self_attn.k_proj.weight", (h.layers, keys, h.width)
    yield "*.self_attn.v_proj.weight", (h.layers, keys, h.width)
    yield "*.self_attn.o_proj.weight", (h.layers, h.width, h.width)
    yield "*.post_attention_layernorm.weight", (h.layers, h.width)
    yield "*.mlp.gate_proj.weight", (h.layers, h.hidden, h.width)
    yield "*.mlp.down_proj.weight", (h.layers, h.width, h.hidden)
    yield "*.mlp.up_proj.weight", (h.layers, h.hidden, h.width)
    yield "model.norm.weight", (h.width,)
    yield "cosines", (h.length, head // 2)
    yield "sines", (h.length, head // 2)
    if h.words < 0:
        yield "lm_head.weight", (-h.words, h.width)


def _by_layer(h: Header, weights: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in weights.items():
        if name.startswith("*"):
            for layer in range(h.layers):
                weight = tensor[layer]
                if "q_proj" in name or "k_proj" in name:
                    weight = halves(weight, h.width // h.heads)
                yield name.replace("*", f"model.layers.{layer}"), weight
        elif name not in ("cosines", "sines"):
            yield name, tensor
    if h.words > 0:
        yield "lm_head.weight", weights["model.embed_tokens.weight"]


def halves(weight: Tensor, head: int) -> Tensor:
    """Return the rows of each head in another order: those of even places, then those of odd ones.

    >>> halves(torch.arange(8).view(8, 1), 4).flatten().tolist()
    [0, 2, 1, 3, 4, 6, 5, 7]
    """
    return weight.view(-1, head // 2, 2, weight.size(1)).transpose(1, 2).reshape(weight.shape)


def read_words(data: bytes, count: int) -> list[tuple[str, float]]:
    """Return the words of the tokenizer after a network, with the scores by which pairs are merged.

    Args:
        data: What follows the weights.
        count: How many words there are.

    Raises:
        DataError: They are not there.

    """
    words, place = [], 4  # after the length of the longest
    try:
        for _ in range(count):
            score, size = struct.unpack_from("<fi", data, place)
            place += 8
            if not 0 <= size <= len(data) - place:
                raise ValueError
            words.append((data[place : place + size].decode(), score))
            place += size
    except (struct.error, ValueError):
        raise DataError(f"expected {count} words after the weights, got {len(words)}") from None
    return words


def make_tokenizer(words: list[tuple[str, float]], length: int) -> Any:
    """Return a tokenizer of transformers, of byte pairs that are merged in the order of their scores.

    Args:
        words: The words, in the order of their numbers: <unk>, <s>, </s>, 256 bytes, and the others.
        length: How many tokens the network takes.

    """
    from tokenizers import Tokenizer, decoders, models, normalizers, processors
    from transformers import PreTrainedTokenizerFast

    names = ["<unk>", "<s>", "</s>", *(word.replace(" ", "▁") for word, _ in words[3:])]
    numbers = {name: number for number, name in enumerate(names)}
    merges = [
        (score, (name[:cut], name[cut:]))
        for name, (_, score) in zip(names, words, strict=True)
        for cut in range(1, len(name))
        if name[:cut] in numbers and name[cut:] in numbers and not name.startswith("<")
    ]
    merges.sort(key=lambda each: -each[0])
    model = models.BPE(numbers, [pair for _, pair in merges], unk_token="<unk>", byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    begin = [("<s>", numbers["<s>"])]
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A <s> $B", special_tokens=begin)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    names_of = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<unk>"}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, padding_side="left", model_max_length=length, **names_of
    )
