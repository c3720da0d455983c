import dataclasses
import json
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torchpact as tp
from torchpact.core.relaxation import logistic_noise
from torchpact.models import (
    HaltingHead,
    ResidualUnit,
    ResNet,
    ResNetConfig,
    build,
    psact_resnet32,
    psact_resnet110,
    resnet32,
    resnet110,
    warm_start,
)
from torchpact.nn.conv_units import shortcut as unit_shortcut

MODES = [tp.Relaxed(), tp.Discrete(), tp.Thresholded(), tp.ACT()]
MODE_NAMES = ["relaxed", "discrete", "thresholded", "act"]


def tiny(mode=None, seed=0, **settings):
    torch.manual_seed(seed)
    return build(ResNetConfig(**{"units": 2, "image_size": 8} | settings), mode)


def plain(seed=0, **settings):
    return tiny(seed=seed, adaptive=False, **settings)


def images(batch=2, height=8, width=8, seed=1):
    return torch.randn(batch, 3, height, width, generator=torch.Generator().manual_seed(seed))


def randomize(model, seed=0):
    """Give batch norm something to do, and halting logits a spread on both sides of zero."""
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.weight, 1, 0.2, generator=generator)
            nn.init.normal_(module.bias, 0, 0.2, generator=generator)
            module.get_buffer("running_mean").normal_(0, 0.2, generator=generator)
            module.get_buffer("running_var").uniform_(0.5, 1.5, generator=generator)
        if isinstance(module, HaltingHead):
            nn.init.normal_(module.linear.weight, 0, 1, generator=generator)
            nn.init.constant_(module.linear.bias, -0.3)
    return model


def saturate(model, bias):
    for module in model.modules():
        if isinstance(module, HaltingHead):
            nn.init.zeros_(module.linear.weight)
            nn.init.constant_(module.linear.bias, bias)
            if module.conv is not None:
                nn.init.zeros_(module.conv.weight)
    return model


# --- the reference: the paper's algorithms 1 to 4 with eq. 28, position by position ---


def batch_norm(norm, x):
    scale = norm.weight / (norm.running_var + 1e-3).sqrt()
    return (x - norm.running_mean.view(-1, 1, 1)) * scale.view(-1, 1, 1) + norm.bias.view(-1, 1, 1)


def residual(unit, u):
    x = F.conv2d(F.relu(batch_norm(unit.norm1, u)), unit.conv1.weight, stride=unit.conv1.stride, padding=1)
    return F.conv2d(F.relu(batch_norm(unit.norm2, x)), unit.conv2.weight, padding=1)


