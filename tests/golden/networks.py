"""Cases of networks of ``tp.models`` for images, bottlenecks and transformers."""

import zlib
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import torchpact as tp
from tests.golden.blocks import Pooled
from tests.golden.common import (
    MODES,
    Case,
    evaluate,
    fill,
    flat,
    flops,
    learn,
    objective,
    parameters,
    states,
    uniform,
    varied,
)
from tests.golden.digest import Fields
from torchpact.flops.attention import attention_flops
from torchpact.nn.transformer import attention_layer

CONFIGS: dict[str, dict[str, Any]] = {
    "pixel": {},
    "image": {"per": "image"},
    "group4": {"group": 4},
    "norm": {"halting_norm": True},
    "image-norm": {"per": "image", "halting_norm": True},
    "width2": {"width": 2, "classes": 4},
    "deep": {"units": 4},
    "plain": {"adaptive": False},
}


TUNED = {
    "pixel": (0, -2.0),
    "image": (20, -2.0),
    "group4": (13, -1.5),
    "norm": (0, -2.0),
    "image-norm": (12, -1.5),
}
"""The seed of the weights and the bias of the heads with which some halt in every block and others do not."""


def resnet(name: str) -> tp.models.ResNet:
    config = tp.models.ResNetConfig(**({"units": 2, "image_size": 16} | CONFIGS[name]))
    return fill(tp.models.ResNet(config), *TUNED.get(name, (0, -1.0)))


def images_for(name: str) -> Tensor:
    return images(6 if CONFIGS[name].get("per") == "image" else 3)


def images(count: int = 3, size: int = 16, seed: int = 5) -> Tensor:
    return varied(count, 3, size, size, seed=seed)


def train_resnet(model: tp.models.ResNet, x: Tensor, mode: Any, tau: Any) -> Fields:
    torch.manual_seed(1)
    model.train().zero_grad()
    with tp.use_mode(model, mode):
        logits, ponders = model(x)
    nll = F.cross_entropy(logits, torch.arange(len(x)) % 4, reduction="none")
    fields = flat("learn.logits", logits) | flat("learn.ponders", ponders)
    return fields | objective(nll, ponders, tau) | parameters(model) | states(model)


def resnet_in_mode(config: str, name: str) -> Fields:
    model, mode, x = resnet(config), MODES[name], images_for(config)
    fields = train_resnet(model, x, mode, [0.1, 0.2, 0.3] if model.config.adaptive else 0.1)
    model = resnet(config).eval()
    # with two units a block every decision is drawn, whoever has halted
    if name != "discrete" or model.config.units == 2:
        fields |= evaluate(model, (x,), mode, name="eval")
    if name != "discrete":
        fields |= flops(model, x, mode)
        logits, ponders = evaluate_in_training(model, mode)
        fields |= flat("train.logits", logits) | flat("train.steps", [ponder.steps for ponder in ponders])
    return fields


def evaluate_in_training(model: tp.models.ResNet, mode: Any) -> Any:
    torch.manual_seed(2)
    with torch.no_grad(), tp.use_mode(model, mode):
        return model.train()(images(2))


def odd_sizes() -> Fields:
    """Maps whose sides are odd, and not as the configuration has them."""
    model = resnet("pixel").eval()
    x = uniform(2, 3, 13, 9)
    return evaluate(model, (x,), MODES["thresholded"]) | flops(model, x, MODES["thresholded"])


def named() -> Fields:
    """The paper's networks: what they cost, and what their parameters are called."""
    fields: Fields = {}
    torch.manual_seed(0)
    for name in ("resnet32", "resnet110", "psact_resnet32", "psact_resnet110"):
        model = getattr(tp.models, name)()
        state = model.state_dict()
        shapes = [f"{key} {tuple(value.shape)}" for key, value in state.items()]
        names = " ".join(sorted(shapes))
        fields |= {f"{name}.names": names if name == "psact_resnet32" else zlib.crc32(names.encode())}
        fields |= {f"{name}.flops": tp.count_flops(model, images(2, 32)).total} if "psact" not in name else {}
        fields |= {f"{name}.config": repr(model.config)}
        if "latents" in dir(model):
            fields |= {f"{name}.latents": model.latents}
    return fields


def drawn() -> Fields:
    """The weights that networks are made with, which is a matter of the seed."""
    fields: Fields = {}
    for name, config in CONFIGS.items():
        torch.manual_seed(0)
        model = tp.models.build(tp.models.ResNetConfig(**({"units": 2, "image_size": 16} | config)))
        fields |= {f"{name}.state.{key}": value for key, value in list(model.state_dict().items())[::6]}
    torch.manual_seed(0)
    for made in (tp.models.Bottleneck(16, 32), tp.models.TransformerUnit(8, 2), tp.models.HaltingUnit(8)):
        kind = type(made).__name__
        fields |= {f"{kind}.state.{key}": value for key, value in made.state_dict().items()}
    return fields


