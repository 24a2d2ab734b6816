"""Times of other libraries ("peers") for the same attention: SDPA's backends, FlexAttention, FlashInfer.

Each function returns microseconds by the peer's name, or the reason as text if the peer is missing or fails.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from .measure import Bench, Work, median_us, reason
from .paging import LAYERS, Heads, Paged, contiguous

Times = dict[str, float | str]
BACKENDS = {
    "SDPA flash": SDPBackend.FLASH_ATTENTION,
    "SDPA cuDNN": SDPBackend.CUDNN_ATTENTION,
    "SDPA efficient": SDPBackend.EFFICIENT_ATTENTION,
}


def attempt(bench: Bench, make: Callable[[], list[Work]]) -> float | str:
    """The median microseconds of the calls that ``make`` returns, or the reason as text if making or running
    them fails."""
    try:
        return median_us(bench, make())
    except Exception as error:  # a peer fails in its own ways; the line says which
        return reason(error)


def sdpa(bench: Bench, made: Paged, *, causal: bool) -> Times:
    """SDPA by each backend, over contiguous K and V of the batch's row 0. ``causal``: the queries may be a
    whole prompt, computed with a causal mask; otherwise they are the last tokens of a longer context, without a
    mask."""
    caches = [contiguous(made, 0, layer) for layer in range(LAYERS)]
    query = made.query.transpose(0, 1)[None]

    def call(backend: SDPBackend, keys: Tensor, values: Tensor) -> None:
        with sdpa_kernel(backend):
            if causal and query.shape[2] == keys.shape[2]:
                F.scaled_dot_product_attention(query, keys, values, is_causal=True, enable_gqa=True)
            else:
                F.scaled_dot_product_attention(query, keys, values, enable_gqa=True)

    return {
        name: attempt(bench, partial(_each, partial(call, backend), caches))
        for name, backend in BACKENDS.items()
    }


def _each(call: Callable[[Tensor, Tensor], object], caches: list[tuple[Tensor, Tensor]]) -> list[Work]:
    return [partial(call, *cache) for cache in caches]


def flex(bench: Bench, made: Paged) -> Times:
    """FlexAttention, compiled, over contiguous K and V of the batch's row 0; the queries are the last tokens of
    the context."""

    def make() -> list[Work]:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        caches = [contiguous(made, 0, layer) for layer in range(LAYERS)]
        query, length = made.query.transpose(0, 1)[None].contiguous(), caches[0][0].shape[2]
        shift = length - query.shape[2]

        def seen(batch: Tensor, head: Tensor, at: Tensor, to: Tensor) -> Tensor:
            return to <= at + shift

        mask = create_block_mask(seen, None, None, query.shape[2], length, device=str(bench.device))
        attend = torch.compile(flex_attention, dynamic=False)
        return [partial(attend, query, *cache, block_mask=mask, enable_gqa=True) for cache in caches]

    if bench.rehearsal:
        return {"FlexAttention": "not rehearsed"}
    return {"FlexAttention": attempt(bench, make)}


def flashinfer(bench: Bench, made: Paged, heads: Heads) -> Times:
    """FlashInfer over the same pages, planned once: its decode if every row has one token, else its paged
    prefill."""

    def make() -> list[Work]:
        import flashinfer  # type: ignore[import-not-found]

        single = made.query.shape[0] == made.batch.context_lengths.shape[0]
        workspace = torch.empty(256 << 20, dtype=torch.uint8, device=bench.device)
        lengths = made.batch.context_lengths.int()
        pages = -(-lengths // heads.block)
        starts = F.pad(pages.cumsum(0), (1, 0)).int()
        indices = torch.cat(
            [row[:width] for row, width in zip(made.batch.tables, pages.tolist(), strict=True)]
        ).int()
        last = lengths - (pages - 1) * heads.block
        caches = [made.arena[:, layer].contiguous() for layer in range(LAYERS)]
        pages_of = (starts, indices, last, heads.query, heads.kv, heads.dim, heads.block)
        wrapper: Any
        if single:
            wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=True)
            wrapper.plan(*pages_of, q_data_type=heads.dtype, kv_data_type=heads.dtype)
        else:
            wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND")
            wrapper.plan(made.batch.row_starts.int(), *pages_of, causal=True, q_data_type=heads.dtype)
        return [partial(wrapper.run, made.query, cache) for cache in caches]

    return {"FlashInfer": attempt(bench, make)}
