"""Products of few rows and norms by kernels in C++, beside the same in double precision."""

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchpact.engines.attention.linear import FUNCTIONS, PackedLinear
from torchpact.engines.attention.native import native_problem
from torchpact.engines.attention.norms import RowNorm
from torchpact.engines.attention.panels import FEW, PanelProduct, panels_fit
from torchpact.specs.attention import Projection

PRECISIONS = {torch.float32: 2e-6, torch.bfloat16: 1e-2}
SHAPES = [(1, 2, 1), (3, 8, 5), (8, 64, 48), (31, 400, 49), (33, 386, 100), (FEW, 770, 150)]


@pytest.fixture(autouse=True)
def compiler() -> None:
    problem = native_problem(torch.float32, torch.device("cpu"), 8)
    if problem is not None:
        pytest.skip(problem)


def drawn(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape).to(dtype)


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).abs().max() / expected.abs().max().clamp(min=1))


def product(weight: Tensor, bias: Tensor | None, function: str) -> PanelProduct:
    if not panels_fit(weight):
        pytest.skip("this processor does not multiply such numbers by the kernel")
    return PanelProduct(weight, bias, function)


@pytest.mark.parametrize("dtype", PRECISIONS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("function", ["", *FUNCTIONS])
def test_few_rows_are_multiplied_as_in_double_precision(
    dtype: torch.dtype, shape: tuple[int, int, int], function: str
) -> None:
    torch.manual_seed(0)
    rows, inputs, outputs = shape
    x, weight = drawn(rows, inputs, dtype=dtype), drawn(outputs, inputs, dtype=dtype)
    for bias in (drawn(outputs, dtype=dtype), None):
        expected = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
        expected = FUNCTIONS[function](expected) if function else expected
        assert relative(product(weight, bias, function)(x), expected) <= PRECISIONS[dtype]


def test_activations_of_large_and_small_numbers_are_finite_and_right() -> None:
    x = torch.cat((torch.linspace(-12, 12, 2401), torch.tensor([-1e4, -100.0, -0.0, 1e-20, 100.0, 1e4])))
    for name, function in FUNCTIONS.items():
        found = product(torch.ones(1, 1), None, name)
        parts = [found(rows.unsqueeze(1)) for rows in x.split(FEW)]
        torch.testing.assert_close(torch.cat(parts).squeeze(1), function(x), atol=1e-6, rtol=1e-5)


def test_what_is_not_a_number_stays_so() -> None:
    for name in ("", *FUNCTIONS):
        assert product(torch.ones(1, 1), None, name)(torch.tensor([[torch.nan]])).isnan().all()


def test_rows_that_do_not_lie_one_after_the_other_are_read_right() -> None:
    x, weight = torch.randn(12, 5).t(), torch.randn(7, 12)
    torch.testing.assert_close(product(weight, None, "")(x), x @ weight.t())
    assert product(weight, None, "")(x[:0]).shape == (0, 7)


@pytest.mark.parametrize("dtype", PRECISIONS)
def test_a_layer_gives_the_same_for_few_rows_and_for_many(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(96, 70).to(dtype)
    factor = torch.rand(70).to(dtype)
    packed = PackedLinear(Projection.of(linear), F.gelu, factor)
    x = drawn(3 * FEW, 96, dtype=dtype)
    with torch.no_grad():
        many = packed(x)
        few = torch.cat([packed(rows) for rows in x.split(FEW // 2)])
        expected = F.gelu(linear.double()(x.double()) * factor.double())
    assert relative(many, expected) <= 2 * PRECISIONS[dtype]
    assert relative(few, expected) <= 2 * PRECISIONS[dtype]


def test_a_layer_is_copied_and_pickled_with_its_weights() -> None:
    packed, x = PackedLinear(Projection.of(nn.Linear(24, 10)), F.silu), torch.randn(4, 24)
    with torch.no_grad():
        expected = packed(x)
        for again in (copy.deepcopy(packed), pickle.loads(pickle.dumps(packed))):
            assert torch.equal(again(x), expected)


@pytest.mark.parametrize("dtype", PRECISIONS)
@pytest.mark.parametrize("size", [1, 7, 48, 576, 1000])
@pytest.mark.parametrize("kind", [nn.LayerNorm, nn.RMSNorm])
def test_a_norm_of_a_sum_is_that_of_torch(dtype: torch.dtype, size: int, kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    norm = kind(size, eps=1e-5).to(dtype)
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    rows = RowNorm(norm, native=True)
    for count in (0, 1, 9, 300):
        product, u = 3 + drawn(count, size, dtype=dtype), drawn(count, size, dtype=dtype)
        total = product + u
        with torch.no_grad():
            expected = norm.double()(total.double())
            norm.to(dtype)
            for in_place in (False, True):
                given = product.clone()
                found = rows.of_sum(given, u, in_place=in_place)
                torch.testing.assert_close(
                    found.double(), expected, atol=1e-4 if dtype == torch.float32 else 4e-2, rtol=1e-2
                )
                assert torch.equal(given, found if in_place else total)
            torch.testing.assert_close(rows(total), found)


def test_a_norm_of_a_kind_that_is_not_known_is_called_itself() -> None:
    class Halved(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x / 2

    product, u = torch.ones(2, 3), torch.ones(2, 3)
    assert RowNorm(Halved(), native=True).of_sum(product, u).eq(1).all()
    assert product.eq(2).all()
