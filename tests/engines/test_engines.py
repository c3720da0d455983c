"""Every engine against the block itself, which computes everything and masks."""

from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import torchpact as tp
from tests.engines.networks import (
    block_of,
    bottlenecks_of,
    halt_outside,
    lively,
    relative,
    tell_heads,
    undecided,
)
from torchpact.core.call_args import CallArgs
from torchpact.engines import ENGINES, Unsupported
from torchpact.engines.base import NO_CONTEXT
from torchpact.engines.conv.native import engine as native
from torchpact.engines.cpp_build import build_library
from torchpact.nn.conv_units import join_patches
from torchpact.specs import block_spec

NEVER, ALWAYS = tp.Thresholds.NEVER, tp.Thresholds.ALWAYS


def built(name, block, u=None):
    spec, call = block_spec(block), NO_CONTEXT if u is None else CallArgs((u,))
    reason = ENGINES[name].supports(spec, call)
    if reason is not None:
        raise Unsupported(reason)
    return ENGINES[name].build(spec, call)


def runner(name, block, u=None):
    try:
        return built(name, block, u)
    except Unsupported as reason:
        if "compiler" in str(reason):
            pytest.skip(str(reason))
        raise


def last(u):
    return u.contiguous(memory_format=torch.channels_last)


def close(ponder, bounds):
    """Whether rounding may decide: a logit lies close to what it is compared with."""
    if bounds is None:
        return undecided(ponder)
    pairs = zip(ponder.probs, bounds, strict=False)
    return any(bool(((probs.logit() - bound).abs() < 1e-4).any()) for probs, bound in pairs)


@torch.no_grad()
def reference(block, u, bounds=None):
    return block(u, thresholds=None if bounds is None else tp.Thresholds([bounds]))


@torch.no_grad()
def check(name, block, u, tolerance=None, bounds=None):
    expected, ponder = reference(block, u, bounds)
    output, got = runner(name, block, last(u))(last(u), bounds=bounds)
    tolerance = ENGINES[name].tolerance[u.dtype] if tolerance is None else tolerance
    assert output.shape == expected.shape
    assert output.dtype == expected.dtype
    assert join_patches(output).is_contiguous(memory_format=torch.channels_last) or not len(u)
    assert got.steps.dtype == ponder.steps.dtype
    assert not close(ponder, bounds)
    assert torch.equal(got.steps, ponder.steps)
    if not len(u):
        return got
    assert relative(output, expected) < tolerance
    for one, other in zip(got[:4], ponder[:4], strict=True):
        assert one.shape == other.shape
        assert relative(one, other) < tolerance
    return got


sizes = st.integers(1, 9)


@pytest.mark.parametrize("name", ["dense", "sparse", "native"])
@settings(max_examples=15)
@given(st.sampled_from([16, 32, 48, 64]), sizes, sizes, st.integers(0, 5), st.integers(0, 9))
def test_an_engine_equals_the_block_whatever_the_shape(name, channels, height, width, batch, seed):
    block, u = block_of(channels, height, width, batch, seed=seed)
    with torch.no_grad():
        _, ponder = block(u)
    if not undecided(ponder):
        check(name, block, u)


bound = st.one_of(st.sampled_from([NEVER, ALWAYS]), st.floats(-1.5, 1.5))


@pytest.mark.parametrize("name", ["dense", "sparse", "native", "compiled"])
@settings(max_examples=25)
@given(
    st.sampled_from([block_of, bottlenecks_of]),
    st.integers(1, 7),
    st.integers(0, 4),
    st.lists(bound, min_size=2, max_size=2),
    st.integers(0, 9),
)
def test_an_engine_equals_the_block_whatever_the_thresholds_of_its_heads(
    name, make, size, batch, bounds, seed
):
    block, u = make(64, size, 8 - size, batch, seed=seed)
    bounds = tuple(bounds)
    _, ponder = reference(block, u, bounds)
    if not close(ponder, bounds):
        with without_compiling():
            check(name, block, u, bounds=bounds)


