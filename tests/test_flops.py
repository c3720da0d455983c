import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import torchpact as tp
from torchpact.core.ponder import Ponder
from torchpact.flops.count import FlopCount, count_flops, flops_from_ponders, max_flops
from torchpact.models import HaltingHead, ResNetConfig, build, psact_resnet32, resnet32, resnet110

CHANNELS = (16, 32, 64)


def tiny(mode=None, **settings):
    torch.manual_seed(0)
    return build(ResNetConfig(**{"units": 3, "image_size": 8} | settings), mode)


def set_heads(model, bias, scale=0.0):
    for module in model.modules():
        if isinstance(module, HaltingHead):
            module.linear.weight.data.mul_(scale)
            module.linear.bias.data.fill_(bias)
            if module.conv is not None:
                module.conv.weight.data.mul_(scale)
    return model


def ponder_of(steps, length):
    """A ponder of which only the steps matter, given as (batch, rows, columns)."""
    steps = torch.as_tensor(steps).unsqueeze(1)
    nothing = torch.zeros(steps.shape)
    return Ponder(torch.zeros(length, *steps.shape), steps, nothing, nothing, None)


# --- the reference: one position after the other ---


def reference(config, maps, height, width, heads=True):
    """FLOPs of a single image per block, from nested lists of the steps of every pixel."""
    totals = []
    for k, steps in enumerate(maps):
        c, size_h, size_w = CHANNELS[k] * config.width, len(steps), len(steps[0])
        before = CHANNELS[max(k - 1, 0)] * config.width
        total = 0
        for unit in range(1, config.units + 1):
            first_conv, second_conv, head_conv, any_active = 0, 0, 0, False
            for i in range(size_h):
                for j in range(size_w):
                    active = unit == 1 or steps[i][j] >= unit
                    needed = unit == 1
                    for di in (-1, 0, 1):
                        for dj in (-1, 0, 1):
                            y, x = i + di, j + dj
                            if 0 <= y < size_h and 0 <= x < size_w and steps[y][x] >= unit:
                                needed = True
                    first_conv += needed
                    second_conv += active
                    head_conv += active
                    any_active = any_active or active
            total += first_conv * 2 * 9 * (before if unit == 1 else c) * c
            total += second_conv * 2 * 9 * c * c
            if unit < config.units and heads:
                total += head_conv * 2 * 9 * c if config.per == "pixel" else 0
                total += 2 * c if any_active else 0
        totals.append(total)
    rest = height * width * 2 * 9 * 3 * 16 * config.width + 2 * 64 * config.width * config.classes
    return totals, rest


