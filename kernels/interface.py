"""What a backend computes: a decoder layer's operations over a paged cache, as one interface.

A backend is a module whose functions have these signatures: ``reference`` says in plain torch what each must
compute; the others are faster. Knows shapes; no model, no sequence, no policy.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from .batch import PagedBatch
from .reference.penalties import Said
from .reference.sampling import Typical


@dataclass(frozen=True, slots=True)
class Attention:
    """What sets one layer's attention apart.

    ``scale``: the factor on scores. ``window``: tokens a query sees, itself included; None: all before it.
    ``soft_cap``: scores become ``cap * tanh(score / cap)``, after the scale and before the mask.
    """

    scale: float
    window: int | None = None
    soft_cap: float | None = None


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """RMSNorm of queries and keys before the rotation.

    ``weight``: ``[q_heads + kv_heads, head_dim]``, queries first. ``whole``: the mean runs over all query (or
    all key) heads of a token together, else over each head alone.
    """

    weight: Tensor
    eps: float
    whole: bool = False


class Kernels(Protocol):
    """The operations of a decoder layer. Tensors are contiguous, of one dtype and device unless said."""

    def lay_out(
        self,
        arena: Tensor,
        firsts: Sequence[int],
        counts: Sequence[int],
        tables: Sequence[NDArray[np.int32]],
    ) -> PagedBatch:
        """Lay out rows over ``arena`` once per step: see `batch.lay_out`."""
        ...

    def copy_blocks(self, arena: Tensor, sources: Iterable[int], targets: Iterable[int]) -> None:
        """Copy whole blocks, one after the other in the order given."""
        ...

    def copy_pieces(self, source: Tensor, target: Tensor, pieces: NDArray[np.int64], size: int) -> None:
        """Copy ``size`` bytes from ``pieces[:, 0]`` on in ``source`` to ``pieces[:, 1]`` on in ``target``.

        Both are uint8 of one axis, in this machine's memory; ``pieces`` ``[count, 2]``, no two of whose targets
        overlap.
        """
        ...

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """``x @ weight.T + bias``: ``[tokens, in]``, ``[out, in]``, ``[out]`` to ``[tokens, out]``."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """``x / rms(x) * weight`` over the last axis."""
        ...

    def add_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """The sum ``x + residual`` and its RMSNorm, in this order; may overwrite ``x`` and ``residual``."""
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
        """Norm and rotate queries and keys, store K and V, return the queries ``[tokens, q_heads, head_dim]``.

        ``qkv``: ``[tokens, q_heads + 2 * kv_heads, head_dim]``, kv_heads as in ``arena``. ``angles``: cos and
        sin, each ``[tokens, rotary_dim]``; of a head the first ``rotary_dim`` numbers turn, the rest stay.
        ``slots``: int64 ``[tokens]``, ``block * block_tokens + offset``. ``layer`` counts within ``arena``.
        May overwrite ``qkv``.
        """
        ...

    def paged_attention(
        self, query: Tensor, arena: Tensor, layer: int, batch: PagedBatch, how: Attention
    ) -> Tensor:
        """Causal attention of each row's tokens over its own blocks: ``[tokens, q_heads, head_dim]``."""
        ...

    def gated(self, gate_up: Tensor, activation: str) -> Tensor:
        """``activation(gate) * up`` of ``[tokens, 2 * width]``, gate first; ``silu`` or ``gelu_tanh``."""
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
        min_p: Tensor | None = None,
        typical: Typical | None = None,
        candidates: int | None = None,
    ) -> Tensor:
        """Draw one token id per row, int64 ``[rows]``: see `sampling.sample`, whose draw it is everywhere."""
        ...

    def penalize(
        self, logits: Tensor, said: Said, repetition: Tensor, frequency: Tensor, presence: Tensor
    ) -> None:
        """Make likelier or less likely, in place, what was said: see `penalties.penalize`."""
        ...

    def allow(self, logits: Tensor, rows: Tensor, masks: Tensor) -> None:
        """Set to -inf, in place, what a grammar does not allow: see `penalties.allow`."""
        ...

    def log_probabilities(self, logits: Tensor, ids: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor]:
        """Of ``ids``, and ids and those of the ``most`` likeliest: see `scoring.log_probabilities`."""
        ...