@pytest.mark.parametrize("name", ["dense", "native", "compact"])
@pytest.mark.parametrize("batch", [1, 9])
@pytest.mark.parametrize("bounds", [(NEVER, 0.1, ALWAYS), (0.3, -0.2, 0.1), (NEVER,) * 3, (ALWAYS,) * 3])
def test_thresholds_of_heads_that_decide_for_images(name, batch, bounds):
    block, u = block_of(32, 5, 7, batch, per="image", units=4, seed=3)
    check(name, block, u, bounds=bounds)


@pytest.mark.parametrize("name", ["dense", "native"])
@pytest.mark.parametrize("bounds", [(NEVER, 0.05), (ALWAYS, NEVER), (-0.1, ALWAYS)])
def test_thresholds_of_heads_that_decide_for_patches(name, bounds):
    block, u = block_of(16, 8, 12, 3, group=2, image_size=16)
    ponder = check(name, block, u, bounds=bounds)
    assert ponder.steps.shape == (3, 1, 4, 1, 6, 1)


@pytest.mark.parametrize("name", ["dense", "sparse", "native", "compiled"])
@pytest.mark.parametrize(("bound", "steps"), [(NEVER, 3), (ALWAYS, 1)])
@pytest.mark.parametrize("logit", [-torch.inf, torch.inf])
def test_never_and_always_hold_for_infinite_logits_too(name, bound, steps, logit):
    block, u = block_of(16, 4, 5, 2)
    tell_heads(block, logit)
    _, expected = reference(block, u, (bound, bound))
    assert expected.steps.eq(steps).all()
    with without_compiling():
        _, got = runner(name, block)(last(u), bounds=(bound, bound))
    assert torch.equal(got.steps, expected.steps)


@pytest.mark.parametrize("name", ["dense", "sparse", "native"])
def test_thresholds_that_do_not_fit_are_refused(name):
    block, u = block_of(16, 4, 5, 2)
    with pytest.raises(ValueError, match="expected 2 thresholds for as many heads, got 1"):
        runner(name, block)(last(u), bounds=(0.0,))
    block.mode = tp.Discrete()
    with pytest.raises(ValueError, match=r"expected the mode thresholded with thresholds, got Discrete\(\)"):
        runner(name, block)(last(u), bounds=(0.0, 0.0))


