"""The kernels run in Triton's interpreter here, in single and half precision; bf16 it gets wrong."""

from dataclasses import replace

import pytest
import torch

import torchpact as tp
from tests.engines.elsewhere import compiled_elsewhere
from tests.engines.networks import block_of, bottlenecks_of, halt_outside, relative, tell_heads, undecided
from torchpact.engines import Unsupported
from torchpact.models import HaltingHead, ResidualUnit
from torchpact_recipes.bench.memory import peak_memory

pytest.importorskip("triton", reason="needs Triton")

from torchpact.engines.conv.triton import block as gpu
from torchpact.engines.conv.triton.engine import GPU
from torchpact.engines.conv.triton.tiles import Tiles, fitting, region_for, tiles_for
from torchpact.engines.graphs import repeatable
from torchpact.specs import block_spec

CUDA = torch.cuda.is_available()


@pytest.fixture(autouse=True)
def _exact(monkeypatch):
    """Without tf32, which has three digits."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


DEVICE = "cuda" if CUDA else "cpu"


def sparse_block(block, mode=None, details=None, **options):
    spec = block_spec(block)
    details = spec.details if details is None else details
    return gpu.SparseGPUBlock(replace(spec, mode=mode or spec.mode, details=details), **options)


def run(block, u, mode=None, processors=None, bounds=None, **options):
    with torch.no_grad():
        thresholds = None if bounds is None else tp.Thresholds([bounds])
        expected = block(u, mode=mode, thresholds=thresholds)
    sparse = sparse_block(block, mode, **options)
    sparse.processors = processors or sparse.processors
    return sparse(u.contiguous(memory_format=torch.channels_last), bounds=bounds), expected


@pytest.mark.parametrize(
    ("channels", "height", "width", "batch", "stride"),
    [(16, 6, 5, 2, 1), (32, 4, 7, 1, 2), (48, 3, 3, 3, 1), (16, 1, 1, 5, 1), (128, 3, 4, 1, 2)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_equals_the_dense_engine(channels, height, width, batch, stride, dtype):
    block, u = block_of(channels, height, width, batch, stride=stride)
    (output, ponder), (expected, reference) = run(block.to(DEVICE, dtype), u.to(DEVICE, dtype))
    assert 1 < reference.steps.double().mean() < 3  # some go on, some do not
    margin = 1e-4 if dtype == torch.float32 else 2e-2
    if not undecided(reference, margin=margin):
        tolerance = 1e-5 if dtype == torch.float32 else 1e-2
        assert relative(output, expected) < tolerance
        assert torch.equal(ponder.steps, reference.steps)
        assert relative(ponder.probs, reference.probs) < tolerance
        assert relative(ponder.expected_steps, reference.expected_steps) < tolerance
        assert torch.equal(ponder.cost, reference.cost)


@pytest.mark.parametrize("bias", [-9.0, 9.0])
def test_all_and_none_active(bias):
    block, u = block_of(16, 5, 4, 2)
    (output, ponder), (expected, reference) = run(tell_heads(block, bias).to(DEVICE), u.to(DEVICE))
    assert relative(output, expected) < 1e-5
    assert (ponder.steps == (3 if bias < 0 else 1)).all()
    assert torch.equal(ponder.steps, reference.steps)


@pytest.mark.parametrize("seed", range(4))
def test_samples_as_the_dense_engine_does(seed):
    block, u = block_of(16, 5, 6, 3)
    block, u = block.to(DEVICE), u.to(DEVICE)
    modes = [tp.Discrete(generator=torch.Generator(DEVICE).manual_seed(seed)) for _ in range(2)]
    with torch.no_grad():
        expected, reference = block(u, mode=modes[0])
    output, ponder = sparse_block(block, modes[1])(u)
    assert ponder is not None
    assert relative(output, expected) < 1e-5
    assert torch.equal(ponder.steps, reference.steps)
    torch.testing.assert_close(ponder.log_prob, reference.log_prob, rtol=1e-4, atol=1e-5)


NEVER, ALWAYS = tp.Thresholds.NEVER, tp.Thresholds.ALWAYS


@pytest.mark.parametrize("make", [block_of, bottlenecks_of])
@pytest.mark.parametrize(
    "bounds", [(0.4, -0.3), (NEVER, 0.2), (0.2, NEVER), (ALWAYS, 0.0), (0.3, ALWAYS), (NEVER, NEVER)]
)
def test_thresholds_of_each_head(make, bounds):
    block, u = make(64, 5, 6, 2, seed=1)
    (output, ponder), (expected, reference) = run(block.to(DEVICE), u.to(DEVICE), bounds=bounds)
    pairs = zip(reference.probs, bounds, strict=False)
    assert not any(((probs.logit() - bound).abs() < 1e-4).any() for probs, bound in pairs)
    assert relative(output, expected) < 1e-5
    assert torch.equal(ponder.steps, reference.steps)
    assert relative(ponder.probs, reference.probs) < 1e-5


@pytest.mark.parametrize(("bound", "steps"), [(NEVER, 3), (ALWAYS, 1)])
@pytest.mark.parametrize("logit", [-torch.inf, torch.inf])
def test_never_and_always_hold_for_infinite_logits_too(bound, steps, logit):
    block, u = block_of(16, 4, 5, 2)
    tell_heads(block, logit)
    (_, ponder), (_, reference) = run(block.to(DEVICE), u.to(DEVICE), bounds=(bound, bound))
    assert reference.steps.eq(steps).all()
    assert torch.equal(ponder.steps, reference.steps)


@pytest.mark.parametrize("region", [(8, 8), (16, 16)])
@pytest.mark.parametrize("own_first", [True, False])
def test_the_default_type_of_tensors_changes_nothing(own_first, region):
    block, u = block_of(16, 9, 6, 3)
    block, u = block.to(DEVICE), u.to(DEVICE)
    found = []
    before = torch.get_default_dtype()
    try:
        for default in (torch.float32, torch.float64):
            torch.set_default_dtype(default)
            mode = tp.Discrete(generator=torch.Generator(DEVICE).manual_seed(0))
            output, ponder = sparse_block(block, mode, own_first=own_first, region=region)(u)
            assert ponder is not None
            found.append([output, *ponder[:5]])
    finally:
        torch.set_default_dtype(before)
    for single, double in zip(*found, strict=True):
        torch.testing.assert_close(double, single, rtol=1e-5, atol=1e-5)  # of one type, which it checks


def test_a_single_corner_pixel(monkeypatch):
    """Noise decides here: the corner of the second image goes on, all others halt."""
    block, u = block_of(16, 5, 4, 2)
    block, u = block.to(DEVICE), u.to(DEVICE)
    corner = torch.full((2, 1, 5, 4), 1e4, device=DEVICE)
    corner[1, 0, -1, -1] = -1e4
    monkeypatch.setattr("torchpact.core.modes.logistic_noise", lambda *_: corner)
    (output, ponder), (expected, reference) = run(block, u, tp.Discrete())
    assert ponder.steps.sum() == reference.steps.sum() == 2 * 20 + 2
    assert relative(output, expected) < 1e-5


def test_many_images_in_a_tile():
    """Nine pixels an image, which are decided on apart: a tile has 6 images, whose pixels are added up."""
    block, u = block_of(16, 9, 1, 6)
    (output, ponder), (expected, reference) = run(block.to(DEVICE), u.to(DEVICE), region=(8, 8))
    assert not undecided(reference)
    assert relative(output, expected) < 1e-5
    assert torch.equal(ponder.steps, reference.steps)


def test_what_it_cannot_run_is_said_in_a_line():
    block, _ = block_of(16, 4, 4, 1)
    if not CUDA:
        with pytest.raises(Unsupported, match="gpu: expected a network on a GPU, got one on cpu"):
            GPU.build(block_spec(block))
    with pytest.raises(Unsupported, match="gpu: expected the mode thresholded or discrete, got ACT"):
        GPU.build(replace(block_spec(block), mode=tp.ACT()))
    image, _ = block_of(16, 4, 4, 1, per="image")
    with pytest.raises(Unsupported, match="gpu: expected a decision for every pixel"):
        GPU.build(block_spec(image))
    short = tp.AdaptiveBlock(block.steps[:1], block.halting[:1], mode="thresholded")
    with pytest.raises(Unsupported, match="expected a block of at least two units, got 1"):
        GPU.build(block_spec(short))


def test_more_pixels_than_the_programs_take_at_once():
    block, u = block_of(16, 19, 20, 3)
    (output, ponder), (expected, reference) = run(block.to(DEVICE), u.to(DEVICE), tp.Thresholded(0.3))
    assert relative(output, expected) < 1e-5
    assert torch.equal(ponder.steps, reference.steps)


def test_nan_is_kept():
    block, u = block_of(16, 5, 4, 2)
    u[0, :, 2, 2] = float("nan")
    (output, ponder), (expected, reference) = run(block.to(DEVICE), u.to(DEVICE))
    assert torch.equal(output.isnan(), expected.isnan())
    assert torch.equal(ponder.steps, reference.steps)


@pytest.mark.parametrize("batch", [0, 1])
def test_few_images(batch):
    block, u = block_of(16, 4, 3, batch)
    (output, ponder), (expected, reference) = run(block.to(DEVICE), u.to(DEVICE))
    assert output.shape == expected.shape
    assert torch.equal(ponder.steps, reference.steps)


def test_maps_that_are_not_contiguous():
    block, u = block_of(16, 5, 8, 2)
    (output, ponder), (expected, reference) = run(block.to(DEVICE), u.to(DEVICE)[:, :, :, ::2])
    assert relative(output, expected) < 1e-5
    assert torch.equal(ponder.steps, reference.steps)


@pytest.mark.parametrize(
    ("region", "regions", "share", "mode"),
    [
        ((32, 32), 3, 1, tp.Thresholded(0.4)),
        ((32, 32), 3, 3, tp.Discrete()),
        ((32, 8), 15, 1, tp.Discrete()),
        ((8, 32), 15, 2, tp.Thresholded(0.4)),
        ((16, 16), 12, 1, tp.Discrete()),
    ],
)
def test_maps_are_decided_on_whole_or_in_regions_by_one_program_or_several(
    region, regions, share, mode, monkeypatch
):
    """Images of 20×17; of the last nothing goes on."""
    block, u = block_of(16, 20, 17, 3)
    block, u = halt_outside(block, u, torch.rand(3, 20, 17) < torch.tensor([0.3, 0.05, 0.0])[:, None, None])
    block, u = block.to(DEVICE), u.to(DEVICE)
    noise = torch.zeros(3, 1, 20, 17, device=DEVICE)
    monkeypatch.setattr("torchpact.core.modes.logistic_noise", lambda *_: noise)
    assert 3 * region_for(20, 17, region).number(20, 17) == regions
    (output, ponder), (expected, reference) = run(
        block, u, mode, processors=regions * share + 1, region=region, frozen=16
    )
    assert reference.steps[2].eq(1).all()
    assert relative(output, expected) < 1e-5
    assert torch.equal(ponder.steps, reference.steps)
    assert relative(ponder.probs, reference.probs) < 1e-5


@pytest.mark.parametrize(("seed", "region", "processors"), [(0, (8, 8), 1), (1, (16, 16), 4)])
def test_pixels_that_halt_at_different_times_around_each_other(seed, region, processors):
    """Five units: what is asked of pixels that halted long ago comes from the heads of now."""
    block, u = block_of(16, 13, 11, 2, seed=seed, units=5)
    (output, ponder), (expected, reference) = run(
        block.to(DEVICE), u.to(DEVICE), processors=processors, region=region, frozen=16
    )
    assert reference.steps.unique().numel() == 5
    assert not undecided(reference)
    assert relative(output, expected) < 1e-5
    assert torch.equal(ponder.steps, reference.steps)
    assert relative(ponder.probs, reference.probs) < 1e-5


@pytest.mark.parametrize(("own_first", "region"), [(True, (8, 8)), (False, (16, 16))])
@torch.no_grad()
def test_the_mean_that_heads_see_is_of_halted_pixels_too(own_first, region):
    """Ten units: heads have more weights for it than there is room beside the taps of one."""
    block, u = block_of(16, 9, 10, 2, seed=2, units=10, halting_bias=-2.0)
    for head in block.halting:
        head.linear.weight.normal_(0, 0.5)
    (output, ponder), (expected, reference) = run(
        block.to(DEVICE), u.to(DEVICE), region=region, own_first=own_first
    )
    assert reference.steps.unique().numel() > 5
    assert not undecided(reference)
    assert relative(output, expected) < 1e-5
    assert torch.equal(ponder.steps, reference.steps)
    assert relative(ponder.probs, reference.probs) < 1e-5


@pytest.mark.parametrize("own_first", [True, False])
@pytest.mark.parametrize("make", [block_of, bottlenecks_of])
@torch.no_grad()
def test_first_units_that_halve_maps_of_odd_sizes(make, own_first):
    block, u = make(64, 5, 4, 2, stride=2)
    u = u[:, :, :9, :7]
    (output, ponder), (expected, reference) = run(block.to(DEVICE), u.to(DEVICE), own_first=own_first)
    assert output.shape[2:] == (5, 4)
    assert not undecided(reference)
    assert relative(output, expected) < 1e-5
    assert torch.equal(ponder.steps, reference.steps)


@torch.no_grad()
def test_channels_that_the_first_unit_is_given_need_not_be_multiples_of_16():
    torch.manual_seed(0)
    steps = [ResidualUnit(24, 32), ResidualUnit(32, 32)]
    block = tp.AdaptiveBlock(steps, [HaltingHead(32, bias=0.0)], mode="thresholded").eval().to(DEVICE)
    (output, ponder), (expected, reference) = run(block, torch.randn(2, 24, 4, 5).to(DEVICE))
    assert sparse_block(block).own_first is None
    assert relative(output, expected) < 1e-5
    assert torch.equal(ponder.steps, reference.steps)


@pytest.mark.parametrize("raising", [0, 64])
@pytest.mark.parametrize(("stride", "region"), [(1, (8, 8)), (2, (16, 16))])
@torch.no_grad()
def test_bottleneck_units(stride, region, raising, monkeypatch):
    """Whose first convolution activates what it reads, or finds it activated."""
    monkeypatch.setattr(gpu, "RAISING", raising)
    block, u = bottlenecks_of(64, 9, 6, 2, stride=stride)
    block = block.to(DEVICE)
    (output, ponder), (expected, reference) = run(block, u.to(DEVICE), region=region)
    assert 1 < reference.steps.double().mean() < 3
    assert not undecided(reference)
    assert relative(output, expected) < 1e-5
    assert torch.equal(ponder.steps, reference.steps)


@pytest.mark.skipif(CUDA, reason="counts what tensors on a CPU take")
@pytest.mark.parametrize(("units", "channels", "most"), [(5, 64, 0.95), (5, 32, 1.05), (18, 64, 1.05)])
@torch.no_grad()
def test_memory_of_a_block_beside_that_of_its_units(units, channels, most):
    block, u = block_of(channels, 8, 8, 1, units=units)
    block, u = block.half(), u.half().contiguous(memory_format=torch.channels_last)
    sparse = sparse_block(block, details=False)
    plain = torch.nn.Sequential(*block.steps)
    assert peak_memory(lambda: sparse(u)) < most * peak_memory(lambda: plain(u))


@pytest.mark.parametrize(("processors", "active"), [(1, 0.3), (10, 1.0)])
def test_programs_take_tiles_of_pixels_and_outputs_in_turns(processors, active):
    block, u = block_of(32, 9, 4, 2)
    block, u = halt_outside(block, u, torch.rand(2, 9, 4) < active)
    tiles = Tiles(16, 16, 16, 4, 2, 2)
    sparse = sparse_block(block.to(DEVICE), tiles=(tiles, tiles), region=(8, 8))
    sparse.processors = processors
    with torch.no_grad():
        expected, reference = block(u.to(DEVICE))
    output, ponder = sparse(u.to(DEVICE))
    assert ponder is not None
    assert relative(output, expected) < 1e-5
    assert torch.equal(ponder.steps, reference.steps)


def test_images_of_which_none_goes_on():
    block, u = block_of(16, 4, 5, 3)
    block, u = halt_outside(block, u, torch.rand(3, 4, 5) < torch.tensor([0.4, 0.0, 0.2])[:, None, None])
    (output, ponder), (expected, reference) = run(block.to(DEVICE), u.to(DEVICE))
    assert reference.steps[1].eq(1).all()
    assert relative(output, expected) < 1e-5
    assert torch.equal(ponder.steps, reference.steps)


@pytest.mark.slow
def test_kernels_compile_for_a_device_that_is_not_here(tmp_path):
    """What the interpreter runs the compiler may refuse."""
    found = compiled_elsewhere("tests.engines.compile_kernels", tmp_path)
    assert [name for name, *_ in found] == ["convolve"] * 6 + ["survey_all"] + ["advance"] * 3
    assert all(int(shared) <= 227 * 1024 for _, shared, _ in found)


@pytest.mark.skipif(not CUDA, reason="needs a CUDA device: too slow, or bf16, in the interpreter")
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("channels", "size", "batch"),
    [(16, 32, 1000), (32, 9, 3), (64, 19, 5), (128, 14, 4), (256, 14, 40), (256, 20, 3), (512, 7, 2)],
)
def test_partial_masks_of_many_shapes(channels, size, batch, dtype):
    block, u = block_of(channels, size, size, batch)
    block, u = halt_outside(block, u, torch.rand(batch, size, size) < 0.3)
    block, u = block.to(DEVICE), u.to(DEVICE)
    with torch.no_grad():
        expected, reference = block(u)
    sparse = sparse_block(block.to(dtype), own_first=batch > 3)
    for _ in range(3):  # programs that wait for too little would not always be right
        output, ponder = sparse(u.to(dtype).contiguous(memory_format=torch.channels_last))
        assert ponder is not None
        assert torch.equal(ponder.steps, reference.steps)
        assert relative(output, expected) < (1e-5 if dtype == torch.float32 else 1e-2)
        assert torch.equal(ponder.cost, reference.cost)


@pytest.mark.skipif(not CUDA, reason="needs a CUDA device: the interpreter runs one program at a time")
@pytest.mark.gpu
@pytest.mark.parametrize(("channels", "size"), [(64, 16), (64, 40), (256, 14), (512, 7)])
def test_maps_are_the_same_every_time(channels, size):
    """Although the order of lists is not."""
    block, u = block_of(channels, size, size, 16)
    block, u = halt_outside(block, u, torch.rand(16, size, size) < 0.2)
    sparse = sparse_block(block.to(DEVICE, torch.bfloat16))
    outputs = [sparse(u.to(DEVICE, torch.bfloat16)) for _ in range(20)]
    expected, reference = outputs[0]
    assert reference is not None
    for output, ponder in outputs:
        assert ponder is not None
        assert torch.equal(output, expected)
        assert torch.equal(ponder.probs, reference.probs)


@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("channels", [64, 128, 192, 256, 512, 2048])
def test_tiles_of_a_convolution_are_sums_of_two_products_at_least(channels, single):
    """But of 16 inputs, which are no more than a product takes."""
    weight = torch.empty(channels, channels // 4, 1, 1)
    tiles = fitting(tiles_for(channels, single)[1], weight, 227 * 1024)
    assert weight.size(1) % tiles.inputs == 0
    assert weight.size(1) // tiles.inputs > 1 or weight.size(1) == 16


@pytest.mark.skipif(not CUDA, reason="needs a CUDA device: the interpreter does as it is told")
@pytest.mark.gpu
@pytest.mark.parametrize(("channels", "size"), [(64, 56), (128, 56), (256, 56), (512, 28)])
@torch.no_grad()
def test_bottlenecks_of_large_images(channels, size):
    block, u = bottlenecks_of(channels, size, size, 16)
    block, u = halt_outside(block, u, torch.rand(16, size, size) < 0.3)
    block, u = block.to(DEVICE), u.to(DEVICE)
    expected, reference = block(u)
    run = repeatable(sparse_block(block.bfloat16()), u.bfloat16())
    for _ in range(3):
        output, ponder = run()
        assert torch.equal(ponder.steps, reference.steps)
        assert relative(output, expected) < 1e-2
