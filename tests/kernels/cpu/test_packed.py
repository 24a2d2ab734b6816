"""Products with packed weights on the CPU: those of the reference, with the same bits in any company and on any
processor."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from holdfast.kernels.cpu import backend
from holdfast.kernels.packed import plain
from holdfast.kernels.packed_types import TYPES
from holdfast.kernels.reference import backend as reference

from ..packed_stage import matrix
from .cpu_stage import TOLERANCE, numbers

USUAL = ("Q4_1", "Q8_0", "Q6_K", "INT4_128", "W8A8_32")
"""One of each kind of block; the other types take minutes to compile."""


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, torch.float32) for name in USUAL), ("Q4_1", torch.bfloat16)],
    ids=str,
)
def test_products_and_rows_are_the_references(name: str, dtype: torch.dtype) -> None:
    weight, bias = matrix(name, 53, 768), numbers(53, dtype=dtype, seed=3)
    for rows in (1, 2, 3, 5, 8, 19, 70):
        x = numbers(rows, 768, dtype=dtype, seed=rows)
        got, wanted = backend.packed_linear(x, weight, bias), reference.packed_linear(x, weight, bias)
        assert got.dtype == dtype and got.shape == (rows, 53)
        most = float(wanted.abs().max())
        torch.testing.assert_close(got, wanted, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] * most)
    ids = torch.tensor([52, 0, 17, 17])
    assert torch.equal(backend.packed_rows(weight, ids, dtype), reference.packed_rows(weight, ids, dtype))


@pytest.mark.more
@pytest.mark.parametrize("name", sorted({*TYPES} - {*USUAL}))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_all_other_types(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    test_products_and_rows_are_the_references(name, dtype)
    if dtype == torch.float32:
        test_a_row_has_the_same_bits_in_any_company(name, 2, monkeypatch)


@pytest.mark.parametrize("name", USUAL)
@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_has_the_same_bits_in_any_company(
    name: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "parts_for", lambda work, grain: threads)
    weight, x = matrix(name, 70, 768), numbers(150, 768, dtype=torch.float32, seed=1)
    whole = backend.packed_linear(x, weight)
    for rows in (1, 2, 3, 4, 7, 8, 9, 64):
        assert torch.equal(
            whole[11 : 11 + rows], backend.packed_linear(x[11 : 11 + rows].contiguous(), weight)
        )


def test_a_row_that_is_not_finite_is_alone_so() -> None:
    x = numbers(5, 256, dtype=torch.float32, seed=1)
    whole = backend.packed_linear(x, matrix("Q6_K", 20, 256))
    x[2, 100] = torch.nan
    x[4, 0] = -torch.inf
    found = backend.packed_linear(x, matrix("Q6_K", 20, 256))
    assert found[[2, 4]].isnan().all() and torch.equal(found[[0, 1, 3]], whole[[0, 1, 3]])


ELSEWHERE = """
import sys, numpy
import torch
from holdfast.kernels.cpu.compiling import join_torch
from holdfast.kernels.cpu import backend
from holdfast.kernels.interface import Attention
from holdfast.kernels.packed import plain
from holdfast.tests.kernels.cpu.cpu_stage import LAYER, Stage, numbers
from holdfast.tests.kernels.packed_stage import matrix
join_torch()
x = numbers(9, 768, dtype=torch.float32, seed=1)
found = {name: backend.packed_linear(x, matrix(name, 37, 768)).numpy() for name in sys.argv[2:]}
found["plain"] = backend.packed_linear(x, plain(numbers(37, 768, dtype=torch.float32, seed=2))).numpy()
for dtype in (torch.float32, torch.bfloat16):
    stage, how = Stage([300], [300], 2, 3, 64, 16, dtype), Attention(0.1)
    arena, query = stage.filled(backend), stage.query
    whole = backend.paged_attention(query, arena, LAYER, backend.lay_out(arena, [0], [300], stage.tables), how)
    one = backend.lay_out(arena, [299], [1], stage.tables)
    assert torch.equal(whole[299:], backend.paged_attention(query[299:].clone(), arena, LAYER, one, how))
    weight = plain(numbers(40, 48, dtype=dtype, seed=3))
    whole = backend.packed_linear(query.view(-1, 48), weight)
    assert torch.equal(whole[3:4], backend.packed_linear(query.view(-1, 48)[3:4].clone(), weight))
numpy.savez(sys.argv[1], **found)
"""
PROCESSORS = {
    "AVX-512 without VNNI": "+avx,+avx2,+fma,+f16c,+avx512f,+avx512bw,+avx512vl,+avx512dq",
    "AVX2": "+avx,+avx2,+fma,+f16c",
    "no AVX2": "+sse4.2,+avx,+fma,+f16c",
}


@pytest.mark.more
@pytest.mark.parametrize("processor", PROCESSORS)
def test_every_processor_computes_the_same(processor: str, tmp_path: Path) -> None:
    """Codes up to 15, up to 255, and of a table; numbers of other processors' code on this one."""
    names, place = ("Q4_K", "Q8_0", "IQ4_XS"), tmp_path / "found.npz"
    told = {**os.environ, "NUMBA_CPU_NAME": "x86-64", "NUMBA_CPU_FEATURES": PROCESSORS[processor]}
    subprocess.run([sys.executable, "-c", ELSEWHERE, str(place), *names], env=told, check=True)
    x = numbers(9, 768, dtype=torch.float32, seed=1)
    with np.load(place) as found:
        for name in names:
            assert np.array_equal(found[name], backend.packed_linear(x, matrix(name, 37, 768)).numpy()), name
        weight = plain(numbers(37, 768, dtype=torch.float32, seed=2))
        assert np.array_equal(found["plain"], backend.packed_linear(x, weight).numpy())
