"""Tiny networks of every family with random weights, and what they are called with."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchpact as tp
from tests.adapt.torchvision_stub import timm_models

LAYERS, WIDTH, WORDS = 4, 16, 50


@dataclass(frozen=True)
class Case:
    """A family: how to build a network of it, and inputs."""

    name: str
    build: Callable[..., Any]
    inputs: Callable[[int, int], dict[str, Any]]
    """Called with the batch and the length, returns arguments by name; the last examples are padded."""
    runs: tuple[str, ...]
    """Their names, in the order in which they end."""
    exact: bool = True
    """Whether the adapted network computes what the original does by the same operations."""
    decoder: bool = False

    def __str__(self) -> str:
        return self.name


def first(output: Any) -> Tensor:
    """Return the first tensor that a network returned."""
    if isinstance(output, Tensor):
        return output
    return first(output[0])


def runs(net: Any) -> Any:
    """Return the runs of an adapted network."""
    return net.torchpact.runs


def weights(ponder: tp.Ponder) -> Tensor:
    """Return how much each token of a ponder counts."""
    assert ponder.weights is not None
    return ponder.weights.squeeze(2)


def mask_of(batch: int, length: int, left: bool = False) -> Tensor:
    """Return a mask, 1 at real tokens: every second example is shorter by up to half."""
    mask = torch.ones(batch, length, dtype=torch.long)
    for row in range(1, batch, 2):
        short = 1 + (row % max(length // 2, 1))
        if left:
            mask[row, :short] = 0
        else:
            mask[row, length - short :] = 0
    return mask


def text(batch: int, length: int, left: bool = False) -> dict[str, Any]:
    ids = torch.randint(1, WORDS, (batch, length), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "attention_mask": mask_of(batch, length, left)}


def _left(batch: int, length: int) -> dict[str, Any]:
    return text(batch, length, left=True)


def images(batch: int, _length: int) -> dict[str, Any]:
    return {"pixel_values": torch.randn(batch, 3, 8, 8, generator=torch.Generator().manual_seed(1))}


def _sized(**more: Any) -> dict[str, Any]:
    return {
        "vocab_size": WORDS,
        "hidden_size": WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 2,
        "intermediate_size": 24,
        "max_position_embeddings": 64,
        **more,
    }


def _transformers() -> Any:
    return pytest.importorskip("transformers", reason="transformers is not installed")


def _hugging_face(kind: str, config: str, settings: dict[str, Any]) -> Callable[..., nn.Module]:
    def build(**more: Any) -> nn.Module:
        transformers = _transformers()
        torch.manual_seed(0)
        attention = more.pop("attn_implementation", "sdpa")
        made = getattr(transformers, config)(**{**settings, **more})
        model: nn.Module = getattr(transformers, kind)._from_config(made, attn_implementation=attention)
        for module in model.modules():  # so that layers make a difference
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.25)
        return model.eval()

    return build


def torch_encoder(norm_first: bool = False, batch_first: bool = True, **more: Any) -> nn.TransformerEncoder:
    torch.manual_seed(0)
    settings = {"batch_first": batch_first, "norm_first": norm_first, "dropout": 0.0, **more}
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 24, **settings)
    nested = batch_first and not norm_first
    net = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=nested)
    for parameter in net.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.25)
    return net.eval()


def _states(batch_first: bool) -> Callable[[int, int], dict[str, Any]]:
    def inputs(batch: int, length: int) -> dict[str, Any]:
        src = torch.randn(batch, length, WIDTH, generator=torch.Generator().manual_seed(1))
        return {
            "src": src if batch_first else src.transpose(0, 1),
            "src_key_padding_mask": mask_of(batch, length) == 0,
        }

    return inputs


def timm_vit(**_: Any) -> nn.Module:
    models = timm_models()
    torch.manual_seed(0)
    net: nn.Module = models.VisionTransformer(
        img_size=8, patch_size=4, embed_dim=WIDTH, depth=LAYERS, num_heads=2, num_classes=5
    )
    return net.eval()


def timm_resnet(**_: Any) -> nn.Module:
    timm_models()
    from timm.models.resnet import BasicBlock, ResNet

    block: Any = BasicBlock

    torch.manual_seed(0)
    net: nn.Module = ResNet(block, layers=(3, 2, 1, 1), channels=(8, 8, 8, 8), stem_width=8, num_classes=5)
    return net.eval()


class ResidualMLP(nn.Module):
    """A layer of no known family."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 24), nn.Linear(24, width)

    def forward(self, u: Tensor) -> Tensor:
        update: Tensor = self.down(torch.tanh(self.up(self.norm(u))))
        return u + update


class Unfamiliar(nn.Module):
    """A network of layers of no known family."""

    def __init__(self, layers: int = LAYERS) -> None:
        super().__init__()
        self.embed = nn.Linear(3, WIDTH)
        self.blocks = nn.Sequential(*[ResidualMLP(WIDTH) for _ in range(layers)])
        self.out = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.out(self.blocks(self.embed(x)))
        return output


def unfamiliar(**_: Any) -> nn.Module:
    torch.manual_seed(0)
    return Unfamiliar().eval()


def _points(batch: int, length: int) -> dict[str, Any]:
    return {"x": torch.randn(batch, length, 3, generator=torch.Generator().manual_seed(1))}


def plain_resnet(**_: Any) -> nn.Module:
    from torchpact.nn.resnet import ResNet
    from torchpact.nn.resnet_config import ResNetConfig

    torch.manual_seed(0)
    return ResNet(ResNetConfig(units=3, adaptive=False)).eval()


def _pictures(name: str, size: int) -> Callable[[int, int], dict[str, Any]]:
    return lambda batch, _length: {
        name: torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(1))
    }


