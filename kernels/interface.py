"""The interface of a backend: a decoder layer's operations over a paged cache, and sampling.

A backend is a module with functions of these signatures. ``reference`` defines in torch what each must
compute; the others are faster.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .batch import Numbers, PagedBatch, Tables
from .device import Device
from .low_rank import LowRank
from .packed import Packed
from .quantised import Quantised
from .reference.seeded_sampling import Typical

if TYPE_CHECKING:
    from .layer import FusedLayers, Layer, LayerSizes


@dataclass(frozen=True, slots=True)
class Attention:
    """The attention settings of one layer.

    ``scale``: the factor on scores. ``window``: how many tokens a query sees, with itself; None: itself and
    all before it. ``soft_cap``: scores become ``cap * tanh(score / cap)``, after the scale and before the
    mask; None: no cap.
    """

    scale: float
    window: int | None = None
    soft_cap: float | None = None


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """RMSNorm of queries and keys before the rotation.

    ``weight``: ``[q_heads + kv_heads, head_dim]``, queries first. ``eps``: added to the mean square.
    ``whole``: the mean runs over all query (or all key) heads of a token together; otherwise over each head.
    """

    weight: Tensor
    eps: float
    whole: bool = False


class Kernels(Protocol):
    """The operations of a backend. Tensors are contiguous, of one dtype and device unless stated.

    ``numerics``: the backend's name and the version of its arithmetic. The version is raised when a result has
    other bits than before, so that stored KV of the older arithmetic is not used with it.

    ``by_slot``: it reads block tables that stay on the device, and what it launches depends on shapes alone:
    so a step can be captured. Then layouts have `PagedBatch.lines`, and are not made by `lay_out`."""

    numerics: str
    by_slot: bool

    def look_up(
        self,
        tables: Tensor,
        last: Tensor,
        lines: Tensor,
        positions: Tensor,
        given: Tensor,
        block_tokens: int,
    ) -> tuple[Tensor, Tensor]:
        """The id of each token of a step, and the slot in the arena where its K and V go (-1: nowhere), int64
        ``[tokens]`` each.

        ``tables``: block ids, int32 ``[lines, blocks]``; ``last``: the id that each line drew last, int64
        ``[lines]``. By token, int64: ``lines``, the line of its row, -1 for padding; ``positions``; ``given``,
        its id, -1 for the one that its line drew last.
        """
        ...

    def lay_out(
        self,
        arena: Tensor,
        firsts: Numbers,
        counts: Numbers,
        tables: Tables,
        device: Device | None = None,
    ) -> PagedBatch:
        """Lay out a step's rows, once for all layers: row r computes ``counts[r]`` tokens from position
        ``firsts[r]`` on, and ``tables[r]`` has the ids of its blocks from position 0 on.

        ``arena`` gives the block size, and the device if ``device`` is None; the result holds for all arenas of
        its block size.
        """
        ...

    def copy_blocks(
        self,
        arena: Tensor,
        sources: Iterable[int],
        targets: Iterable[int],
        device: Device | None = None,
    ) -> None:
        """Copy whole blocks of ``arena``, ``sources[i]`` to ``targets[i]``, one after the other in the order
        given: a target may be a later source. ``device``: the arena's; None: found from it."""
        ...

    def copy_pieces(self, source: Tensor, target: Tensor, pieces: NDArray[np.int64], size: int) -> None:
        """Copy ``size`` bytes from each offset ``pieces[:, 0]`` of ``source`` to offset ``pieces[:, 1]`` of
        ``target``.

        Both are one-dimensional uint8 tensors in host memory. ``pieces``: ``[count, 2]``; its targets do not
        overlap.
        """
        ...

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """``x @ weight.T + bias``: ``[tokens, in]``, ``[out, in]``, ``[out]`` to ``[tokens, out]``."""
        ...

    def packed_linear(self, x: Tensor, weight: Packed, bias: Tensor | None = None) -> Tensor:
        """`linear` with a packed weight. If that is quantised, each run of 32 numbers of ``x``, or each row if
        the type says so, is rounded to 8 bits first, as `packed.rounded` does it; the rest is exact but for the
        sums in fp32."""
        ...

    def quantised_linear(self, x: Tensor, weight: Quantised, bias: Tensor | None = None) -> Tensor:
        """`linear` with a quantised weight. ``x`` is rounded first as its scheme says, see
        `quantised.activated`; the rest is exact but for the sums in fp32."""
        ...

    def packed_rows(self, weight: Packed, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """The rows ``ids``, int64 ``[n]``, of a packed matrix: ``[n, in]`` in ``dtype``."""
        ...

    def fuse_layers(self, layers: Sequence[Layer], sizes: LayerSizes) -> FusedLayers | None:
        """What computes all ``layers`` of a decoder in one call, with the bits of the operations here; None:
        this backend has nothing like it for them."""
        ...

    def add_low_rank(self, out: Tensor, x: Tensor, pairs: LowRank, slots: Tensor) -> None:
        """Add to each row of ``out`` ``[tokens, out]``, in place, what the pairs in its slot make of its row of
        ``x`` ``[tokens, in]``: to the columns of each part ``x @ a @ b``. ``slots``: int64 ``[tokens]``, -1
        for a row to which nothing is added. The sums are in fp32, and rounded once."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """RMSNorm, ``x / sqrt(mean(x ** 2) + eps) * weight``, over the last axis."""
        ...

    def add_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """The sum ``x + residual`` and its RMSNorm (with ``weight`` and ``eps``), in this order; may
        overwrite ``x`` and ``residual``."""
        ...

    def rotate_and_store(
        self,
        qkv: Tensor,
        norm: HeadNorm | None,
        angles: tuple[Tensor, Tensor],
        arena: Tensor,
        layer: int,
        slots: Tensor,
    ) -> Tensor:
        """Norm (if ``norm``) and rotate queries and keys, and store K and V; returns the queries, ``[tokens,
        q_heads, head_dim]``.

        ``qkv``: ``[tokens, q_heads + 2 * kv_heads, head_dim]``, kv_heads as in ``arena``. ``angles``: cos and
        sin, each ``[tokens, rotary_dim]``; only the first ``rotary_dim`` numbers of a head are rotated.
        ``slots``: int64 ``[tokens]``, ``block * block_tokens + offset``. ``layer``: its index in ``arena``.
        May overwrite ``qkv``.
        """
        ...

    def paged_attention(
        self, query: Tensor, arena: Tensor, layer: int, batch: PagedBatch, how: Attention
    ) -> Tensor:
        """Causal attention of each row's tokens over its own blocks; ``query`` and the result are ``[tokens,
        q_heads, head_dim]``. K and V of these tokens are stored already. ``layer``: its index in
        ``arena``."""
        ...

    def gated(self, gate_up: Tensor, activation: str) -> Tensor:
        """``activation(gate) * up`` of ``[tokens, 2 * width]``, gate first: ``[tokens, width]``.
        ``activation``: ``silu`` or ``gelu_tanh``."""
        ...

    def sample(
        self,
        logits: Tensor,
        temperature: Tensor,
        top_k: Tensor,
        top_p: Tensor,
        seeds: Tensor,
        positions: Tensor,
        *,
        min_p: Tensor,
        typical: Typical | None = None,
    ) -> Tensor:
        """Sample one token id per row of ``logits`` ``[rows, vocab]``: int64 ``[rows]``. The random number
        depends on (seed, position) only, so every backend and every batch gives the same tokens.

        ``temperature`` (0: greedy), ``top_k`` (0: all), ``top_p`` (1: all), ``min_p`` (0: all), ``seeds``,
        ``positions`` (of the sampled token): ``[rows]``. ``typical``: the rows with typical sampling; None: no
        row. Without them nothing depends on the values in a tensor but the tokens: on a device the call can be
        captured.
        """
        ...

    def count(self, tally: Tensor, lines: Tensor, tokens: Tensor, output: Tensor) -> None:
        """Count ``tokens`` (ids) into ``lines`` of ``tally``, int32 ``[lines, vocab]``, in place: a cell has
        bit 0 set if its token occurs at all, and 2 more for each time that it is in the output. ``output``: 1
        for a token of the output, 0 for the prompt. All but the tally are int64 ``[n]``."""
        ...

    def penalize(
        self,
        logits: Tensor,
        rows: Tensor,
        tally: Tensor,
        lines: Tensor,
        repetition: Tensor,
        frequency: Tensor,
        presence: Tensor,
    ) -> None:
        """Apply repetition, frequency and presence penalties for the tokens counted in ``lines`` of ``tally``
        to ``rows`` of ``logits`` fp32 ``[all rows, vocab]``, in place. Rows, each once, and lines: int64
        ``[n]``; the penalties: fp64 ``[n]``."""
        ...

    def allow(self, logits: Tensor, rows: Tensor, masks: Tensor) -> None:
        """Set the logits that a grammar does not allow to -inf, in place. ``rows``: int64 ``[n]``; ``masks``:
        int64 ``[n, ceil(vocab / 64)]``, one bit per token, 1 if it is allowed, the lowest bit first."""
        ...

    def log_probabilities(self, logits: Tensor, ids: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor]:
        """The log probability of each row's token ``ids`` ``[rows]``; and the ids and log probabilities of
        its ``most`` likeliest tokens, ``[rows, most]``, likeliest first."""
        ...
