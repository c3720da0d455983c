"""Adapted and deployed networks beside the originals: eager, compiled, by OpenVINO and by ONNX Runtime.

    python benchmarks/adapted.py [--minilm FOLDER] [--only MiniLM-32x128 …] [--dtypes float32 bfloat16]

Whole networks, as users call them: ``tp.deploy(tp.adapt(net), batch)``. What halts is set by hand: after the
first layer a share of the positions goes on, to the last, picked by the quantile of a random projection, so
that each example keeps another number. When decoding all rows halt after a third of the layers, or at mixed
depths, the deepest after two thirds. MiniLM has the weights in FOLDER if given; all else has random ones of
the real size, which take as long.

``theory`` is the ratio of the FLOPs that ``tp.count_flops`` counts, heads included; when decoding, the ratio
of the bytes of weights that have to be read: layers down to the deepest row, keys and values of those below,
and the output layer. ``of_theory`` is the measured speed-up over the best of torch, divided by it. ``dense``
is ours with nothing halted. ``compiled`` decodes with a static cache. All take turns but ONNX Runtime, which
is measured by itself after them, for its threads keep a core busy between calls. It has no kernels for
bfloat16 on a CPU, and is left out there; neither it nor OpenVINO decodes with a cache here.

A case (a network and a size) is measured at a time, and its rows replace those of earlier runs in the CSV.
"""

import argparse
import copy
import io
import logging
import time
import warnings
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import torch
from attention_layers import ATTEMPTS, Way, openvino_way, wait_until_quiet
from options import parser_for
from table import read_rows, write_csv
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertModel,
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    StaticCache,
    ViTConfig,
    ViTModel,
)

import torchpact as tp
from torchpact.engines.timing import CpuContention, interleaved

Row = dict[str, object]
KEY = ("network", "inputs", "dtype", "per", "active")
SHARES = (0.25, 0.5)
WAYS = ("eager", "compiled", "openvino", "onnxruntime", "dense")
PAST = 256


class Case(NamedTuple):
    """A network, what it is called with, and for what it decides."""

    build: Callable[[Path | None], Any]
    inputs: Callable[[], dict[str, Any]]
    per: Any = "token"
    past: int = 0
    """Tokens in the cache, when decoding."""
    exports: bool = True
    """Whether the other runtimes are tried."""


def minilm(folder: Path | None) -> Any:
    config = BertConfig(hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536)
    torch.manual_seed(0)
    return BertModel(config) if folder is None else BertModel.from_pretrained(folder)


def vit(_: Path | None) -> Any:
    config = ViTConfig(hidden_size=384, num_hidden_layers=12, num_attention_heads=6, intermediate_size=1536)
    torch.manual_seed(0)
    return ViTModel(config)


def smollm(_: Path | None) -> Any:
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        intermediate_size=1536,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config)


def words(batch: int, length: int) -> Callable[[], dict[str, Any]]:
    return lambda: {"input_ids": torch.randint(1000, 20000, (batch, length))}


def images(batch: int) -> Callable[[], dict[str, Any]]:
    return lambda: {"pixel_values": torch.randn(batch, 3, 224, 224)}


CASES = {
    "MiniLM-32x128": Case(minilm, words(32, 128)),
    "MiniLM-8x128": Case(minilm, words(8, 128)),
    "MiniLM-1x128": Case(minilm, words(1, 128)),
    "MiniLM-32x128-example": Case(minilm, words(32, 128), "example"),
    "MiniLM-256x128-example": Case(minilm, words(256, 128), "example", exports=False),
    "ViT-1": Case(vit, images(1)),
    "ViT-8": Case(vit, images(8)),
    "SmolLM2-prompt": Case(smollm, lambda: {**words(1, 512)(), "use_cache": False}),
    "SmolLM2-decoding-1": Case(smollm, words(1, 1), past=PAST),
    "SmolLM2-decoding-8": Case(smollm, words(8, 1), past=PAST),
}
NETWORKS = {"MiniLM": "MiniLM", "ViT": "ViT-S/16", "SmolLM2": "SmolLM2-135M"}


def timed(function: Callable[[], Any]) -> tuple[Any, float]:
    start = time.perf_counter()
    made = function()
    return made, round(time.perf_counter() - start, 2)


