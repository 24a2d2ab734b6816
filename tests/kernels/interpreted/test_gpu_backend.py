"""The Triton backend behind the room's interface, interpreted: a layer by it and by the reference."""

from __future__ import annotations

import pytest
import torch

from holdfast.kernels.gpu import backend, invariant, ops
from holdfast.kernels.interface import Attention, HeadNorm, Kernels
from holdfast.kernels.reference import backend as reference
from holdfast.tests.kernels.interpreted.paged import paged, queries


def layer(kernels: Kernels, rows: list[tuple[int, int]]) -> list[torch.Tensor]:
    """One layer's operations over random numbers; the cached context is `paged`'s."""
    arena, batch = paged(rows)
    torch.manual_seed(0)
    tokens, width = batch.positions.numel(), 6 * 64
    x, residual, gate_up = torch.randn(tokens, width), torch.randn(tokens, width), torch.randn(tokens, 200)
    total, normed = kernels.add_norm(x.clone(), residual.clone(), torch.ones(width), 1e-6)
    angle = torch.randn(tokens, 32).repeat(1, 2)
    norm = HeadNorm(torch.rand(6, 64), 1e-6)
    qkv = torch.cat((normed, total), 1)[:, : 8 * 64].reshape(tokens, 8, 64).contiguous()
    query = kernels.rotate_and_store(qkv, norm, (angle.cos(), angle.sin()), arena, 0, batch.slots)
    attended = kernels.paged_attention(query.contiguous(), arena, 0, batch, Attention(0.125))
    return [
        total,
        normed,
        attended,
        kernels.rms_norm(x, torch.ones(width), 1e-6),
        kernels.gated(gate_up, "silu"),
    ]


def test_a_layer_equals_the_reference() -> None:
    for rows in ([(20, 1), (0, 1), (64, 1)], [(20, 1), (0, 17), (30, 5)]):
        for got, expected in zip(layer(backend, rows), layer(reference, rows), strict=True):
            torch.testing.assert_close(got, expected, atol=3e-5, rtol=3e-5)


def test_operators_say_what_they_write_and_return() -> None:
    arena, batch = paged([(20, 1), (0, 17)], kv_heads=1)
    query, x = queries(batch, arena, 2), torch.randn(3, 64)
    attended = (query, arena.nan_to_num(), 0, *ops.flat(batch, Attention(0.1)))
    cos = torch.rand(18, 64)
    calls = [
        (ops.paged_attention, attended),
        (ops.invariant_attention, attended),
        (ops.invariant_linear, (x, torch.randn(5, 64), torch.randn(5))),
        (
            ops.rotate_and_store,
            (torch.randn(18, 4, 64), None, 0.0, False, cos, cos, arena.nan_to_num(), 1, batch.slots),
        ),
        (ops.rms_norm, (x, torch.ones(64), 1e-6)),
        (ops.add_norm, (x, x.clone(), torch.ones(64), 1e-6)),
        (ops.gated, (x, "silu")),
    ]
    for operator, arguments in calls:
        checked = torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))
        assert set(checked.values()) == {"SUCCESS"}


@pytest.mark.parametrize("kernels", [backend, invariant])
def test_torch_compile_sees_one_graph(kernels: Kernels) -> None:
    arena, batch = paged([(20, 1), (0, 17)], kv_heads=1)
    query, weight, arena = queries(batch, arena, 2), torch.randn(5, 128), arena.nan_to_num()

    def attend_and_multiply(query: torch.Tensor) -> torch.Tensor:
        attended = kernels.paged_attention(query, arena, 0, batch, Attention(0.1))
        return kernels.linear(attended.flatten(1)[:, :128].contiguous(), weight)

    compiled = torch.compile(attend_and_multiply, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(query), attend_and_multiply(query))
