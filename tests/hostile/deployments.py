"""Random networks, modes, shapes, precisions and thresholds: deployed ones return what the network does."""

import random
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import torchpact as tp
from tests.engines.networks import lively, relative
from torchpact.engines.attention import native as attention
from torchpact.engines.base import Unsupported
from torchpact.engines.conv.native import engine as conv
from torchpact.engines.recurrent import native as recurrent
from torchpact.nn.conv_units import join_patches

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
MARGIN = {torch.float32: 1e-3, torch.bfloat16: 0.2}
"""How close to a bound a logit may come before rounding may decide."""


class Wrong(AssertionError):
    """A deployed network returned something else than the network."""


def case(rng: random.Random) -> str:
    """Deploy a random network and compare; return in a few words what was checked."""
    torch.manual_seed(rng.getrandbits(32))
    # which engine is the fastest is not the question
    with mock.patch("torchpact.engines.timing.in_turns", _once), warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        return rng.choice(KINDS)(rng)


def _once(candidates: Mapping[str, Callable[[], object]], **_: Any) -> dict[str, list[float]]:
    for function in candidates.values():
        function()
    return {name: [1.0] for name in candidates}


def _convolutional_block(rng: random.Random) -> str:
    per = rng.choice(["pixel", "pixel", "image"])
    settings: dict[str, Any] = {"units": rng.randint(2, 4), "width": rng.randint(1, 2), "per": per}
    settings["halting_norm"] = rng.random() < 0.3
    block = lively(rng.getrandbits(16), **settings).blocks[rng.randint(0, 1)]
    u = torch.randn(
        rng.randint(1, 4), block.steps[0].conv1.in_channels, *(2 * rng.randint(1, 6) for _ in "hw")
    )
    dtype = rng.choice([torch.float32, torch.float32, torch.bfloat16])
    return _compare(rng, block.to(dtype), u.to(dtype), ["dense", "native", "sparse"], "block of convolutions")


def _resnet(rng: random.Random) -> str:
    size, group = rng.choice([8, 16]), rng.choice([1, 1, 2])
    net = lively(rng.getrandbits(16), units=rng.randint(2, 3), group=group, image_size=size)
    engines = rng.choice(["native", "sparse", "dense"])
    images = torch.randn(rng.randint(1, 3), 3, size, size)
    return _compare(rng, net, images, [engines], "ResNet")


def _dense_block(rng: random.Random) -> str:
    features, count = rng.randint(1, 9), rng.randint(2, 5)
    shared = rng.random() < 0.3
    steps = [nn.Sequential(nn.Linear(features, features), nn.Tanh()) for _ in range(1 if shared else count)]
    heads = [nn.Linear(features, 1) for _ in range(count - 1)]
    block = tp.AdaptiveBlock(steps[0] if shared else steps, heads, max_steps=count).eval()
    shape = [rng.randint(1, 6) for _ in range(rng.randint(1, 2))]
    return _compare(rng, block, torch.randn(*shape, features), ["dense", "compact"], "linear layers")


def _recurrent(rng: random.Random) -> str:
    inputs, size = rng.randint(1, 5), rng.randint(1, 20)
    kind = rng.choice([nn.RNNCell, nn.GRUCell, nn.LSTMCell])
    rnn = tp.AdaptiveRNN(
        kind(inputs + 1, size), max_steps=rng.randint(1, 4), halting_bias=rng.uniform(-2, 2),
        batch_first=rng.random() < 0.5,
    ).eval()  # fmt: skip
    x = torch.randn(rng.randint(1, 5), rng.randint(1, 5), inputs)
    return _compare(rng, rnn, x, ["recurrent", "recurrent_compact", "dense"], "recurrent layer")