def halting_after_the_first(ada: Any, batch: dict[str, Any], share: float) -> None:
    """Let a share of the positions of an adapted network go on after the first layer, to the end."""
    (run,) = ada.torchpact.runs
    first, *others = run.heads
    for head in others:
        head.bias.fill_(-50.0)
    torch.manual_seed(0)
    first.weight.normal_()
    first.bias.zero_()
    with tp.use_thresholds(ada, tp.Thresholds("never")), tp.collect(ada) as ponders:
        ada(**batch)
    logits = torch.logit(ponders[0].probs[0].double()).flatten()
    first.bias.fill_(-float(logits.quantile(share)))


def halting_after(ada: Any, depths: list[int], call: Callable[[Any], Any]) -> None:
    """Let the rows of an adapted decoder halt after these layers, one each, or all of them after one.

    Raises:
        ValueError: They would halt elsewhere.

    """
    heads = ada.torchpact.runs[0].heads
    torch.manual_seed(0)
    for head in heads:
        head.weight.normal_(std=0.1)
        head.bias.zero_()
    with tp.use_thresholds(ada, tp.Thresholds("never")), tp.collect(ada) as ponders:
        call(ada)
    logits = torch.logit(torch.stack([p.double() for p in ponders[0].probs[: len(heads)]])).flatten(1)
    left = torch.ones(logits.size(1), dtype=torch.bool)
    for index, (head, own) in enumerate(zip(heads, logits, strict=True), start=1):
        count = depths.count(index) if len(depths) > 1 else int(left.sum()) * (index in depths)
        if not count:
            head.bias.fill_(-50.0)
            continue
        values, rows = own.masked_fill(~left, -torch.inf).sort(descending=True)
        others = values[count] if count < int(left.sum()) else values[count - 1] - 2
        head.bias.fill_(-float(values[count - 1] + others) / 2)
        left[rows[:count]] = False
    with tp.collect(ada) as ponders:
        call(ada)
    found = sorted(ponders[0].steps.flatten().int().tolist())
    if found != sorted(depths * (len(found) // len(depths))):
        raise ValueError(f"expected rows that halt after {sorted(depths)} layers, got {found}")


class _Positional(nn.Module):
    """A network that is called with its first argument by position, for converters."""

    def __init__(self, net: nn.Module, given: dict[str, Any]) -> None:
        super().__init__()
        self.net, (self.name, *_) = net, given
        self.more = {name: value for name, value in given.items() if name != self.name}

    def forward(self, x: Tensor) -> Any:
        return self.net(**{self.name: x}, **self.more, return_dict=False)[0]


def onnx_way(net: nn.Module, x: Tensor, dtype: torch.dtype) -> Way | None:
    if dtype != torch.float32:
        return None
    try:
        import onnxruntime  # type: ignore[import-not-found, import-untyped, unused-ignore]
    except ImportError:
        return None
    program: Any = torch.onnx.export(net, (x,), dynamo=True, verbose=False)
    stream = io.BytesIO()
    program.save(stream)
    session = onnxruntime.InferenceSession(stream.getvalue(), providers=["CPUExecutionProvider"])
    name, given = session.get_inputs()[0].name, x.numpy()
    return lambda: session.run(None, {name: given})


def quietly(make: Callable[..., Way | None], *args: Any) -> Way | None:
    """Return what a converter makes, without what it prints; None, with its reason, where it fails."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            return make(*args)
    except Exception as error:
        print(f"{make.__name__}: {type(error).__name__}: {str(error)[:300]}", flush=True)
        return None
    finally:
        logging.disable(logging.NOTSET)


def whole(net: nn.Module, case: Case, batch: dict[str, Any], arguments: Any) -> list[Row]:
    """Return the rows of a network on a batch: all of it in one call."""
    dtype = next(net.parameters()).dtype
    ways: dict[str, Way] = {"eager": lambda: net(**batch)}
    if arguments.compile:
        compiled = torch.compile(net, dynamic=False)
        ways["compiled"] = lambda: compiled(**batch)
    if case.exports:
        first = next(iter(batch.values()))
        made = quietly(openvino_way, _Positional(copy.deepcopy(net), batch).eval(), first, dtype)
        ways |= {} if made is None else {"openvino": made}
    rows, ours = [], {}
    for share in SHARES:
        own = copy.deepcopy(net)
        ada, adapting = timed(lambda own=own: tp.adapt(own, per=case.per))  # type: ignore[misc]
        halting_after_the_first(ada, batch, share)
        fast, deploying = timed(lambda ada=ada: tp.deploy(ada, batch, engines=["attention"]))  # type: ignore[misc]
        ours[f"ours {share}"] = lambda fast=fast: fast(**batch)
        ways.setdefault("dense", lambda fast=fast: fast(**batch, thresholds=tp.Thresholds("never")))  # type: ignore[misc]
        engine = fast.report.measurements[0].engine
        theory = float(tp.count_flops(net, batch).mean / tp.count_flops(ada, batch).mean)
        reference, found = ada(**batch)[0].float(), fast(**batch)[0].float()
        difference = float((found - reference).norm() / reference.norm())
        rows.append(
            {"active": share, "theory": round(theory, 2), "engine": engine, "adapt_s": adapting}
            | {"deploy_s": deploying, "difference": f"{difference:.1e}"}
        )
    times, disturbed = measured(ways | ours, arguments, arguments.seconds)
    made = None
    if case.exports and arguments.onnx:
        made = quietly(onnx_way, _Positional(copy.deepcopy(net), batch).eval(), first, dtype)
    if made is not None:
        alone, others = measured({"onnxruntime": made}, arguments, arguments.seconds / 4)
        times, disturbed = times | alone, disturbed or others
    return filled(rows, times, disturbed)


def decoding(net: Any, case: Case, batch: dict[str, Any], arguments: Any) -> list[Row]:
    """Return the rows of one token for each example, with a cache."""
    count = int(net.config.num_hidden_layers)
    token = batch["input_ids"]
    size = len(token)
    prompt = torch.randint(1000, 20000, (size, case.past))

    def caller(static: bool) -> Callable[..., Any]:
        cache: Any = DynamicCache(config=net.config)
        if static:
            cache = StaticCache(config=net.config, max_cache_len=case.past + 1)
        net(input_ids=prompt, past_key_values=cache, use_cache=True)

        def call(model: Any, **more: Any) -> Any:
            if static:  # the next call writes to the same place
                for layer in cache.layers:
                    layer.cumulative_length.fill_(case.past)
                places = torch.full((size, 1), case.past)
                return model(
                    input_ids=token, past_key_values=cache, position_ids=places, use_cache=True, **more
                )
            output = model(input_ids=token, past_key_values=cache, use_cache=True, **more)
            cache.crop(-1)  # the token that was added
            return output

        return call

    dynamic = caller(False)
    ways: dict[str, Way] = {"eager": lambda: dynamic(net)}
    if arguments.compile:
        compiled, static = torch.compile(net, dynamic=False), caller(True)
        ways["compiled"] = lambda: static(compiled)
    weights = sum(p.numel() for p in net.model.layers[0].parameters())
    own = net.model.layers[0].self_attn
    both, head = own.k_proj.weight.numel() + own.v_proj.weight.numel(), net.lm_head.weight.numel()
    rows, ours = [], {}
    mixed = [2 * count // 3 * (row + 1) // size for row in range(size)]
    for name, depths in {"a third": [count // 3], "mixed": mixed}.items():
        if name == "mixed" and size == 1:
            continue
        ada, adapting = timed(lambda: tp.adapt(copy.deepcopy(net)))
        halting_after(ada, depths, dynamic)
        fast, deploying = timed(lambda ada=ada: tp.deploy(ada, {"input_ids": token}, engines=["attention"]))  # type: ignore[misc]
        ours[f"ours {name}"] = lambda fast=fast: dynamic(fast)
        ways.setdefault("dense", lambda fast=fast: dynamic(fast, thresholds=tp.Thresholds("never")))  # type: ignore[misc]
        deepest = max(depths)
        read = deepest * weights + (count - deepest) * both + head
        reference, found = dynamic(ada)[0].float(), dynamic(fast)[0].float()
        difference = float((found - reference).norm() / reference.norm())
        rows.append(
            {"active": name, "theory": round((count * weights + head) / read, 2)}
            | {"engine": fast.report.measurements[0].engine, "adapt_s": adapting, "deploy_s": deploying}
            | {"difference": f"{difference:.1e}"}
        )
    return filled(rows, *measured(ways | ours, arguments, arguments.seconds))


def measured(ways: dict[str, Way], arguments: Any, seconds: float) -> tuple[dict[str, float], bool]:
    """Return the seconds of all ways, in turns, and whether other programs were in the way."""
    times: dict[str, float] = {}
    disturbed = True
    for _ in range(arguments.attempts):
        wait_until_quiet()
        contention = CpuContention()
        times = interleaved(ways, seconds=seconds)
        disturbed = contention.is_high()
        if not disturbed:
            break
    return times, disturbed


def filled(rows: list[Row], times: dict[str, float], disturbed: bool) -> list[Row]:
    """Return the rows with what all ways took."""
    others = {name: times[name] for name in WAYS if name in times}
    torch_best = min(others[name] for name in ("eager", "compiled") if name in others)
    made = []
    for row in rows:
        ours, theory = times[f"ours {row['active']}"], float(str(row["theory"]))
        all_of_it = {
            name: others.get(name) for name in ("eager", "compiled", "openvino", "onnxruntime", "dense")
        }
        milliseconds = {f"{n}_ms": "" if t is None else round(1e3 * t, 2) for n, t in all_of_it.items()}
        first: Row = {"active": row["active"], **milliseconds, "ours_ms": round(1e3 * ours, 2)}
        first |= {"speedup": round(torch_best / ours, 2), "theory": theory}
        first["of_theory"] = round(torch_best / ours / theory, 2)
        for name in ("openvino", "onnxruntime"):
            other = others.get(name)
            first[f"of_theory_over_{name}"] = "" if other is None else round(other / ours / theory, 2)
        made.append(first | row | {"disturbed": disturbed})
    return made


def rows_of(name: str, dtype: torch.dtype, arguments: Any) -> list[Row]:
    """Return the rows of a case."""
    case = CASES[name]
    torch.compiler.reset()
    net = case.build(arguments.minilm).eval().to(dtype)
    torch.manual_seed(1)
    batch = {
        key: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x
        for key, x in case.inputs().items()
    }
    with torch.no_grad():
        rows = (decoding if case.past else whole)(net, case, batch, arguments)
    first = next(iter(batch.values()))
    inputs = "x".join(str(n) for n in (first.shape[:2] if first.dim() == 2 else (len(first), 224, 224)))
    inputs += f"+{case.past}" if case.past else ""
    label = NETWORKS[name.partition("-")[0]]
    rows = [
        {"network": label, "inputs": inputs, "dtype": str(dtype)[6:], "per": case.per, **row} for row in rows
    ]
    for row in rows:
        print(*(f"{key}={value}" for key, value in row.items()), flush=True)
    return rows


def merged(path: Path, rows: list[Row]) -> list[Row]:
    """Return rows in the place of those in a file that are of the same, and all others."""
    known: dict[tuple[str, ...], Row] = {tuple(row[key] for key in KEY): dict(row) for row in read_rows(path)}
    known |= {tuple(str(row[key]) for key in KEY): row for row in rows}
    return [known[key] for key in sorted(known, key=_place)]


def _place(key: tuple[str, ...]) -> tuple[object, ...]:
    network, inputs, dtype, per, active = key
    return (
        [*NETWORKS.values()].index(network),
        dtype != "float32",
        per != "token",
        len(inputs),
        inputs,
        active,
    )


def main() -> None:
    parser = parser_for("adapted and deployed networks beside the originals", __file__, seconds=20.0)
    parser.add_argument("--minilm", type=Path, help="folder with MiniLM's config.json and model.safetensors")
    parser.add_argument("--only", nargs="*", default=[*CASES], choices=[*CASES])
    parser.add_argument("--dtypes", nargs="*", default=["float32", "bfloat16"])
    parser.add_argument("--attempts", type=int, default=ATTEMPTS, help="how often, while others are busy")
    parser.add_argument("--onnx", action=argparse.BooleanOptionalAction, default=True)
    arguments = parser.parse_args()
    for dtype in arguments.dtypes:
        for name in arguments.only:
            rows = rows_of(name, getattr(torch, dtype), arguments)
            write_csv(arguments.out, merged(arguments.out, rows))


if __name__ == "__main__":
    main()