def warm() -> Fields:
    plain = fill(resnet("plain"), seed=8)
    model = tp.models.warm_start(resnet("pixel"), plain).eval()
    return evaluate(model, (images(),), MODES["thresholded"]) | states(model)


def parts() -> Fields:
    """Units and heads by themselves."""
    x, maps = uniform(2, 16, 8, 7), uniform(2, 16, 8, 8)
    gate = (uniform(2, 1, 4, 4) > 0).float()
    unit = fill(tp.models.ResidualUnit(16, 32, stride=2)).eval()
    grouped = fill(tp.models.ResidualUnit(16, 16, group=4)).eval()
    fields: Fields = {"unit": unit(x), "unit.gated": unit(x, gate=gate), "grouped": grouped(maps)}
    bottleneck = fill(tp.models.Bottleneck(16, 32, stride=2)).eval()
    fields |= {"bottleneck": bottleneck(x), "bottleneck.gated": bottleneck(x, gate=gate)}
    for norm in (False, True):
        pixel = fill(tp.models.HaltingHead(16, norm=norm, bias=-1.0)).eval()
        fields[f"head.pixel.{norm}"] = pixel(x)
        fields[f"head.image.{norm}"] = fill(tp.models.HaltingHead(16, per="image", norm=norm)).eval()(x)
        fields[f"head.group.{norm}"] = fill(tp.models.HaltingHead(16, group=4, norm=norm)).eval()(maps)
        with torch.no_grad():
            fields[f"head.pixel.{norm}.run"] = pixel(x)
    state = uniform(3, 8), uniform(3, 8, seed=1)
    fields["recurrent"] = fill(tp.models.HaltingUnit(8))(state)
    return fields | {"never": tp.models.never_halt(state)}


def bottlenecks(per: str = "pixel") -> tp.AdaptiveBlock:
    units = [tp.models.Bottleneck(16, 64, stride=2), *[tp.models.Bottleneck(64, 64) for _ in range(3)]]
    return fill(tp.AdaptiveBlock(units, [tp.models.HaltingHead(64, per=per) for _ in units[1:]]))  # type: ignore[arg-type]


def bottlenecks_in_mode(per: str, name: str) -> Fields:
    block, mode, x = bottlenecks(per), MODES[name], varied(3, 16, 9, 8)
    fields = learn(block, (x,), mode) | states(block)
    fields |= evaluate(bottlenecks(per).eval(), (x,), mode)
    return fields | (flops(block, x, mode) if name != "discrete" else {})


def transformer(kind: str) -> tuple[tp.AdaptiveBlock, tuple[Any, ...]]:
    size, batch, length = {"large": (64, 16, 64), "example": (16, 6, 4)}.get(kind, (16, 3, 6))
    causal = kind.startswith("causal")
    units = [tp.models.TransformerUnit(size, 2, 2 * size, causal=causal) for _ in range(3)]
    head = Pooled(size, (1,)) if kind == "example" else nn.Linear(size, 1)
    block = fill(tp.AdaptiveBlock(units, head), halting=-0.5)
    inputs: tuple[Any, ...] = (varied(batch, length, size),)
    if "padding" in kind:
        inputs += (torch.arange(length) >= torch.tensor([6, 3, 4])[:, None],)
    return block, inputs


def transformer_in_mode(kind: str, name: str) -> Fields:
    (block, inputs), mode = transformer(kind), MODES[name]
    fields = learn(block, inputs, mode) | evaluate(block.eval(), inputs, mode)
    return fields | (flops(block, inputs, mode) if name != "discrete" else {})


def transformer_alone() -> Fields:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 24, norm_first=True, batch_first=True, activation="gelu")
    unit = tp.models.TransformerUnit.of(fill(layer)).eval()
    x, gate = uniform(3, 6, 16), (uniform(3, 6, 1) > 0).float()
    gate[1] = 0
    fields: Fields = {"open": unit(x), "gated": unit(x, gate=gate), "soft": unit(x, gate=gate * 0.4)}
    return fields | {
        "flops": attention_flops(attention_layer(unit), gate > 0, x.size(1)),
        "state": " ".join(unit.state_dict()),
    }


TRANSFORMERS = ("token", "example", "padding", "causal", "causal-padding", "large")

CASES = [
    *[
        Case(f"resnet-{config}-{name}", partial(resnet_in_mode, config, name))
        for config in CONFIGS
        for name in (MODES if config != "plain" else ["thresholded"])
    ],
    Case("resnet-odd-sizes", odd_sizes),
    Case("resnet-named", named),
    Case("resnet-warm-start", warm),
    Case("models-drawn", drawn),
    Case("models-parts", parts),
    *[
        Case(f"bottleneck-{per}-{name}", partial(bottlenecks_in_mode, per, name))
        for per in ("pixel", "image")
        for name in MODES
    ],
    *[
        Case(f"transformer-{kind}-{name}", partial(transformer_in_mode, kind, name))
        for kind in TRANSFORMERS
        for name in (MODES if kind != "large" else ["relaxed", "thresholded"])
    ],
    Case("transformer-alone", transformer_alone),
]
