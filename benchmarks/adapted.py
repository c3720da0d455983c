"""Adapted and deployed networks of transformers beside the originals: eager, compiled and by OpenVINO.

    python benchmarks/adapted.py [--minilm FOLDER] [--only minilm vit smollm] [--dtypes float32 bfloat16]

Whole networks, as users call them: ``tp.deploy(tp.adapt(net), batch)``. What halts is set by hand: after the
first layer a share of the positions goes on, picked by the quantile of a random projection, so that each
example keeps another number; when decoding all tokens halt after a third of the layers. MiniLM has the
weights in FOLDER if given; all else has random ones of the real size, which take as long. ``theory`` is the
ratio of the FLOPs that ``tp.count_flops`` counts, heads included; when decoding, the ratio of the bytes of
weights that have to be read. ``of_theory`` is the measured speed-up over the best of torch, divided by it.
"""

import copy
from pathlib import Path
from typing import Any

import torch
from attention_layers import Way, measured, openvino_way
from options import parser_for
from table import write_csv
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertModel,
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    ViTConfig,
    ViTModel,
)

import torchpact as tp

Row = dict[str, object]


def minilm(folder: Path | None) -> Any:
    config = BertConfig(hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536)
    torch.manual_seed(0)
    net = BertModel(config) if folder is None else BertModel.from_pretrained(folder)
    return net.eval()


def vit() -> Any:
    config = ViTConfig(hidden_size=384, num_hidden_layers=12, num_attention_heads=6, intermediate_size=1536)
    torch.manual_seed(0)
    return ViTModel(config).eval()


def smollm() -> Any:
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        intermediate_size=1536,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config).eval()


def halting_after_the_first(net: nn.Module, batch: dict[str, Any], per: Any, share: float) -> Any:
    """Return an adapted copy in which a share of the positions goes on after the first layer, to the end."""
    ada = tp.adapt(copy.deepcopy(net), per=per)
    (run,) = ada.torchpact.runs
    first, *others = run.heads
    with torch.no_grad():
        for head in others:
            head.bias.fill_(-50.0)
        first.weight.normal_()
        first.bias.zero_()
        with tp.use_thresholds(ada, tp.Thresholds("never")), tp.collect(ada) as ponders:
            ada(**batch)
        logits = torch.logit(ponders[0].probs[0].double()).flatten()
        first.bias.fill_(-float(logits.quantile(share)))
    return ada


def halting_after(net: nn.Module, layers: int) -> Any:
    """Return an adapted copy in which all positions halt after so many layers."""
    ada = tp.adapt(copy.deepcopy(net))
    for index, head in enumerate(ada.torchpact.runs[0].heads, start=1):
        nn.init.constant_(head.bias, 50.0 if index == layers else -50.0)
    return ada


def whole(
    name: str, net: nn.Module, batch: dict[str, Any], per: Any, shares: Any, arguments: Any, exports: bool
) -> list[Row]:
    """Return the rows of a network on a batch: all of it in one call."""
    dtype = next(net.parameters()).dtype
    ways: dict[str, Way] = {"eager": lambda: net(**batch)}
    if arguments.compile:
        torch.compiler.reset()
        compiled = torch.compile(net, dynamic=False)
        ways["compiled"] = lambda: compiled(**batch)
    if exports:
        plain = _Positional(copy.deepcopy(net), list(batch))
        made = openvino_way(plain, next(iter(batch.values())), dtype)
        ways |= {} if made is None else {"openvino": made}
    rows = []
    for share in shares:
        ada = halting_after_the_first(net, batch, per, share)
        fast = tp.deploy(ada, batch, engines=["attention"])
        theory = float(tp.count_flops(net, batch).mean / tp.count_flops(ada, batch).mean)
        size = "x".join(str(n) for n in next(iter(batch.values())).shape[:2])
        row: Row = {"network": name, "inputs": size, "dtype": str(dtype)[6:], "per": per, "active": share}
        ours: dict[str, Way] = {"ours": lambda fast=fast: fast(**batch)}  # type: ignore[misc]
        rows.append(measured(row, ways | ours, theory, arguments.seconds))
    return rows