def pixel_maps(ponders, image, sizes):
    """The steps of every pixel of one image, as nested lists."""
    maps = []
    for ponder, (height, width) in zip(ponders, sizes, strict=True):
        steps = ponder.steps[image, 0]
        down, across = height // steps.size(0), width // steps.size(1)
        maps.append([[int(steps[i // down, j // across]) for j in range(width)] for i in range(height)])
    return maps


# --- known numbers ---


@pytest.mark.parametrize(("make", "flops"), [(resnet32, 137_725_184), (resnet110, 505_775_360)])
def test_vanilla_networks_cost_what_sacts_counter_says(make, flops):
    model = make()
    count = count_flops(model, torch.zeros(2, 3, 32, 32))
    assert count.total.tolist() == [flops, flops]
    assert count.blocks.shape == (2, 3)
    assert count.total.dtype == torch.int64
    assert max_flops(model) == flops
    with FlopCounterMode(display=False) as counter:  # torch's own opinion
        model(torch.zeros(2, 3, 32, 32))
    assert counter.get_total_flops() == 2 * flops


@pytest.mark.parametrize("units", [1, 2, 7])
def test_vanilla_flops_are_linear_in_the_units(units):
    model = build(ResNetConfig(units=units, adaptive=False))
    assert max_flops(model) == 28_311_552 * units - 3_832_576


def test_an_adaptive_network_that_never_halts_costs_the_vanilla_one_and_its_heads():
    model = set_heads(psact_resnet32(mode="thresholded"), -50)
    heads = 4 * sum(2 * 9 * c * side**2 + 2 * c for c, side in ((16, 32), (32, 16), (64, 8)))
    count = count_flops(model, torch.randn(2, 3, 32, 32))
    assert count.total.tolist() == [137_725_184 + heads] * 2
    assert max_flops(model) == 137_725_184 + heads
    # what torch counts is all units, and heads that project before they pool: a tenth product a position
    projected = 4 * sum(2 * 10 * c * side**2 for c, side in ((16, 32), (32, 16), (64, 8)))
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, 3, 32, 32))
    assert counter.get_total_flops() == 137_725_184 + projected


def test_when_all_halt_at_once_the_first_units_and_their_heads_are_left():
    model = set_heads(psact_resnet32(mode="thresholded"), 50)
    count = count_flops(model, torch.randn(3, 3, 32, 32))
    first = [2 * 9 * 1024 * 2 * 16 * 16, 2 * 9 * 256 * (16 + 32) * 32, 2 * 9 * 64 * (32 + 64) * 64]
    heads = [2 * 9 * c * side**2 + 2 * c for c, side in ((16, 32), (32, 16), (64, 8))]
    assert count.blocks.tolist() == [[f + h for f, h in zip(first, heads, strict=True)]] * 3
    assert count.rest == 2 * 9 * 1024 * 3 * 16 + 2 * 64 * 10


# --- single positions in the first block: 16 channels, 8×8 pixels, three units ---

CONV = 2 * 9 * 16 * 16
HEAD = 2 * 9 * 16
LINEAR = 2 * 16
BASE = 64 * (2 * CONV + HEAD) + LINEAR


@pytest.mark.parametrize(
    ("pixels", "dilated"),
    [
        ([(3, 4)], 9),
        ([(0, 4)], 6),
        ([(3, 7)], 6),
        ([(0, 0)], 4),
        ([(7, 7)], 4),
        ([(3, 3), (3, 4)], 12),
        ([(3, 3), (4, 4)], 14),
        ([(0, 0), (0, 1)], 6),
        ([(1, 1), (6, 6)], 18),
    ],
)
def test_a_few_active_positions_cost_their_neighbourhood(pixels, dilated):
    model = tiny()
    for last in (2, 3):
        steps = torch.ones(1, 8, 8, dtype=torch.long)
        for i, j in pixels:
            steps[0, i, j] = last
        others = [ponder_of(torch.ones(1, s, s, dtype=torch.long), 3) for s in (4, 2)]
        count = flops_from_ponders(model, [ponder_of(steps, 3), *others], (1, 3, 8, 8))
        unit = dilated * CONV + len(pixels) * CONV
        head = len(pixels) * HEAD + LINEAR
        # the second unit has a head, the third and last has none
        assert count.blocks[0, 0] == BASE + (unit + head if last == 2 else 2 * unit + head)
        expected, rest = reference(model.config, [steps[0].tolist(), [[1] * 4] * 4, [[1] * 2] * 2], 8, 8)
        assert (count.blocks[0].tolist(), count.rest) == (expected, rest)


# --- whole runs ---


@pytest.mark.parametrize("mode", ["relaxed", "discrete", "thresholded", "act"])
@pytest.mark.parametrize(
    "settings",
    [{}, {"units": 5}, {"group": 2}, {"per": "image"}, {"width": 2, "classes": 3}, {"odd": True}],
    ids=str,
)
def test_a_run_costs_what_its_masks_say(mode, settings):
    settings = dict(settings)
    height, width = (7, 5) if settings.pop("odd", False) else (8, 8)
    model = set_heads(tiny(mode, **settings), -0.5, scale=3.0).eval()
    # images of different contrast, so that halting per image differs too
    images = torch.randn(4, 3, height, width) * torch.tensor([0.0, 0.5, 2.0, 8.0]).view(4, 1, 1, 1)
    with torch.no_grad():
        _, ponders = model(images)
    count = flops_from_ponders(model, ponders, images.shape)
    sizes = [(height, width), ((height + 1) // 2, (width + 1) // 2)]
    sizes.append(((sizes[1][0] + 1) // 2, (sizes[1][1] + 1) // 2))
    for image in range(4):
        expected, rest = reference(model.config, pixel_maps(ponders, image, sizes), height, width)
        assert count.blocks[image].tolist() == expected
        assert count.rest == rest
        assert count.total[image] == sum(expected) + rest
    assert len(count.total.unique()) > 1, "all images cost the same: the comparison is empty"
    assert count.total.max() <= max_flops(model, images.shape)


@pytest.mark.parametrize("mode", [tp.Thresholded(), tp.ACT()], ids=["thresholded", "act"])
def test_counting_runs_the_network_in_its_present_mode(mode):
    model = set_heads(tiny(mode), -0.5, scale=3.0).eval()
    images = torch.randn(4, 3, 8, 8)
    with torch.no_grad():
        _, ponders = model(images)
    expected = flops_from_ponders(model, ponders, images.shape)
    assert torch.equal(count_flops(model, images).blocks, expected.blocks)


def test_thresholded_costs_no_more_than_act_of_the_same_weights():
    # h > 1/2 does not yet end ACT's sum, so its positions run at least as long
    model = set_heads(tiny(per="image", units=5), 0.5)
    images = torch.randn(2, 3, 8, 8)
    totals = []
    for mode in ("thresholded", "act"):
        with tp.use_mode(model, mode):
            totals.append(count_flops(model, images).total)
    assert (totals[0] < totals[1]).all()


def test_counting_leaves_the_model_as_it_was():
    model = tiny("thresholded").train()
    model.norm.eval()  # as a frozen part would be
    before = {key: value.clone() for key, value in model.state_dict().items()}
    count_flops(model, torch.randn(2, 3, 8, 8))
    assert model.training
    assert not model.norm.training
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key]), key


def test_a_relaxed_mask_counts_where_it_is_above_zero():
    # at this temperature ξ̂ is about 1/2, so that r is 1/2 and then 1/4: soft, and charged in full
    model = set_heads(tiny(tp.Relaxed(temperature=1e3)), 0.0)
    assert count_flops(model, torch.randn(2, 3, 8, 8)).total.tolist() == [max_flops(model)] * 2


def test_images_are_counted_one_by_one_whatever_the_batch():
    model = set_heads(tiny("thresholded", units=4), -0.5, scale=3.0).eval()
    images = torch.randn(5, 3, 8, 8)
    together = count_flops(model, images).blocks
    alone = [count_flops(model, images[i : i + 1]).blocks for i in range(5)]
    assert torch.equal(together, torch.cat(alone))


@pytest.mark.parametrize("adaptive", [True, False])
def test_a_batch_of_none_costs_nothing_but_is_counted(adaptive):
    count = count_flops(tiny("thresholded", adaptive=adaptive), torch.zeros(0, 3, 8, 8))
    assert count.blocks.shape == (0, 3)
    assert count.total.shape == (0,)
    assert count.rest > 0


def test_a_compiled_network_is_counted_as_the_network_it_is():
    model = resnet32()
    compiled = torch.compile(model, backend="eager")
    assert isinstance(compiled, nn.Module)
    assert count_flops(compiled, torch.zeros(1, 3, 32, 32)).total.tolist() == [137_725_184]


# --- other modules ---


class Functional(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(5, 7))

    def forward(self, x):
        return nn.functional.linear(x, self.weight)


@pytest.mark.parametrize(
    ("model", "shape", "flops"),
    [
        (nn.Linear(7, 5), (7,), 2 * 7 * 5),
        (Functional(), (7,), 2 * 7 * 5),
        (nn.Conv2d(4, 6, 3, stride=2, padding=1), (4, 9, 8), 2 * 9 * 4 * 6 * 5 * 4),
        (nn.Conv2d(4, 8, 3, groups=4), (4, 6, 6), 2 * 9 * 1 * 8 * 4 * 4),
        (nn.Conv1d(2, 3, 5), (2, 11), 2 * 5 * 2 * 3 * 7),
        (nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 2)), (7,), 2 * (35 + 10)),
        (nn.ReLU(), (3,), 0),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else None,
)
@pytest.mark.parametrize("batch", [0, 1, 3])
def test_any_plain_module_is_counted(model, shape, flops, batch):
    count = count_flops(model, torch.zeros(batch, *shape))
    assert count.total.tolist() == [flops] * batch
    assert count.rest == flops
    assert count.blocks.shape == (batch, 0)


def test_mean_and_spread_are_over_images():
    count = FlopCount(blocks=torch.tensor([[10, 20], [30, 40], [50, 0]]), rest=5)
    assert count.total.tolist() == [35, 75, 55]
    assert count.mean.item() == 55
    assert count.std.item() == pytest.approx((800 / 3) ** 0.5)
    assert FlopCount(blocks=torch.tensor([[7]]), rest=0).std.item() == 0


def test_sums_over_many_units_stay_exact():
    # 505,775,360 is past the 2²⁴ up to which a float counts every integer
    model = build(ResNetConfig(units=18, per="image"))
    steps = torch.ones(1, 32, 32, dtype=torch.long)
    steps[0, 5, 5] = 2
    ones = [ponder_of(torch.ones(1, s, s, dtype=torch.long), 18) for s in (16, 8)]
    count = flops_from_ponders(build(ResNetConfig(units=18)), [ponder_of(steps, 18), *ones], (1, 3, 32, 32))
    steps[0, 5, 5] = 1
    less = flops_from_ponders(build(ResNetConfig(units=18)), [ponder_of(steps, 18), *ones], (1, 3, 32, 32))
    assert count.total - less.total == (9 + 1) * CONV + HEAD + LINEAR
    # 17 units skipped, the first head's linear layer kept: per image there is nothing in between
    assert max_flops(model) - 505_775_360 == 17 * 2 * (16 + 32 + 64)


# --- refusals ---


def test_what_cannot_be_counted_is_refused_in_one_line():
    with pytest.raises(TypeError, match=r"^expected a torchpact ResNet, got Linear$"):
        max_flops(nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"^expected a torchpact ResNet, got Linear$"):
        flops_from_ponders(nn.Linear(2, 2), [], (1, 3, 8, 8))


def test_ponders_that_do_not_belong_to_the_network_are_refused_in_one_line():
    model = tiny()
    ponders = [ponder_of(torch.ones(2, s, s, dtype=torch.long), 3) for s in (8, 4, 2)]
    with pytest.raises(ValueError, match=r"^expected 3 ponders for 3 adaptive blocks, got 2$"):
        flops_from_ponders(model, ponders[:2], (2, 3, 8, 8))
    with pytest.raises(ValueError, match=r"^expected 0 ponders for 0 adaptive blocks, got 3$"):
        flops_from_ponders(tiny(adaptive=False), ponders, (2, 3, 8, 8))
    with pytest.raises(ValueError, match=r"^expected ponders of 3 images, got 2$"):
        flops_from_ponders(model, ponders, (3, 3, 8, 8))
    with pytest.raises(ValueError, match=r"^expected ponders of a map of 9×9 pixels, got 8×8 positions$"):
        flops_from_ponders(model, ponders, (2, 3, 9, 9))
    with pytest.raises(ValueError, match=r"^expected a shape of \(batch, 3, height, width\), got \(8, 8\)$"):
        flops_from_ponders(model, ponders, (8, 8))


# --- networks of residual units that were made adaptive ---


@pytest.mark.parametrize("per", ["pixel", "example"])
def test_an_adapted_resnet_costs_what_its_ponders_say_and_its_heads(per):
    torch.manual_seed(0)
    config = ResNetConfig(units=3, image_size=8, adaptive=False)
    net, images = tp.adapt(build(config), per=per).eval(), torch.randn(6, 3, 8, 8)
    for run in net.torchpact.runs:
        for head in run.heads:
            nn.init.normal_(head.weight, std=2.0)
            nn.init.zeros_(head.bias)
    with tp.collect(net) as ponders, torch.no_grad():
        net(images)
    count = count_flops(net, images)
    assert any(len(ponder.steps.unique()) > 1 for ponder in ponders)  # something halts, something goes on
    for example in range(len(images)):
        steps = [
            ponder.steps[example, 0].expand(side, side)
            for ponder, side in zip(ponders, (8, 4, 2), strict=True)
        ]
        units, _ = reference(config, [each.tolist() for each in steps], 8, 8, heads=False)
        for block, ponder in enumerate(ponders):
            asked = sum(int((ponder.steps[example] > index).sum()) for index in range(2))
            assert int(count.blocks[example, block]) == units[block] + asked * 2 * CHANNELS[block]


def test_a_plain_resnet_is_priced_by_its_blocks_before_and_by_its_runs_after_it_is_adapted():
    net, images = tiny(adaptive=False), torch.randn(2, 3, 8, 8)
    before = count_flops(net.eval(), images)
    after = count_flops(tp.adapt(net, per="example").eval(), images)
    assert after.plain == float(before.total[0])
    assert after.blocks.shape == (2, 3)
