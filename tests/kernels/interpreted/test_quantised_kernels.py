"""Products with quantised weights, interpreted: those of the reference for every scheme, at odd sizes, split or
not; and the same bits in any company where that is promised."""

from __future__ import annotations

import pytest
import torch

from holdfast.kernels.gpu import quantised as kernels
from holdfast.kernels.quantised import FP8, FP8_FIXED, FP8_GROUPS, INT8, Scheme, activated
from holdfast.kernels.reference import backend as reference
from holdfast.tests.kernels.packed_stage import coded

SCHEMES = (
    Scheme("int4", 32),
    Scheme("int4", 128),
    Scheme("int4"),
    Scheme("int4", 96, zeros=True),
    Scheme("int4", zeros=True),
    Scheme("int8"),
    Scheme("int8", 64, zeros=True),
    Scheme("int8", zeros=True),
    Scheme("mxfp4", 32),
    Scheme("fp8"),
    Scheme("fp8", 128),
    Scheme("int8", activations=INT8),
    Scheme("int8", 32, activations=INT8),
    Scheme("fp8", activations=FP8),
    Scheme("fp8", activations=FP8_FIXED),
    Scheme("fp8", 128, activations=FP8_GROUPS),
)


def width_of(scheme: Scheme) -> int:
    """Not a multiple of a step, where the scheme allows it."""
    return 70 if not scheme.group else 3 * scheme.group if scheme.codes != "fp8" else 200


@pytest.fixture
def _split(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device of many multiprocessors, on which a program need not have many steps."""
    monkeypatch.setattr(kernels, "multiprocessors", lambda device: 16)
    monkeypatch.setattr(kernels, "LEAST_STEPS", 1)


@pytest.mark.usefixtures("_split")
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_products_are_the_references(scheme: Scheme, dtype: torch.dtype) -> None:
    weight = coded(
        scheme, 37, width_of(scheme), scale=torch.float16 if dtype == torch.float16 else torch.float32
    )
    bias = torch.linspace(-1, 1, 37).to(dtype)
    for tokens in (1, 5, 19):
        x = torch.randn(tokens, weight.width, generator=torch.Generator().manual_seed(tokens)).to(dtype)
        wanted = reference.quantised_linear(x, weight, bias)
        for ours in (kernels.quantised_linear, kernels.invariant_linear):
            got = ours(x, weight, bias)
            bound = 1e-5 if dtype == torch.float32 else 2e-3
            assert got.dtype == dtype and got.shape == wanted.shape
            assert (got - wanted).abs().max() <= bound * wanted.abs().max()
    assert kernels.quantised_linear(x[:0], weight).shape == (0, 37)


@pytest.mark.usefixtures("_split")
def test_few_tokens_are_split_along_the_width(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only there, and as shapes say, whatever the numbers are."""
    told: list[int] = []
    splits = kernels._splits
    monkeypatch.setattr(kernels, "_splits", lambda *given: told.append(splits(*given)) or told[-1])
    weight = coded(Scheme("int4", 32), 37, 512)
    for tokens in (1, 16, 17):
        kernels.quantised_linear(torch.randn(tokens, 512), weight)
    kernels.invariant_linear(torch.randn(1, 512), weight)
    assert told == [16, 16]


@pytest.mark.parametrize("kind", [INT8, FP8, FP8_FIXED, FP8_GROUPS])
def test_activations_are_rounded_as_the_reference_does(kind: str) -> None:
    weight = coded(Scheme("int8" if kind == INT8 else "fp8", activations=kind), 3, 200)
    x = torch.randn(5, 200, generator=torch.Generator().manual_seed(0)) * torch.tensor(
        [[1], [1e-3], [50], [0], [1]]
    )
    codes, scales = kernels.rounded(x, weight)
    numbers = codes.view(torch.float8_e4m3fn).float() if kind != INT8 else codes.float()
    group = 128 if kind == FP8_GROUPS else 200
    assert torch.equal(numbers * scales.repeat_interleave(group, 1)[:, :200], activated(x, weight))


@pytest.mark.parametrize("kind", [INT8, FP8, FP8_GROUPS])
def test_a_token_that_is_not_finite_is_alone_so(kind: str) -> None:
    group = 128 if kind == FP8_GROUPS else 0
    weight = coded(Scheme("int8" if kind == INT8 else "fp8", group, activations=kind), 5, 128)
    x = torch.ones(4, 128)
    x[1, 7], x[2, 9], x[3] = torch.inf, torch.nan, 0
    found = kernels.quantised_linear(x, weight)
    assert found[1:3].isnan().all() and found[[0, 3]].isfinite().all() and not found[3].any()


@pytest.mark.parametrize("scheme", [Scheme("int4", 32, zeros=True), Scheme("fp8", activations=FP8)], ids=str)
def test_a_row_has_the_same_bits_in_any_company(scheme: Scheme) -> None:
    weight = coded(scheme, 70, 192)
    x = torch.randn(40, 192, generator=torch.Generator().manual_seed(1))
    whole = kernels.invariant_linear(x, weight)
    for first, end in ((3, 4), (0, 17), (33, 40)):
        assert torch.equal(kernels.invariant_linear(x[first:end].contiguous(), weight), whole[first:end])


def test_unfit_shapes_are_refused_with_both() -> None:
    with pytest.raises(ValueError, match=r"x: shape \(2, 60\), expected \(2, 64\)"):
        kernels.quantised_linear(torch.zeros(2, 60), coded(Scheme("int8"), 3, 64))
    with pytest.raises(ValueError, match=r"bias: shape \(2,\), expected \(3,\)"):
        kernels.quantised_linear(torch.zeros(2, 64), coded(Scheme("int8"), 3, 64), torch.zeros(2))
