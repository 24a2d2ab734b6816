"""What the Triton kernels refuse, by name; and that every shape they take has a configuration."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from holdfast.kernels.gpu.configurations import ARCHITECTURES, configuration, table
from holdfast.kernels.gpu.support import BLOCK_TOKENS, DTYPES, HEAD_DIMS, Unsupported, check_supported


def test_what_is_supported_passes() -> None:
    for dim in HEAD_DIMS:
        for dtype in DTYPES:
            for block in BLOCK_TOKENS:
                check_supported(dim, dtype, block, (9, 0))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((72, torch.bfloat16, 16, (9, 0)), ["head_dim 72", "64, 80, 96, 128, 256"]),
        ((64, torch.float64, 16, (9, 0)), ["dtype float64", "bfloat16, float16, float32"]),
        ((64, torch.float16, 8, None), ["block size 8", "16, 32, 64"]),
        ((64, torch.float16, 16, (7, 5)), ["compute capability 7.5", "8.0 and later"]),
    ],
)
def test_unsupported_shapes_are_refused_with_the_supported_ones(
    arguments: tuple[int, torch.dtype, int, tuple[int, int] | None], words: list[str]
) -> None:
    with pytest.raises(Unsupported) as refused:
        check_supported(*arguments)
    assert all(word in str(refused.value) for word in words)


def test_all_unsupported_values_are_named_in_one_error() -> None:
    with pytest.raises(Unsupported, match=r"head_dim 1.*dtype int64.*block size 3"):
        check_supported(1, torch.int64, 3)


def test_every_supported_shape_has_a_configuration() -> None:
    for kernel in ("decode", "extend", "stretch", "store"):
        for arch in ARCHITECTURES:
            for dtype in DTYPES:
                for dim in HEAD_DIMS:
                    assert configuration(kernel, arch, dtype, dim)["num_warps"] in (4, 8)


def test_invariant_stretches_are_whole_tiles() -> None:
    from holdfast.kernels.gpu.invariant_kernels import STRETCH

    assert all(STRETCH % row["TILE"] == 0 for rows in table()["stretch"].values() for row in rows.values())