def _transformer(rng: random.Random) -> str:
    heads, count = rng.choice([1, 2, 4]), rng.randint(2, 4)
    size = heads * rng.choice([4, 8])
    layer = nn.TransformerEncoderLayer(
        size, heads, 2 * size, batch_first=True, norm_first=rng.random() < 0.5, activation="gelu"
    )
    encoder = nn.TransformerEncoder(layer, count, enable_nested_tensor=False).eval()
    net = tp.adapt(encoder, per=rng.choice(["token", "example"]))
    for name, parameter in net.named_parameters():
        if name.startswith("torchpact."):
            nn.init.normal_(parameter, std=1.0)
    tokens = rng.randint(1, 7)
    x = torch.randn(rng.randint(1, 4), tokens, size)
    return _compare(rng, net, x, ["attention", "dense"], "transformer")


KINDS = [_convolutional_block, _convolutional_block, _resnet, _dense_block, _recurrent, _transformer]


def _compare(rng: random.Random, net: nn.Module, x: Tensor, engines: list[str], what: str) -> str:
    dtype = x.dtype
    mode = rng.choice(["thresholded", "thresholded", "thresholded", "discrete", "relaxed"])
    threshold = rng.choice([0.5, rng.uniform(0.05, 0.95)])
    chosen: Any = tp.Thresholded(threshold) if mode == "thresholded" else mode
    tp.use_mode(net, chosen)
    engine = rng.choice(engines)
    fast = tp.deploy(net, x if rng.random() < 0.5 else x[:1], engines=[engine])
    told: dict[str, Any] = {}
    bound = torch.tensor(threshold).logit()
    if mode == "thresholded" and rng.random() < 0.5:
        other = rng.uniform(0.05, 0.95)
        told, bound = {"thresholds": other}, torch.tensor(other).logit()
    seed = rng.getrandbits(32)
    with tp.collect(net) as wanted:
        torch.manual_seed(seed)
        with tp.use_thresholds(net, told.get("thresholds")):
            expected = net(x)
    with tp.collect(fast) as found:
        torch.manual_seed(seed)
        got = fast(x, **told)
    label = f"{what}, {mode}, {str(dtype).removeprefix('torch.')}"
    near = [
        bool(((ponder.probs[:-1].float().logit() - bound).abs() < MARGIN[dtype]).any()) for ponder in wanted
    ]
    if (mode == "thresholded" and any(near)) or (mode == "discrete" and dtype == torch.bfloat16):
        return f"{label}: not compared, as rounding may decide"
    described = f"{label}, engine {engine}, threshold {threshold}, {told}, shape {tuple(x.shape)}:\n{net}"
    if len(found) != len(wanted):
        raise Wrong(f"{len(found)} ponders for {len(wanted)}, {described}")
    for one, two in zip(found, wanted, strict=True):
        # patches that share a decision have dimensions of their own in the network, and none where deployed
        if mode != "relaxed" and not torch.equal(one.steps.flatten(), two.steps.flatten()):
            raise Wrong(f"steps differ, {described}")
        expecting = [each.expected_steps.flatten() for each in (one, two)]
        if mode == "relaxed" and _apart(*expecting) > TOLERANCE[dtype]:
            raise Wrong(f"expected steps differ, {described}")
    if _apart(_first(got), _first(expected)) > TOLERANCE[dtype]:
        raise Wrong(f"outputs differ by {_apart(_first(got), _first(expected))}, {described}")
    return label


def _first(output: Any) -> Tensor:
    while not isinstance(output, Tensor):
        output = output[0]
    return output


def _apart(one: Tensor, two: Tensor) -> float:
    if one.shape != two.shape or one.dtype != two.dtype:
        raise Wrong(f"expected {tuple(two.shape)} {two.dtype}, got {tuple(one.shape)} {one.dtype}")
    return float(relative(join_patches(one), join_patches(two)) if one.dim() == 4 else relative(one, two))


def share_work(threads: int, busy: bool) -> None:
    """Have kernels use so many threads from now on, as on a machine whose cores are busy or not."""
    torch.set_num_threads(threads)
    for kernel in (conv, attention, recurrent):
        with suppress(Unsupported):
            kernel.library().torchpact_pretend(threads, int(busy))
