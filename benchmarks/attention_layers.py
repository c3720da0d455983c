"""Layers of pretrained transformers whose tokens halt, beside Hugging Face's, compiled ones and OpenVINO.

    python benchmarks/attention_layers.py [--weights FOLDER] [--seconds 3] [--only 32x128 --dtypes float32]

Encoder: the six layers of MiniLM (384 features, 12 heads), with the weights in FOLDER if given, otherwise
random ones. The first layer runs on all tokens; after it a linear head lets a share of them go on, by a bound
chosen for that share, so that each example keeps another number. No tokens are padding. Decoder: one token
for each example, 30 layers of 576 features with 9 heads and 3 of keys and values, 256 tokens in the cache;
tokens halt after the first layer, or at batch size 1 after a share of the layers. The others compute
everything. All take turns, and medians are compared. ``theory`` is the speed-up that FLOPs promise, keys and
values of all tokens included; of the decoder, which waits for its weights, the one that weights promise which
have to be read: all of a layer where any token is active, those of keys and values where none is.
``of_theory`` is the measured speed-up over the best of torch, divided by it.
"""

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from options import parser_for
from safetensors.torch import load_file
from table import write_csv
from torch import Tensor, nn
from transformers import BertConfig, LlamaConfig
from transformers.models.bert.modeling_bert import BertEncoder
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from torchpact.core.modes import Thresholded
from torchpact.engines.attention.layers import LayersRunner
from torchpact.engines.timing import CpuContention, interleaved
from torchpact.flops.attention import attention_flops, key_value_flops, token_flops
from torchpact.specs import AttentionLayer, BlockSpec, LayerContext, LinearHead, Projection

SHARES = (0.25, 0.5, 1.0)
PAST = 256
ATTEMPTS = 4
"""How often a row is measured while others use the processor."""
PATIENCE = 60.0
"""For how many seconds each of these waits for others to finish."""
Way = Callable[[], Any]


class Encoder(nn.Module):
    """The layers of BERT."""

    def __init__(self, layers: nn.ModuleList) -> None:
        super().__init__()
        self.layer = layers

    def forward(self, u: Tensor) -> Tensor:
        """Return the last state."""
        for layer in self.layer:
            u = layer(u)
        return u


