"""Quantised weights: what their codes stand for, in panels too; how activations are rounded; quantising at
load."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.kernels.names import AT_LOAD
from holdfast.kernels.packed_types import TYPES
from holdfast.kernels.quantised import (
    FP8,
    FP8_FIXED,
    FP8_GROUPS,
    INT8,
    Quantised,
    Scheme,
    activated,
    halved,
    joined,
    panel_type,
    panels,
    quantised,
    scheme_at_load,
)
from holdfast.kernels.reference import backend

from ..packed_stage import coded

E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]
SCHEMES = {
    "INT4_32": Scheme("int4", 32),
    "INT4_128": Scheme("int4", 256),
    "INT4Z_32": Scheme("int4", 96, zeros=True),
    "INT4Z_128": Scheme("int4", 128, zeros=True),
    "INT8_32": Scheme("int8", 64),
    "INT8_128": Scheme("int8"),
    "INT8Z_32": Scheme("int8", 32, zeros=True),
    "INT8Z_128": Scheme("int8", zeros=True),
    "W8A8_128": Scheme("int8", activations=INT8),
    "W8A8_32": Scheme("int8", 32, activations=INT8),
    "MXFP4": Scheme("mxfp4", 32),
}


def by_hand(matrix: Quantised) -> np.ndarray:
    """The numbers of a matrix, one at a time."""
    rows, width = matrix.shape
    found = np.zeros((rows, width))
    for row in range(rows):
        for column in range(width):
            group = column // (matrix.scheme.group or width)
            scale = float(matrix.scales[row, group])
            if matrix.scheme.codes in ("int4", "mxfp4"):
                byte = int(matrix.codes[row, column // 32 * 16 + column % 16])
                code = byte >> 4 if column % 32 >= 16 else byte & 15
                usual = 8
            else:
                code, usual = float(matrix.codes[row, column]), 0
            if matrix.scheme.codes == "mxfp4":
                found[row, column] = E2M1[code] * 2 ** (scale - 127)
                continue
            zero = usual if matrix.zeros is None else float(matrix.zeros[row, group])
            found[row, column] = (code - zero) * scale
    return found


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("rows", [1, 37])
def test_numbers_are_those_of_the_codes_also_in_panels(name: str, rows: int) -> None:
    made = coded(SCHEMES[name], rows, 768 if "96" not in str(SCHEMES[name]) else 96)
    assert np.allclose(made.numbers().numpy(), by_hand(made), rtol=1e-6)
    assert panel_type(made.scheme, made.width) == name
    assert torch.allclose(panels(made).numbers(), made.numbers(), rtol=1e-6, atol=1e-6)
    target = torch.empty(made.shape)
    made.into(target)
    assert torch.equal(target, made.numbers())


def test_odd_widths_and_groups_have_no_panels() -> None:
    for scheme, width in ((Scheme("int4", 16), 64), (Scheme("int8"), 80), (Scheme("fp8"), 128)):
        assert panel_type(scheme, width) is None
    made = coded(Scheme("int4", 30), 3, 70)
    assert np.allclose(made.numbers().numpy(), by_hand(made), rtol=1e-6) and made.codes.shape == (3, 48)


def test_every_type_of_other_checkpoints_is_the_type_of_some_scheme() -> None:
    assert {name for name in TYPES if name.startswith(("INT", "W8"))} == {*SCHEMES} - {"MXFP4"}


def test_matrices_are_joined_one_behind_the_other() -> None:
    scheme = Scheme("int4", 32, zeros=True)
    parts = [coded(scheme, 5, 64, 1), coded(scheme, 3, 64, 2, torch.bfloat16)]
    whole = joined(parts)
    assert torch.equal(whole.numbers(), torch.cat([one.numbers() for one in parts]))
    assert torch.equal(whole.some(5, 8).numbers(), parts[1].numbers())


@pytest.mark.parametrize("width", [128, 200])
def test_activations_are_rounded_by_token_by_group_or_with_a_fixed_scale(width: int) -> None:
    x = torch.randn(3, width, generator=torch.Generator().manual_seed(0))
    x[1] *= 100

    def rounded(some: torch.Tensor, scale: float) -> torch.Tensor:
        return (some / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale

    for kind, cut in ((FP8, width), (FP8_GROUPS, 128), (FP8_FIXED, width)):
        got = activated(x, coded(Scheme("fp8", activations=kind), 2, width))
        for token in range(3):
            for begin in range(0, width, cut):
                some = x[token, begin : begin + cut]
                scale = 0.02 if kind == FP8_FIXED else float(some.abs().max()) / 448
                wanted = rounded(some, scale)
                assert torch.allclose(got[token, begin : begin + cut], wanted, rtol=2**-4), kind
                assert (got[token, begin : begin + cut] == wanted).float().mean() > 0.9
    got = activated(x, coded(Scheme("int8", activations=INT8), 2, width))
    scale = x.abs().amax(1, keepdim=True) / 127
    assert torch.allclose(got, (x / scale).round() * scale, atol=float(scale.max()) * 1e-3)
    assert torch.equal(activated(x, coded(Scheme("int8"), 2, width)), x)


@pytest.mark.parametrize("activations", [INT8, FP8, FP8_GROUPS])
def test_a_token_that_is_not_finite_is_alone_so(activations: str) -> None:
    weight = coded(Scheme("int8" if activations == INT8 else "fp8", activations=activations), 5, 128)
    x = torch.ones(4, 128)
    x[1, 7], x[2, 9], x[3] = torch.inf, torch.nan, 0
    found = backend.quantised_linear(x, weight)
    assert found[1:3].isnan().all() and found[[0, 3]].isfinite().all() and not found[3].any()


@given(st.sampled_from(AT_LOAD), st.integers(1, 9), st.sampled_from([32, 96, 160, 256]), st.integers(0, 99))
def test_quantising_is_off_by_half_a_step_at_most(kind: str, rows: int, width: int, seed: int) -> None:
    matrix = torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))
    matrix[0] = 0
    scheme = scheme_at_load(kind, width)
    assert scheme is not None
    got, group = quantised(matrix, scheme).numbers(), scheme.group or width
    most = matrix.view(rows, -1, group).abs().amax(-1).repeat_interleave(group, 1)
    if kind == "fp8":
        bound = torch.maximum(matrix.abs() / 16, most / 448 / 512) * 1.001
    else:
        bound = most / {"int4": 7, "int8": 127}[kind] / 2 * 1.001
    assert ((got - matrix).abs() <= bound).all()


def test_the_group_of_int4_is_128_or_the_largest_that_fits() -> None:
    found = {width: scheme_at_load("int4", width) for width in (32, 96, 160, 256, 320, 40)}
    groups = {width: scheme and scheme.group for width, scheme in found.items()}
    assert groups == {32: 32, 96: 96, 160: 32, 256: 128, 320: 64, 40: None}


def test_bytes_are_known_before() -> None:
    for scheme, width in (
        (Scheme("int4", 32, zeros=True), 96),
        (Scheme("int8"), 70),
        (Scheme("mxfp4", 32), 40),
    ):
        made = coded(scheme, 7, width)
        assert made.nbytes == scheme.bytes_of(7, width, made.scales.itemsize)
    assert halved(torch.tensor([[1, 2]], dtype=torch.uint8)).tolist() == [[1, 2] + [0] * 14]