def _whisper_inputs(batch: int, length: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    return {
        "input_features": torch.randn(batch, 8, 24, generator=generator),
        "decoder_input_ids": torch.randint(1, WORDS, (batch, length), generator=generator),
        "decoder_attention_mask": mask_of(batch, length),
    }


_LLAMA = _sized(
    num_key_value_heads=1, tie_word_embeddings=True, pad_token_id=0, bos_token_id=1, eos_token_id=2
)
_SLIDING = {
    "use_sliding_window": True,
    "sliding_window": 3,
    "max_window_layers": 2,
    "layer_types": ["full_attention", "sliding_attention"] * 2,
}
_ALBERT = _sized(embedding_size=8)
_DISTIL = {
    "vocab_size": WORDS,
    "dim": WIDTH,
    "n_layers": LAYERS,
    "n_heads": 2,
    "hidden_dim": 24,
    "max_position_embeddings": 64,
}
_VISION = {
    "image_size": 8,
    "patch_size": 4,
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "intermediate_size": 24,
}
_GPT2 = {
    "vocab_size": WORDS,
    "n_embd": WIDTH,
    "n_layer": LAYERS,
    "n_head": 2,
    "n_positions": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_WHISPER = {
    "vocab_size": WORDS,
    "d_model": WIDTH,
    "encoder_layers": LAYERS,
    "decoder_layers": LAYERS,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "num_mel_bins": 8,
    "max_source_positions": 12,
    "max_target_positions": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
}


def _encoder(name: str, kind: str, config: str, settings: dict[str, Any], run: str) -> Case:
    return Case(name, _hugging_face(kind, config, settings), text, (run,))


def _decoder(name: str, kind: str, config: str, settings: dict[str, Any], run: str = "model.layers") -> Case:
    build = _hugging_face(kind, config, settings)
    return Case(name, build, _left, (run,), decoder=True)


def _vision(name: str, kind: str, config: str, run: str, **more: Any) -> Case:
    return Case(name, _hugging_face(kind, config, {**_VISION, **more}), images, (run,))


BERT = _encoder("BERT", "BertForMaskedLM", "BertConfig", _sized(), "bert.encoder.layer")
LLAMA = _decoder("Llama", "LlamaForCausalLM", "LlamaConfig", _LLAMA)
VIT = _vision("ViT", "ViTModel", "ViTConfig", "layers")
UNFAMILIAR = Case("fallback", unfamiliar, _points, ("blocks",))
GPT2 = _decoder("GPT-2", "GPT2LMHeadModel", "GPT2Config", _GPT2, "transformer.h")
TORCH = Case("torch, post-norm", torch_encoder, _states(True), ("layers",), exact=False)

CORE = [BERT, LLAMA, VIT, UNFAMILIAR]
OTHERS = [
    GPT2,
    TORCH,
    _encoder("RoBERTa", "RobertaModel", "RobertaConfig", _sized(max_position_embeddings=80), "encoder.layer"),
    _encoder("DistilBERT", "DistilBertModel", "DistilBertConfig", _DISTIL, "transformer.layer"),
    _encoder("ELECTRA", "ElectraModel", "ElectraConfig", _sized(embedding_size=8), "encoder.layer"),
    _encoder(
        "ModernBERT",
        "ModernBertModel",
        "ModernBertConfig",
        _sized(local_attention=4, global_attn_every_n_layers=2, pad_token_id=0),
        "layers",
    ),
    _encoder("ALBERT", "AlbertModel", "AlbertConfig", _ALBERT, "encoder"),
    _decoder("Mistral", "MistralForCausalLM", "MistralConfig", {**_LLAMA, "sliding_window": 3}),
    _decoder("Qwen2", "Qwen2ForCausalLM", "Qwen2Config", {**_LLAMA, **_SLIDING}),
    _decoder("Qwen3", "Qwen3ForCausalLM", "Qwen3Config", {**_LLAMA, **_SLIDING, "head_dim": 8}),
    _vision("DeiT", "DeiTModel", "DeiTConfig", "layers"),
    _vision("DINOv2", "Dinov2Model", "Dinov2Config", "encoder.layer"),
    Case(
        "Whisper",
        _hugging_face("WhisperForConditionalGeneration", "WhisperConfig", _WHISPER),
        _whisper_inputs,
        ("model.encoder.layers", "model.decoder.layers"),
    ),
    Case(
        "torch, pre-norm",
        lambda **_: torch_encoder(norm_first=True),
        _states(True),
        ("layers",),
        exact=False,
    ),
    Case(
        "torch, sequence first",
        lambda **_: torch_encoder(batch_first=False),
        _states(False),
        ("layers",),
        exact=False,
    ),
    Case("timm's ViT", timm_vit, _pictures("x", 8), ("blocks",)),
    Case(
        "timm's ResNet",
        timm_resnet,
        _pictures("x", 32),
        ("layer1", "layer2"),
    ),
    Case(
        "our ResNet",
        plain_resnet,
        _pictures("images", 8),
        ("blocks.0.steps", "blocks.1.steps", "blocks.2.steps"),
    ),
]
ALL = CORE + OTHERS


def parameters(cases: list[Case]) -> list[Any]:
    """Return cases for parametrize: those outside of the core are left to make test-all."""
    core = [case.name for case in CORE]
    return [
        pytest.param(case, id=case.name, marks=() if case.name in core else pytest.mark.slow)
        for case in cases
    ]


def randomize(net: Any, scale: float = 1.0, seed: int = 3) -> Any:
    """Give heads random weights such that some positions halt after every layer."""
    generator = torch.Generator().manual_seed(seed)
    for run in runs(net):
        for head in run.heads:
            head.weight.data.normal_(std=scale, generator=generator)
            head.bias.data.fill_(-1.0)
    return net