def shortcut(u, channels, downsample):
    if downsample:
        batch, inputs, height, width = u.shape
        pooled = torch.zeros(batch, channels, math.ceil(height / 2), math.ceil(width / 2))
        for i in range(pooled.size(2)):
            for j in range(pooled.size(3)):
                window = u[:, :, 2 * i : 2 * i + 2, 2 * j : 2 * j + 2]
                pooled[:, inputs // 2 : inputs // 2 + inputs, i, j] = window.mean((2, 3))
        return pooled
    return u


def halting_logits(head, u, config):
    pooled = u.mean((2, 3), keepdim=True)
    local = u
    if config.halting_norm:
        pooled = F.relu(batch_norm(head.pooled_norm, pooled))
        local = F.relu(batch_norm(head.norm, u)) if config.per == "pixel" else u
    logits = (head.linear.weight * pooled[:, :, 0, 0]).sum(1) + head.linear.bias
    logits = logits.view(-1, 1, 1, 1)
    return logits + F.conv2d(local, head.conv.weight, padding=1) if config.per == "pixel" else logits


def patches(config, height, width):
    """The pixels of every position, as slices, under the position's row and column."""
    if config.per == "image":
        return {(0, 0): (slice(0, height), slice(0, width))}
    n = config.group
    return {
        (i, j): (slice(i * n, i * n + n), slice(j * n, j * n + n))
        for i in range(height // n)
        for j in range(width // n)
    }


def reference_block(block, u, mode, config, generator):
    units = block.steps
    u = shortcut(u, units[0].conv1.out_channels, units[0].conv1.stride == (2, 2)) + residual(units[0], u)
    batch, _, height, width = u.shape
    where = patches(config, height, width)
    rows, columns = max(i for i, _ in where) + 1, max(j for _, j in where) + 1
    output = torch.zeros_like(u)
    left = torch.ones(batch, 1, rows, columns)
    steps = torch.ones(batch, 1, rows, columns, dtype=torch.long)
    probs = torch.ones(len(units), batch, 1, rows, columns)
    for index, unit in enumerate(units):
        if index > 0:
            mask = torch.zeros(batch, 1, height, width)
            for b in range(batch):
                for (i, j), pixels in where.items():
                    r = left[b, 0, i, j].item()
                    if isinstance(mode, tp.Relaxed):
                        r = r if r > mode.clip else 0.0
                    else:
                        r = 1.0 if r > 0 else 0.0
                    steps[b, 0, i, j] += r > 0
                    mask[b, 0][pixels] = r
            before = u
            u = u + residual(unit, u) * mask
            # halted pixels keep their features, whatever their neighbours do
            assert torch.equal(torch.where(mask == 0, u, 0), torch.where(mask == 0, before, 0))
        last = index == len(units) - 1
        noise = torch.zeros_like(left)
        if not last:
            logits = halting_logits(block.halting[index], u, config)
            if isinstance(mode, tp.Relaxed | tp.Discrete):
                noise = logistic_noise(left, generator)
        for b in range(batch):
            for (i, j), pixels in where.items():
                r = left[b, 0, i, j].item()
                if last:
                    weight = r
                else:
                    logit = logits[b, 0][pixels].mean() if config.per == "pixel" else logits[b, 0, 0, 0]
                    h = torch.sigmoid(logit).item()
                    probs[index, b, 0, i, j] = h
                    e = noise[b, 0, i, j].item()
                    if isinstance(mode, tp.Relaxed):
                        weight = r / (1 + math.exp(-(logit.item() + e) / mode.temperature))
                    elif isinstance(mode, tp.Discrete):
                        weight = r if logit.item() + e > 0 else 0.0
                    elif isinstance(mode, tp.Thresholded):
                        weight = r if h > mode.threshold else 0.0
                    else:
                        weight = h if r - h > mode.eps else r
                left[b, 0, i, j] = r - weight
                output[b][(slice(None), *pixels)] += weight * u[b][(slice(None), *pixels)]
    return output, steps, probs


def reference_forward(model, x, mode, generator):
    u = F.conv2d(x, model.stem.weight, padding=1)
    all_steps, all_probs = [], []
    for block in model.blocks:
        u, steps, probs = reference_block(block, u, mode, model.config, generator)
        all_steps.append(steps)
        all_probs.append(probs)
    pooled = F.relu(batch_norm(model.norm, u)).mean((2, 3))
    return pooled @ model.classifier.weight.T + model.classifier.bias, all_steps, all_probs


CASES = [
    {"units": 2},
    {"units": 3},
    {"units": 3, "halting_norm": True},
    {"units": 3, "per": "image"},
    {"units": 3, "per": "image", "halting_norm": True},
    {"units": 3, "group": 2, "image_size": 8},
]


@pytest.mark.parametrize("mode", MODES, ids=MODE_NAMES)
@pytest.mark.parametrize("settings", CASES, ids=str)
def test_forward_is_the_papers_algorithm_position_by_position(settings, mode):
    # odd maps of 7×5, 4×3 and 2×2, except where patches must tile them
    height, width = (8, 8) if "group" in settings else (7, 5)
    model = randomize(tiny(**settings)).eval()
    x = images(4, height, width)
    generator = torch.Generator()
    if isinstance(mode, tp.Relaxed | tp.Discrete):
        mode = dataclasses.replace(mode, generator=generator)
    tp.use_mode(model, mode)

    generator.manual_seed(3)
    logits, ponders = model(x)  # with gradients, so that all units run and draw their noise
    generator.manual_seed(3)
    with torch.no_grad():
        expected, steps, probs = reference_forward(model, x, mode, generator)

    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    for ponder, s, p in zip(ponders, steps, probs, strict=True):
        assert torch.equal(ponder.steps, s)
        torch.testing.assert_close(ponder.probs, p, rtol=1e-4, atol=1e-5)
    # the comparison must not be won by everyone doing the same
    assert len({int(s) for ponder in ponders for s in ponder.steps.flatten()}) > 1


@pytest.mark.parametrize("mode", [tp.Thresholded(), tp.ACT()], ids=["thresholded", "act"])
@pytest.mark.parametrize("group", [1, 2])
def test_leaving_early_changes_neither_output_nor_steps(mode, group):
    model = randomize(tiny(mode, units=4, group=group)).eval()
    x = images(3)
    logits, ponders = model(x)
    with torch.no_grad():
        early, early_ponders = model(x)
    torch.testing.assert_close(early, logits, rtol=1e-5, atol=1e-5)
    for ponder, other in zip(ponders, early_ponders, strict=True):
        assert torch.equal(ponder.steps, other.steps)


@pytest.mark.parametrize("mode", [tp.Discrete(), tp.Thresholded()], ids=["discrete", "thresholded"])
def test_halted_positions_keep_their_features_from_unit_to_unit(mode):
    model = randomize(tiny(mode, units=4)).eval()
    states: list[torch.Tensor] = []
    for module in model.modules():
        if isinstance(module, ResidualUnit):
            module.register_forward_hook(lambda _, __, u: states.append(u))
    _, ponders = model(images(3))
    for k, ponder in enumerate(ponders):
        for ran in range(1, 4):
            before, after = states[4 * k + ran - 1], states[4 * k + ran]
            assert torch.equal((before != after).any(1, keepdim=True), ponder.steps > ran)
    assert {1, 4} <= {int(s) for ponder in ponders for s in ponder.steps.flatten()}


# --- architecture ---


@pytest.mark.parametrize(
    ("make", "layers"), [(resnet32, 32), (resnet110, 110), (psact_resnet32, 32), (psact_resnet110, 110)]
)
def test_the_name_counts_the_layers(make, layers):
    # stem, two convolutions a unit and the classifier; halting heads are not counted
    names = [n for n, m in make().named_modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    assert len([n for n in names if ".halting." not in n]) == layers


def test_parameters_are_as_many_as_counted_by_hand():
    convs = 9 * (3 * 16 + 10 * 16 * 16 + 16 * 32 + 9 * 32 * 32 + 32 * 64 + 9 * 64 * 64)
    classifier = 64 * 10 + 10
    # a unit has a norm over its input and one over its output; and one more before the classifier
    norms = 2 * (10 * 16 + (16 + 9 * 32) + (32 + 9 * 64) + 64)
    assert sum(p.numel() for p in resnet32().parameters()) == convs + classifier + norms
    heads = 4 * sum(9 * c + c + 1 for c in (16, 32, 64))
    assert sum(p.numel() for p in psact_resnet32().parameters()) == convs + classifier + norms + heads


def test_width_multiplies_the_channels():
    model = plain(width=3)
    assert [block.steps[-1].conv2.out_channels for block in model.blocks] == [48, 96, 192]


def test_weights_start_with_variance_two_over_fan_in_and_heads_with_bias_minus_three():
    model = psact_resnet32(width=2)
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            assert module.bias is None
        if isinstance(module, nn.Conv2d) and module.weight.numel() > 5000:
            # the standard error of a variance of n normal draws is √(2/n) of it: 2 % of 5000 at most
            assert module.weight.detach().var() * module.weight[0].numel() / 2 == pytest.approx(1, abs=0.1)
        if isinstance(module, nn.BatchNorm2d):
            assert (module.eps, module.momentum) == (1e-3, 0.1)
        if isinstance(module, HaltingHead):
            assert module.linear.bias.item() == -3
    assert not model.classifier.bias.any()


def test_the_shortcut_averages_pixels_and_pads_channels_on_both_sides():
    u = torch.arange(2 * 16 * 3 * 5, dtype=torch.float).view(2, 16, 3, 5)
    out = unit_shortcut(u, stride=2, padding=16)
    assert out.shape == (2, 32, 2, 3)
    assert not out[:, :8].any()
    assert not out[:, 24:].any()
    torch.testing.assert_close(out[:, 8:24, 0, 0], u[:, :, :2, :2].mean((2, 3)))
    torch.testing.assert_close(out[:, 8:24, 1, 2], u[:, :, 2, 4])


# --- latents and groups ---


@pytest.mark.parametrize(("group", "latents"), [(1, 1344), (2, 336), (4, 84), (8, 21)])
def test_grouping_leaves_the_papers_number_of_latents(group, latents):
    model = build(ResNetConfig(units=2, group=group), mode="discrete")
    assert model.latents == latents
    with torch.no_grad():
        _, ponders = model(images(1, 32, 32))
    assert sum(ponder.steps[0].numel() for ponder in ponders) == latents
    assert [tuple(p.probs.shape) for p in ponders] == [(2, 1, 1, s // group, s // group) for s in (32, 16, 8)]
    assert all(p.log_prob.shape == p.steps.shape == p.cost.shape for p in ponders)


def test_per_image_halting_has_one_latent_a_block():
    model = tiny("discrete", per="image")
    _, ponders = model(images(5))
    assert model.latents == 3
    assert [tuple(ponder.steps.shape) for ponder in ponders] == [(5, 1, 1, 1)] * 3


def test_a_patch_shares_one_draw():
    # with h = 1/2 sixteen pixels of a patch would agree by chance once in 32,768 patches
    model = saturate(tiny("discrete", group=4, image_size=16), 0.0)
    seen: list[torch.Tensor] = []
    model.blocks[0].steps[1].register_forward_hook(lambda _, args, out: seen.extend((args[0], out)))
    _, ponders = model(images(8, 16, 16))
    before, after = (u.flatten(4).flatten(2, 3) for u in seen)
    moved = (before != after).any(1, keepdim=True)
    steps = ponders[0].steps
    assert steps.unique().tolist() == [1, 2]
    assert torch.equal(moved, steps.repeat_interleave(4, 2).repeat_interleave(4, 3) == 2)


def test_a_patch_has_the_mean_of_its_logits():
    torch.manual_seed(0)
    single, grouped = HaltingHead(16), HaltingHead(16, group=2)
    grouped.load_state_dict(single.state_dict())
    u = torch.randn(2, 16, 6, 4)
    expected = F.avg_pool2d(single(u), 2)
    torch.testing.assert_close(grouped(u)[:, :, :, 0, :, 0], expected)


def test_the_cost_of_equal_decisions_does_not_depend_on_the_group():
    costs = []
    for group in (1, 2, 4):
        model = saturate(tiny("thresholded", group=group, image_size=16), 1.5)
        _, ponders = model(images(2, 16, 16))
        costs.append(tp.map_loss(torch.zeros(2), ponders, tau=1.0))
    # 1 + (1 − σ(1.5)) a block
    assert torch.stack(costs).tolist() == pytest.approx([3 * (1 + 1 / (1 + math.exp(1.5)))] * 3)


# --- modes agree where they must ---


@pytest.mark.parametrize("settings", [{}, {"group": 2}, {"per": "image"}], ids=str)
@pytest.mark.parametrize("bias", [-50, 50])
def test_modes_agree_when_heads_are_saturated(settings, bias):
    model = saturate(tiny(units=3, **settings), bias).eval()
    outputs = []
    for mode in MODES:
        with tp.use_mode(model, mode):
            logits, ponders = model(images())
        outputs.append(logits)
        for ponder in ponders:
            assert torch.all(ponder.steps == (1 if bias > 0 else 3))
    for logits in outputs[1:]:
        torch.testing.assert_close(logits, outputs[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mode", MODES, ids=MODE_NAMES)
@pytest.mark.parametrize("settings", [{}, {"group": 2}, {"per": "image"}, {"halting_norm": True}], ids=str)
def test_an_adaptive_network_that_never_halts_is_the_plain_one(settings, mode):
    source = randomize(plain(seed=5, units=3)).eval()
    model = tiny(mode, units=3, **settings)
    saturate(warm_start(model, source), -50).eval()
    with torch.no_grad():
        assert torch.equal(model(images())[0], source(images())[0])


# --- warm start ---


def test_warm_start_copies_all_but_the_heads_batch_norm_statistics_included():
    source = plain(seed=1)
    source(images())  # moves the statistics
    model = tiny(seed=2, halting_norm=True)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    assert warm_start(model, source) is model
    theirs = source.state_dict()
    after = model.state_dict()
    assert {key for key in after if key not in theirs} == {key for key in after if ".halting." in key}
    assert set(theirs) <= set(after)
    for key, value in after.items():
        assert torch.equal(value, theirs.get(key, before[key])), key
    assert not torch.equal(after["norm.running_mean"], before["norm.running_mean"])


def test_a_plain_network_goes_on_from_another():
    source = plain(seed=1)
    for ours, theirs in zip(
        warm_start(plain(seed=2), source).state_dict().values(), source.state_dict().values(), strict=True
    ):
        assert torch.equal(ours, theirs)


def test_warm_start_copies_rather_than_shares():
    source = plain(seed=1)
    model = warm_start(tiny(seed=2), source)
    with torch.no_grad():
        model.stem.weight.zero_()
    assert source.stem.weight.any()


@pytest.mark.parametrize(
    ("adaptive", "source", "message"),
    [
        (
            tiny(),
            plain(units=3),
            "expected networks of equal depth, got a ResNet-14 and a ResNet-20 to start from",
        ),
        (tiny(width=2), plain(), "expected networks of equal width, got 2 and 1 to start from"),
        (tiny(), plain(classes=3), "expected networks of equal classes, got 10 and 3 to start from"),
        (tiny(), tiny(), "expected a plain ResNet, got an adaptive ResNet"),
        (nn.Linear(2, 2), plain(), "expected a ResNet, got Linear"),
        (tiny(), nn.Linear(2, 2), "expected a plain ResNet, got Linear"),
    ],
)
def test_warm_start_refuses_networks_that_do_not_match(adaptive, source, message):
    with pytest.raises(ValueError) as error:  # noqa: PT011 (the message is compared in full below)
        warm_start(adaptive, source)
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


# --- training ---


def assert_every_parameter_learns(model):
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.any(), name


@pytest.mark.parametrize("settings", [{}, {"group": 2}, {"per": "image"}, {"halting_norm": True}], ids=str)
@pytest.mark.parametrize("mode", ["relaxed", "act", "discrete"])
def test_gradients_reach_every_parameter(mode, settings):
    model = tiny(mode, units=3, halting_bias=-1.0, **settings)
    logits, ponders = model(images(16))
    nll = F.cross_entropy(logits, torch.arange(16) % 10, reduction="none")
    loss = tp.reinforce_loss if mode == "discrete" else tp.map_loss
    loss(nll, ponders, tau=0.01).backward()
    assert_every_parameter_learns(model)


def test_a_plain_network_learns_with_the_same_code():
    model = plain()
    logits, ponders = model(images(4))
    assert ponders == []
    nll = F.cross_entropy(logits, torch.arange(4), reduction="none")
    tp.map_loss(nll, ponders, tau=0.01).backward()
    assert_every_parameter_learns(model)


# --- storage and configuration ---


@pytest.mark.parametrize("settings", [{}, {"group": 2}, {"per": "image", "halting_norm": True}], ids=str)
def test_a_checkpoint_of_configuration_and_state_rebuilds_the_network(settings, tmp_path):
    model = randomize(tiny("thresholded", **settings)).eval()
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    text = json.dumps(dataclasses.asdict(model.config))
    again = build(ResNetConfig(**json.loads(text)), mode="thresholded").eval()
    again.load_state_dict(torch.load(tmp_path / "weights.pt", weights_only=True))
    assert again.config == model.config
    assert torch.equal(again(images())[0], model(images())[0])


def test_groups_share_one_state_dict():
    # the same weights may be tried at any number of latents
    assert tiny(group=1).state_dict().keys() == tiny(group=2).state_dict().keys()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"units": 0, "adaptive": False}, "expected units to be an integer of at least 1, got 0"),
        ({"units": 1}, "expected units of an adaptive network to be an integer of at least 2, got 1"),
        ({"width": 0.5}, "expected width to be an integer of at least 1, got 0.5"),
        ({"classes": "10"}, "expected classes to be an integer of at least 1, got '10'"),
        ({"adaptive": 1}, "expected adaptive to be True or False, got 1"),
        ({"halting_norm": None}, "expected halting_norm to be True or False, got None"),
        ({"per": "row"}, "expected per to be 'pixel' or 'image', got 'row'"),
        ({"group": 0}, "expected group to be an integer of at least 1, got 0"),
        ({"group": 3}, "expected a group that divides the maps of 32×32, 16×16, 8×8 pixels, got 3"),
        ({"group": 16}, "expected a group that divides the maps of 32×32, 16×16, 8×8 pixels, got 16"),
        ({"per": "image", "group": 2}, "expected group=1 with per='image', which has no patches; got 2"),
        ({"halting_bias": math.nan}, "expected halting_bias in [-1e+18, 1e+18], got nan"),
        ({"halting_bias": "low"}, "expected halting_bias to be a number, got 'low'"),
        ({"image_size": 0}, "expected image_size to be an integer of at least 1, got 0"),
    ],
    ids=str,
)
def test_a_bad_configuration_is_refused_in_one_line(settings, message):
    with pytest.raises((ValueError, TypeError)) as error:
        ResNetConfig(**settings)
    assert str(error.value) == message


def test_only_a_configuration_is_built():
    with pytest.raises(TypeError, match="expected a ResNetConfig, got dict"):
        build({"units": 5})  # type: ignore[arg-type]


def test_images_whose_maps_the_group_does_not_divide_are_refused():
    model = build(ResNetConfig(units=2, group=8))
    message = "expected a group that divides the maps of 16×32, 8×16, 4×8 pixels, got 8"
    with pytest.raises(ValueError, match=f"^{message}$"):
        model(images(1, 16, 32))


@pytest.mark.parametrize("shape", [(3, 8, 8), (2, 1, 8, 8), (2, 8, 8, 3)])
def test_images_of_another_layout_are_refused(shape):
    with pytest.raises(ValueError, match=r"^expected images of shape \(batch, 3, height, width\), got \("):
        tiny()(torch.zeros(shape))


# --- environments ---


@pytest.mark.parametrize("mode", MODES, ids=MODE_NAMES)
@pytest.mark.parametrize("batch", [0, 1])
def test_evaluation_takes_batches_of_none_and_one(mode, batch):
    for settings in ({}, {"group": 2}, {"per": "image"}, {"halting_norm": True}):
        model = tiny(mode, **settings).eval()
        with torch.no_grad():
            logits, ponders = model(images(batch))
        assert logits.shape == (batch, 10)
        assert [len(ponder.steps) for ponder in ponders] == [batch] * 3


def test_an_image_gets_the_same_answer_alone_and_in_a_batch():
    model = randomize(tiny("thresholded", units=4)).eval()
    x = images(4)
    with torch.no_grad():
        together, ponders = model(x)
        for index in range(4):
            alone, alone_ponders = model(x[index : index + 1])
            torch.testing.assert_close(alone[0], together[index], rtol=1e-5, atol=1e-5)
            for one, many in zip(alone_ponders, ponders, strict=True):
                assert torch.equal(one.steps[0], many.steps[index])


@pytest.mark.parametrize("mode", MODES, ids=MODE_NAMES)
@pytest.mark.parametrize("group", [1, 2])
def test_bf16_autocast_keeps_halting_in_single_precision(mode, group):
    model = tiny(mode, units=3, group=group)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits, ponders = model(images())
    assert logits.dtype == torch.bfloat16
    for ponder in ponders:
        assert ponder.probs.dtype == ponder.cost.dtype == torch.float32
        assert ponder.cost.isfinite().all()
    nll = F.cross_entropy(logits.float(), torch.arange(2), reduction="none")
    tp.map_loss(nll, ponders, tau=0.01).backward()
    assert model.stem.weight.grad.isfinite().all()


def test_bf16_autocast_gives_nearly_the_same_logits():
    model = saturate(tiny("act", units=3), -2.0).eval()
    with torch.no_grad():
        expected, _ = model(images())
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits, _ = model(images())
    # eight bits a product, some twenty layers deep
    assert (logits - expected).norm() < 2e-2 * expected.norm()


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("mode", ["relaxed", "thresholded"])
def test_channels_last_stays_so_through_every_unit(mode, group):
    settings = {"units": 3, "group": group, "image_size": 16}
    model = randomize(tiny(mode, **settings)).eval()
    x = images(2, 16, 16)
    torch.manual_seed(0)
    expected, _ = model(x)
    model = model.to(memory_format=torch.channels_last)
    layouts: list[bool] = []
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            module.register_forward_hook(
                lambda _, args, __: layouts.append(args[0].is_contiguous(memory_format=torch.channels_last))
            )
    torch.manual_seed(0)
    logits, _ = model(x.to(memory_format=torch.channels_last))
    assert len(layouts) == 1 + 3 * 3 * 2
    assert all(layouts)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("mode", "group"), [("relaxed", 1), ("act", 1), ("relaxed", 2)])
def test_compiles_without_a_graph_break(mode, group):
    torch.compiler.reset()
    model = tiny(mode, group=group)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    results = []
    for run in (model, compiled):
        model.zero_grad()
        torch.manual_seed(0)
        logits, ponders = run(images())
        nll = F.cross_entropy(logits, torch.arange(2), reduction="none")
        loss = tp.map_loss(nll, ponders, tau=0.01)
        loss.backward()
        results.append((logits.detach(), loss.detach(), model.stem.weight.grad.clone()))
    for eager, traced in zip(*results, strict=True):
        torch.testing.assert_close(traced, eager, rtol=1e-4, atol=1e-5)


def test_the_model_prints_its_configuration():
    assert "ResNetConfig(units=2, width=1" in repr(tiny())
    assert isinstance(tiny(), ResNet)


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("group", [1, 2])
def test_a_head_computes_the_same_with_and_without_gradients(norm, group):
    head = HaltingHead(8, group=group, norm=norm).double().eval()
    u = torch.randn(3, 8, 4, 6, dtype=torch.double).to(memory_format=torch.channels_last)
    with torch.no_grad():
        expected = head(u)
    torch.testing.assert_close(head(u), expected)