@contextmanager
def without_compiling():
    """Let torch.compile return what it is given: what is tested is what it would compile."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", lambda function, **_: function)
        yield


@pytest.mark.parametrize("name", ["dense", "sparse", "native"])
@pytest.mark.parametrize("mode", ["thresholded", "discrete"])
def test_the_default_precision_does_not_matter(name, mode):
    block, u = block_of(16, 6, 7, 3, mode=mode, seed=2)
    with torch.no_grad():
        torch.manual_seed(0)
        expected, ponder = runner(name, block)(last(u))
        torch.set_default_dtype(torch.float64)
        try:
            torch.manual_seed(0)
            output, got = runner(name, block)(last(u))
        finally:
            torch.set_default_dtype(torch.float32)
    assert output.dtype == expected.dtype == got.probs.dtype == torch.float32
    assert torch.equal(output, expected)
    assert all(x is y is None or torch.equal(x, y) for x, y in zip(got[:5], ponder[:5], strict=True))


@pytest.mark.parametrize("name", ["dense", "sparse", "native"])
@pytest.mark.parametrize("batch", [1, 3])
def test_a_block_of_stride_two_agrees_on_odd_maps(name, batch):
    block, u = block_of(32, 7, 5, batch, stride=2)
    check(name, block, u[:, :, :-1, :-1])


@pytest.mark.parametrize("name", ["sparse", "native"])
def test_wide_blocks_agree(name):
    check(name, *block_of(128, 6, 7, 3))


@pytest.mark.parametrize("name", ["dense", "sparse", "native"])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("batch", [0, 1, 3])
def test_bottleneck_units_agree(name, stride, batch):
    block, u = bottlenecks_of(64, 9, 6, batch, stride=stride)
    ponder = check(name, block, u)
    if batch:
        assert 1 < ponder.steps.double().mean() < 3
    for bias in (50.0, -50.0):  # none and all
        check(name, tell_heads(block, bias), u)


@settings(max_examples=15)
@given(
    st.sampled_from([64, 192]), st.sampled_from([1, 2]), sizes, sizes, st.integers(0, 5), st.integers(0, 9)
)
def test_native_bottlenecks_equal_the_block_whatever_the_shape(channels, stride, height, width, batch, seed):
    block, u = bottlenecks_of(channels, height, width, batch, stride=stride, seed=seed)
    u = u[:, :, stride - 1 :, stride - 1 :]  # odd maps, if they are to be halved
    with torch.no_grad():
        _, ponder = block(u)
    if not undecided(ponder):
        check("native", block, u)


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("heads", [{"norm": True}, {"per": "image"}, {"per": "image", "norm": True}])
def test_native_bottlenecks_agree_with_other_heads(heads, batch):
    check("native", *bottlenecks_of(64, 5, 7, batch, **heads))


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("share", [0.3, 1.0])
def test_native_bottlenecks_agree_on_more_pixels_than_go_together(batch, share):
    block, u = bottlenecks_of(128, 19, 23, batch)
    ponder = check("native", *halt_outside(block, u, torch.rand(batch, 19, 23) < share))
    assert ponder.steps.eq(3).double().mean() == pytest.approx(share, abs=0.07)


@pytest.mark.parametrize("make", [block_of, bottlenecks_of])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("edge", ["top", "bottom", "left", "right", "corners", "inside", "few"])
def test_native_agrees_where_only_pixels_at_an_edge_go_on(make, edge, batch):
    block, u = make(128, 9, 8, batch)
    mask = torch.zeros(batch, 9, 8, dtype=torch.bool)
    places: dict[str, list[tuple[Any, Any]]] = {
        "top": [(0, slice(None))],
        "bottom": [(-1, slice(None))],
        "left": [(slice(None), 0)],
        "right": [(slice(None), -1)],
        "corners": [(0, 0), (0, -1), (-1, 0), (-1, -1)],
        "inside": [(slice(1, -1), slice(1, -1))],
        "few": [(0, 2), (5, 0), (4, 4), (8, 7)],
    }
    for row, column in places[edge]:
        mask[:, row, column] = True
    ponder = check("native", *halt_outside(block, u, mask))
    assert torch.equal(ponder.steps[:, 0] == 3, mask)


@pytest.mark.parametrize("make", [block_of, bottlenecks_of])
@pytest.mark.parametrize(("height", "width"), [(9, 1), (1, 9), (1, 1), (2, 3)])
def test_native_agrees_on_narrow_maps_that_are_halved(make, height, width):
    block, u = make(128, height, width, 3, stride=2)
    check("native", block, u)
    check("native", block, u[:, :, :1])
    check("native", block, u[..., :1])


@pytest.mark.parametrize("name", ["dense", "sparse", "native"])
@pytest.mark.parametrize(("bias", "steps"), [(50.0, 1), (-50.0, 3)])
def test_nobody_or_everybody_stays_active(name, bias, steps):
    block, u = block_of(16, 9, 9, 3)
    ponder = check(name, tell_heads(block, bias), u)
    assert ponder.steps.eq(steps).all()


@pytest.mark.parametrize("name", ["sparse", "native"])
@pytest.mark.parametrize("corner", [(0, 0), (0, -1), (-1, 0), (-1, -1)])
def test_a_single_pixel_in_a_corner_goes_on(name, corner):
    block, u = block_of(16, 8, 6, 2)
    tell_heads(block, 1.0)
    with torch.no_grad():
        # A channel that no unit changes and that is large and negative at one pixel holds its logits down
        for unit in block.steps:
            unit.conv2.weight[3] = 0
        for head in block.halting:
            head.conv.weight[0, 3, 1, 1] = 1
    u[:, 3] = 0
    u[1, 3, corner[0], corner[1]] = -9
    ponder = check(name, block, u)
    assert ponder.steps.eq(3).nonzero().tolist() == [[1, 0, corner[0] % 8, corner[1] % 6]]


@pytest.mark.parametrize("name", ["dense", "native"])
@pytest.mark.parametrize(
    "options", [{"group": 2}, {"halting_norm": True}, {"group": 4, "halting_norm": True}]
)
@pytest.mark.parametrize("batch", [1, 4])
def test_patches_and_normed_heads_agree(name, options, batch):
    check(name, *block_of(16, 8, 12, batch, image_size=16, **options))


@pytest.mark.parametrize("name", ["dense", "compact", "native"])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("batch", [0, 1, 9])
def test_decisions_per_image_agree(name, norm, batch):
    check(name, *block_of(32, 5, 7, batch, per="image", halting_norm=norm, units=4))


@pytest.mark.parametrize("name", ["dense", "sparse", "native"])
@torch.no_grad()
def test_bfloat16_agrees_with_single_precision_to_its_digits(name):
    block, u = block_of(32, 9, 7, 3)
    tell_heads(block, -50.0)
    expected, _ = block(u)
    output, _ = runner(name, block.bfloat16())(last(u.bfloat16()))
    assert output.dtype == torch.bfloat16
    assert relative(output, expected) < 1e-2


@pytest.mark.parametrize("name", ["dense", "sparse", "native"])
@pytest.mark.parametrize("share", [0.1, 0.5])
@torch.no_grad()
def test_bfloat16_agrees_where_some_pixels_halt(name, share):
    block, u = block_of(32, 9, 7, 3)
    mask = torch.rand(3, 9, 7) < share
    block, u = halt_outside(block, u, mask)
    expected, ponder = block(u)
    output, got = runner(name, block.bfloat16())(last(u.bfloat16()))
    assert torch.equal(got.steps, ponder.steps)
    assert torch.equal(got.steps == 3, mask[:, None])
    assert relative(output, expected) < 1e-2


@pytest.mark.parametrize("as_such", [True, False])
@pytest.mark.parametrize("make", [block_of, bottlenecks_of])
@pytest.mark.parametrize("batch", [1, 3])
@torch.no_grad()
def test_native_bfloat16_is_multiplied_as_such_or_in_single_precision(make, batch, as_such, monkeypatch):
    block, u = make(128, 9, 7, batch)
    mask = torch.rand(batch, 9, 7) < 0.5
    block, u = halt_outside(block, u, mask)
    expected, ponder = block(u)
    runner("native", block)  # skips where there is no compiler
    if not as_such:
        monkeypatch.setattr(native.library(), "torchpact_has_half", lambda: 0)
    elif not native.library().torchpact_has_half():
        pytest.skip("needs a CPU that multiplies bfloat16")
    run = runner("native", block.bfloat16())
    assert run.half == as_such
    output, got = run(last(u.bfloat16()))
    assert output.dtype == torch.bfloat16
    assert got.probs.dtype == torch.float32
    assert torch.equal(got.steps, ponder.steps)
    assert relative(output, expected) < 1e-2
    everything, _ = block(u.bfloat16())  # by PyTorch, which also rounds what units add to
    assert relative(output, everything) < 1e-2


@pytest.mark.parametrize("make", [block_of, bottlenecks_of])
@pytest.mark.parametrize("stride", [1, 2])
@torch.no_grad()
def test_native_bfloat16_agrees_with_single_precision_where_nobody_halts(make, stride):
    block, u = make(64, 5, 6, 2, stride=stride)
    tell_heads(block, -50.0)
    expected, _ = block(u)
    output, _ = runner("native", block.bfloat16())(last(u.bfloat16()))
    assert relative(output, expected) < 1e-2


@torch.no_grad()
def test_native_bfloat16_agrees_where_heads_have_norms():
    block, u = block_of(32, 8, 6, 2, image_size=16, halting_norm=True)
    mask = torch.rand(2, 8, 6) < 0.5
    block, u = halt_outside(block, u, mask)
    for head in block.halting:
        torch.nn.init.ones_(head.norm.weight)  # then a ReLU: zero, or the large value
        torch.nn.init.constant_(head.linear.bias, -3.0)
    expected, ponder = block(u)
    assert torch.equal(ponder.steps[:, 0] == 3, mask)
    output, got = runner("native", block.bfloat16())(last(u.bfloat16()))
    assert torch.equal(got.steps, ponder.steps)
    assert relative(output, expected) < 1e-2


@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="the system does not tell what its CPU can do")
def test_native_multiplies_bfloat16_where_the_cpu_can():
    can = "avx512_bf16" in Path("/proc/cpuinfo").read_text()
    runner("native", block_of(16, 2, 2, 1)[0])  # skips where there is no compiler
    assert native.library().torchpact_has_half() == can


@pytest.mark.parametrize("name", ["sparse", "native"])
@pytest.mark.parametrize("channels", [256, 512])
def test_up_to_512_channels(name, channels):
    block, u = block_of(channels, 3, 2, 2, units=2)
    check(name, *halt_outside(block, u, torch.rand(2, 3, 2) < 0.5))


@pytest.mark.parametrize("name", ["dense", "sparse", "native"])
def test_a_thousand_images(name):
    block, u = block_of(16, 3, 4, 1000)
    check(name, *halt_outside(block, u, torch.rand(1000, 3, 4) < 0.4))


@pytest.mark.parametrize("name", ["dense", "sparse", "native"])
def test_discrete_draws_halting_with_its_probability(name):
    block = tell_heads(lively(units=2, mode="discrete"), 0.5).blocks[0]
    torch.manual_seed(0)
    with torch.no_grad():
        _, ponder = runner(name, block)(last(torch.randn(20, 16, 32, 32)))
    share = ponder.steps.eq(1).double().mean().item()
    h = torch.tensor(0.5).sigmoid().item()
    assert share == pytest.approx(h, abs=4 * (h * (1 - h) / ponder.steps.numel()) ** 0.5)
    taken = torch.where(ponder.steps == 1, torch.tensor(h).log(), torch.tensor(1 - h).log())
    assert torch.allclose(ponder.log_prob, taken, atol=1e-5)


@pytest.mark.parametrize("name", ["dense", "sparse", "native"])
def test_discrete_takes_the_same_decisions_from_the_same_generator(name):
    block, u = block_of(16, 9, 9, 3, units=2)
    with torch.no_grad():
        block.mode = tp.Discrete(torch.Generator().manual_seed(3))
        expected, ponder = block(u)
        block.mode = tp.Discrete(torch.Generator().manual_seed(3))
        output, got = runner(name, block)(last(u))
    assert torch.equal(got.steps, ponder.steps)
    assert relative(output, expected) < 1e-5
    assert relative(got.log_prob, ponder.log_prob) < 1e-5


@pytest.mark.parametrize("name", ["dense", "sparse", "native"])
@pytest.mark.parametrize("bias", [50.0, -50.0, 0.0])
def test_draws_do_not_depend_on_what_has_halted(name, bias):
    block, u = block_of(16, 5, 6, 3, units=4)
    tell_heads(block, bias)
    draw, expected = torch.Generator().manual_seed(5), torch.Generator().manual_seed(5)
    block.mode = tp.Discrete(draw)
    runner(name, block)(last(u))
    for _ in range(3):  # a decision less than units, for every pixel
        tp.Discrete(expected).noise(torch.zeros(3, 1, 5, 6))
    assert torch.equal(draw.get_state(), expected.get_state())


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_native_agrees_for_any_number_of_threads(threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for batch in (1, 4, 7):
            check("native", *block_of(32, 7, 9, batch, seed=4))
            check("native", *bottlenecks_of(128, 7, 9, batch, seed=4))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("make", [block_of, bottlenecks_of])
def test_native_threads_that_share_an_image_give_the_same_bits_every_time(make):
    """Where each decides for the image from sums that the others have added to."""
    block, u = make(64, 5, 5, 1, per="image")
    tell_heads(block, -50.0)
    for head in block.halting:
        torch.nn.init.normal_(head.linear.weight)
    run, before = runner("native", block), torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        with torch.no_grad():
            expected, ponder = run(last(u))
            for _ in range(200):
                output, got = run(last(u))
                assert torch.equal(output, expected)
                assert torch.equal(got.probs, ponder.probs)
    finally:
        torch.set_num_threads(before)


def test_native_may_change_size_between_calls():
    block, u = block_of(16, 9, 8, 3)
    run = runner("native", block)
    with torch.no_grad():
        for part in (u, u[:, :, :4, :5], u[:1], u, u[:0]):
            assert torch.allclose(run(last(part))[0], block(part)[0], atol=1e-4)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("sparse", {"group": 2}, "expected a decision for every pixel"),
        ("sparse", {"per": "image"}, "expected a decision for every pixel"),
        ("sparse", {"mode": "act"}, "expected a hard mode, got ACT"),
        ("native", {"mode": "relaxed"}, "expected the mode Thresholded or Discrete, got Relaxed"),
        ("compact", {}, "expected one decision an image, got one a pixel"),
    ],
)
def test_what_an_engine_cannot_run_it_refuses_in_one_line(name, options, message):
    with pytest.raises(Unsupported, match=f"^{name}: {message}.*$") as error:
        built(name, lively(**options).blocks[0], torch.randn(2, 16, 4, 4))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda block: block.double(), "expected single precision or bfloat16, got torch.float64"),
        (lambda block: block.to("meta"), "expected a model on the CPU, got one on meta"),
    ],
)
def test_native_refuses_other_precisions_and_devices(change, message):
    with pytest.raises(Unsupported, match=message):
        built("native", change(lively().blocks[0]))


def test_native_refuses_channels_that_do_not_fill_its_vectors():
    units = [tp.models.ResidualUnit(24, 24) for _ in range(2)]
    block = tp.AdaptiveBlock(units, [tp.models.HaltingHead(24)], mode="thresholded")
    with pytest.raises(Unsupported, match=r"expected multiples of 16 channels, got 24$"):
        built("native", block)


def test_a_kernel_is_compiled_anew_when_a_file_that_it_includes_changes(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for file in native.SOURCE.parent.glob("native*.?pp"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    source = tmp_path / native.SOURCE.name
    try:
        first = build_library(source)
    except Unsupported as reason:
        pytest.skip(str(reason))
    assert build_library(source) == first
    header = tmp_path / "native_convolve.hpp"
    header.write_text(header.read_text() + "\n")
    assert build_library(source) != first


def test_without_a_compiler_native_says_so(monkeypatch):
    native.library.cache_clear()
    monkeypatch.setattr("shutil.which", lambda name: None)
    try:
        with pytest.raises(Unsupported, match=r"^native: expected a C\+\+ compiler .*, found none$"):
            native.library()
    finally:
        native.library.cache_clear()


def test_a_compiler_that_fails_is_told_in_one_line(monkeypatch, tmp_path):
    broken = tmp_path / "broken.cpp"
    broken.write_text("this is no program\n")
    native.library.cache_clear()
    monkeypatch.setattr(native, "SOURCE", broken)
    try:
        with pytest.raises(Unsupported, match=r"^native: .*failed") as error:
            native.library()
        assert "\n" not in str(error.value)
    finally:
        native.library.cache_clear()


@pytest.mark.parametrize("name", ["dense", "sparse", "native"])
@pytest.mark.parametrize("threshold", [0.2, 0.7])
def test_thresholds_other_than_a_half(name, threshold):
    block, u = block_of(16, 6, 7, 3)
    block.mode = tp.Thresholded(threshold)
    with torch.no_grad():
        _, half = block(u, mode="thresholded")
        expected, ponder = block(u)
    assert not torch.equal(half.steps, ponder.steps)  # it makes a difference here
    output, got = runner(name, block)(last(u))
    assert torch.equal(got.steps, ponder.steps)
    assert relative(output, expected) < 1e-5


def test_one_runner_under_changing_numbers_of_threads():
    block, u = block_of(16, 9, 8, 5)
    with torch.no_grad():
        expected, _ = block(u)
    run = runner("native", block)
    before = torch.get_num_threads()
    try:
        for threads in (1, 3, 2, 1):
            torch.set_num_threads(threads)
            assert relative(run(last(u))[0], expected) < 1e-5
    finally:
        torch.set_num_threads(before)


def test_a_large_map_of_half_precision_does_not_overflow_where_it_is_pooled():
    block, u = block_of(16, 64, 64, 1)
    tell_heads(block, 0.0)
    for head in block.halting:
        torch.nn.init.constant_(head.linear.weight, -0.01)
    u = (u.abs() + 20).half()
    block = block.half()
    with torch.no_grad():
        _, ponder = block(u)
    _, got = runner("sparse", block)(last(u))
    assert ponder.steps.min() > 1
    assert torch.equal(got.steps, ponder.steps)