class Past:
    """A cache that never grows, so that every call of a benchmark finds the same."""

    def __init__(self, keys: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        self.keys, self.values = keys, values

    def update(self, keys: Tensor, values: Tensor, index: int, *_: Any) -> tuple[Tensor, Tensor]:
        """Return all keys and values of a layer."""
        return torch.cat((self.keys[index], keys), 2), torch.cat((self.values[index], values), 2)


class Decoder(nn.Module):
    """The layers of Llama, on one token for each example."""

    def __init__(self, layers: nn.ModuleList) -> None:
        super().__init__()
        self.layers = layers

    def forward(
        self, u: Tensor, rotary: tuple[Tensor, Tensor], keys: list[Tensor], values: list[Tensor]
    ) -> Tensor:
        """Return the last state."""
        past = Past(keys, values)
        for layer in self.layers:
            u = layer(u, position_embeddings=rotary, past_key_values=past)
        return u


def bert_spec(layer: Any) -> AttentionLayer:
    own, out = layer.attention, layer.output
    return AttentionLayer(
        norm1=own.output.LayerNorm,
        norm2=out.LayerNorm,
        query=Projection.of(own.self.query),
        key=Projection.of(own.self.key),
        value=Projection.of(own.self.value),
        out=Projection.of(own.output.dense),
        up=Projection.of(layer.intermediate.dense),
        down=Projection.of(out.dense),
        heads=own.self.num_attention_heads,
        activation=layer.intermediate.intermediate_act_fn,
        order="post",
    )


def llama_spec(layer: Any, index: int, config: Any) -> AttentionLayer:
    own, mlp = layer.self_attn, layer.mlp
    return AttentionLayer(
        norm1=layer.input_layernorm,
        norm2=layer.post_attention_layernorm,
        query=Projection.of(own.q_proj),
        key=Projection.of(own.k_proj),
        value=Projection.of(own.v_proj),
        out=Projection.of(own.o_proj),
        up=Projection.of(mlp.up_proj),
        gate=Projection.of(mlp.gate_proj),
        down=Projection.of(mlp.down_proj),
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_size=own.head_dim,
        activation=mlp.act_fn,
        causal=True,
        rotary=True,
        index=index,
    )


def runner_of(steps: Sequence[AttentionLayer], dtype: torch.dtype) -> LayersRunner:
    heads = tuple(
        LinearHead(torch.randn(1, steps[0].size, dtype=dtype), torch.zeros(1, dtype=dtype), None)
        for _ in steps[1:]
    )
    return LayersRunner(BlockSpec(nn.Identity(), tuple(steps), heads, Thresholded(), details=False))


def bound_for(runner: LayersRunner, u: Tensor, context: LayerContext, share: float, cached: bool) -> float:
    """Return what the first head's logits must exceed, so that this share of tokens goes on."""
    if share == 1:
        return math.inf
    state = runner.begin(u, bounds=(math.inf,) * len(runner.heads), cached=cached).layer(0, u, context)
    head = runner.heads[0]
    assert isinstance(head, LinearHead)
    return float((state.float() @ head.weight.float().T).flatten().quantile(share))


def run(runner: LayersRunner, u: Tensor, contexts: Sequence[LayerContext], bounds: Any, cached: bool) -> Any:
    call = runner.begin(u, bounds=bounds, cached=cached, in_place=True)
    for index, context in enumerate(contexts):
        u = call.layer(index, u, context)
    return u, call


def wait_until_quiet() -> None:
    """Wait until others leave the processor alone for a second, but not for ever."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        contention = CpuContention()
        time.sleep(1)
        if not contention.is_high():
            return


def measured(
    row: dict[str, object], ways: dict[str, Way], theory: float, seconds: float
) -> dict[str, object]:
    for _ in range(ATTEMPTS):
        wait_until_quiet()
        contention = CpuContention()
        with torch.no_grad():
            times = interleaved(ways, seconds=seconds)
        disturbed = contention.is_high()
        if not disturbed:
            break
    row |= {f"{name}_ms": round(1e3 * each, 3) for name, each in times.items()}
    best = min(times[name] for name in ("eager", "compiled") if name in times)
    row |= {"speedup": round(best / times["ours"], 2), "theory": round(theory, 2)}
    row["of_theory"] = round(best / times["ours"] / theory, 2)
    if "openvino" in times:
        row["of_theory_over_openvino"] = round(times["openvino"] / times["ours"] / theory, 2)
    row["disturbed"] = disturbed
    print(*(f"{name}={value}" for name, value in row.items()), flush=True)
    return row


def openvino_way(net: nn.Module, u: Tensor, dtype: torch.dtype) -> Way | None:
    try:
        import openvino  # type: ignore[import-not-found, import-untyped, unused-ignore]
    except ImportError:
        return None
    u = u.float() if u.is_floating_point() else u
    model = openvino.convert_model(net.float(), example_input=u, input=[tuple(u.shape)])
    precision = {torch.float32: "f32", torch.bfloat16: "bf16"}[dtype]
    made = openvino.compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": precision})
    request, given = made.create_infer_request(), u.numpy()
    return lambda: request.infer([given], share_inputs=True, share_outputs=True)


def encoder_rows(
    batch: int, length: int, dtype: torch.dtype, weights: Path | None, compiles: bool, seconds: float
) -> list[dict[str, object]]:
    config = BertConfig(
        hidden_size=384,
        num_hidden_layers=6,
        num_attention_heads=12,
        intermediate_size=1536,
        attn_implementation="sdpa",  # type: ignore[call-arg, unused-ignore]
    )
    torch.manual_seed(0)
    net = Encoder(BertEncoder(config).layer).eval()
    if weights is not None:
        stored = load_file(weights / "model.safetensors")
        net.load_state_dict({k.removeprefix("encoder."): v for k, v in stored.items() if ".layer." in k})
    u = torch.randn(batch, length, config.hidden_size)
    ways: dict[str, Way] = {}
    with torch.no_grad():
        openvino = openvino_way(net, u, dtype)
        if openvino is not None:
            ways["openvino"] = openvino
        net, u = net.to(dtype), u.to(dtype)
        ways["eager"] = lambda: net(u)
        if compiles:
            compiled = torch.compile(net, dynamic=False)
            ways["compiled"] = lambda: compiled(u)
        specs = [bert_spec(layer) for layer in net.layer]
        runner, contexts = runner_of(specs, dtype), [LayerContext()] * len(specs)
        whole, _ = run(runner, u, contexts, (math.inf,) * 5, False)
        difference = float((whole - net(u)).abs().max() / whole.abs().max())
    rows = []
    for share in SHARES:
        with torch.no_grad():
            bounds = (bound_for(runner, u, contexts[0], share, False), *[math.inf] * 4)
            _, call = run(runner, u, contexts, bounds, False)
            active = call.ponder().steps > 1
        all_of_it = sum(int(attention_flops(s, torch.ones_like(active), length).sum()) for s in specs)
        some = int(attention_flops(specs[0], torch.ones_like(active), length).sum())
        some += sum(int(attention_flops(spec, active, length).sum()) for spec in specs[1:])
        row = {"layers": "MiniLM", "tokens": f"{batch}x{length}", "dtype": str(dtype)[6:], "active": share}
        ours = {"ours": lambda bounds=bounds: run(runner, u, contexts, bounds, False)}
        rows.append(measured(row, ways | ours, all_of_it / some, seconds))
        rows[-1]["difference"] = f"{difference:.1e}"
    return rows


def decoder_rows(batch: int, dtype: torch.dtype, compiles: bool, seconds: float) -> list[dict[str, object]]:
    config = LlamaConfig(
        hidden_size=576,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        intermediate_size=1536,
        attn_implementation="sdpa",  # type: ignore[call-arg, unused-ignore]
    )
    torch.manual_seed(0)
    count = config.num_hidden_layers
    layers = nn.ModuleList(LlamaDecoderLayer(config, index) for index in range(count))  # type: ignore[no-untyped-call, unused-ignore]
    net, u = Decoder(layers).eval().to(dtype), torch.randn(batch, 1, config.hidden_size).to(dtype)
    rotary = LlamaRotaryEmbedding(config)(u, torch.tensor([[PAST]]))  # type: ignore[no-untyped-call, unused-ignore]
    keys, values = ([torch.randn(batch, 3, PAST, 64).to(dtype) for _ in range(count)] for _ in range(2))
    past = Past(keys, values)
    ways: dict[str, Way] = {"eager": lambda: net(u, rotary, keys, values)}
    if compiles:
        compiled = torch.compile(net, dynamic=False)
        ways["compiled"] = lambda: compiled(u, rotary, keys, values)
    specs = [llama_spec(layer, index, config) for index, layer in enumerate(net.layers)]
    runner = runner_of(specs, dtype)

    def context(index: int) -> LayerContext:
        return LayerContext(causal=True, rotary=rotary, update=lambda k, v: past.update(k, v, index))

    contexts = [context(index) for index in range(count)]
    with torch.no_grad():
        whole, _ = run(runner, u, contexts, (math.inf,) * (count - 1), True)
        difference = float((whole - net(u, rotary, keys, values)).abs().max() / whole.abs().max())
    each, own = token_flops(specs[0], 0), key_value_flops(specs[0], 1)  # twice the weights
    rows = []
    for share in SHARES:
        if batch == 1:
            at = round(share * count)  # layers that run
            bounds = tuple(-math.inf if index + 1 == at else math.inf for index in range(count - 1))
            read = at / count
        else:
            with torch.no_grad():
                bound = bound_for(runner, u, contexts[0], share, True)
                bounds = (bound, *[math.inf] * (count - 2))
            read = 1.0
        row = {"layers": "Llama 30x576", "tokens": f"{batch}x1", "dtype": str(dtype)[6:], "active": share}
        ours = {"ours": lambda bounds=bounds: run(runner, u, contexts, bounds, True)}
        rows.append(measured(row, ways | ours, (each + own) / (read * each + own), seconds))
        rows[-1]["difference"] = f"{difference:.1e}"
    return rows


def main() -> None:
    parser = parser_for("layers of pretrained transformers whose tokens have halted", __file__, seconds=3.0)
    parser.add_argument("--weights", type=Path, help="folder with MiniLM's model.safetensors")
    parser.add_argument("--only", nargs="*", default=["32x128", "8x128", "1x128", "8x1", "1x1"])
    parser.add_argument("--dtypes", nargs="*", default=["float32", "bfloat16"])
    arguments = parser.parse_args()
    rows: list[dict[str, object]] = []
    for name in arguments.dtypes:
        dtype = getattr(torch, name)
        for batch, length in ((int(part) for part in size.split("x")) for size in arguments.only):
            torch.compiler.reset()
            if length > 1:
                rows += encoder_rows(
                    batch, length, dtype, arguments.weights, arguments.compile, arguments.seconds
                )
            else:
                rows += decoder_rows(batch, dtype, arguments.compile, arguments.seconds)
            write_csv(arguments.out, rows)


if __name__ == "__main__":
    main()