class _Positional(nn.Module):
    """A network that is called with its first argument by position, for converters."""

    def __init__(self, net: nn.Module, names: list[str]) -> None:
        super().__init__()
        self.net, self.name = net, names[0]

    def forward(self, x: Tensor) -> Any:
        return self.net(**{self.name: x}, return_dict=False)[0]


def decoding(net: nn.Module, size: int, past: int, arguments: Any) -> Row:
    """Return the row of one token for each example, with a cache; a third of the layers run."""
    count = int(net.config.num_hidden_layers)  # type: ignore[union-attr, arg-type]
    ada = halting_after(net, count // 3)
    dtype, token = next(net.parameters()).dtype, torch.randint(1000, (size, 1))
    prompt = torch.randint(1000, (size, past))
    fast = tp.deploy(ada, {"input_ids": token}, engines=["attention"])

    def way(model: Any) -> Way:
        cache = DynamicCache(config=net.config)
        with torch.no_grad():
            net(input_ids=prompt, past_key_values=cache, use_cache=True)

        def call() -> Any:
            output = model(input_ids=token, past_key_values=cache, use_cache=True)
            cache.crop(past)
            return output

        return call

    ways = {"eager": way(net), "ours": way(fast)}
    if arguments.compile:
        torch.compiler.reset()
        ways["compiled"] = way(torch.compile(net, dynamic=True))
    llama: Any = net
    layer = llama.model.layers[0]
    weights = sum(p.numel() for p in layer.parameters())
    kv = layer.self_attn.k_proj.weight.numel() + layer.self_attn.v_proj.weight.numel()
    head = llama.lm_head.weight.numel()
    read = (count // 3) * weights + (count - count // 3) * kv + head
    row: Row = {
        "network": "SmolLM2-135M",
        "inputs": f"{size}x1+{past}",
        "dtype": str(dtype)[6:],
        "per": "token",
        "active": round(1 / 3, 2),
    }
    return measured(row, ways, (count * weights + head) / read, arguments.seconds)


def rows_of(kind: str, dtype: torch.dtype, arguments: Any) -> list[Row]:
    if kind == "minilm":
        net, rows = minilm(arguments.minilm).to(dtype), []
        for size in (32, 8, 1):
            given = {"input_ids": torch.randint(1000, 20000, (size, 128))}
            rows += whole("MiniLM", net, given, "token", (0.25, 0.5), arguments, True)
        for size in (32, 256):
            given = {"input_ids": torch.randint(1000, 20000, (size, 128))}
            rows += whole("MiniLM", net, given, "example", (0.25, 0.5), arguments, False)
        return rows
    if kind == "vit":
        net, rows = vit().to(dtype), []
        for size in (1, 8):
            given = {"pixel_values": torch.randn(size, 3, 224, 224).to(dtype)}
            rows += whole("ViT-S/16", net, given, "token", (0.25, 0.5), arguments, True)
        return rows
    net = smollm().to(dtype)
    prompt = {"input_ids": torch.randint(1000, 20000, (1, 512)), "use_cache": False}
    rows = whole("SmolLM2-135M", net, prompt, "token", (0.25, 0.5), arguments, False)
    return [*rows, *(decoding(net, size, 256, arguments) for size in (1, 8))]


def main() -> None:
    parser = parser_for("adapted and deployed networks beside the originals", __file__, seconds=4.0)
    parser.add_argument("--minilm", type=Path, help="folder with MiniLM's config.json and model.safetensors")
    parser.add_argument("--only", nargs="*", default=["minilm", "vit", "smollm"])
    parser.add_argument("--dtypes", nargs="*", default=["float32", "bfloat16"])
    arguments = parser.parse_args()
    rows: list[Row] = []
    for name in arguments.dtypes:
        for kind in arguments.only:
            rows += rows_of(kind, getattr(torch, name), arguments)
            write_csv(arguments.out, rows)


if __name__ == "__main__":
    main()
