"""The Triton backend behind the room's interface, interpreted: a layer by it and by the reference."""

from __future__ import annotations

import torch

from holdfast.kernels.gpu import backend
from holdfast.kernels.interface import Attention, HeadNorm, Kernels
from holdfast.kernels.reference import backend as reference
from holdfast.tests.kernels.interpreted.paged import paged


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
