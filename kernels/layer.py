"""A decoder layer as data: its weights and settings. A backend may compute all layers in one call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from .batch import PagedBatch
from .interface import Attention, HeadNorm
from .linear import Linear


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """The weights of one layer. Norms that the model does not have are None.

    ``before_*``: the norm of a sublayer's input; ``after_*``: of its output. ``head_norm``: of queries and
    keys together, ``[q_heads + kv_heads, head_dim]``.
    """

    before_attention: Tensor | None
    qkv: Linear
    head_norm: Tensor | None
    output: Linear
    after_attention: Tensor | None
    before_mlp: Tensor | None
    gate_up: Linear
    down: Linear
    after_mlp: Tensor | None


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer: its ``weights`` and what else is needed to compute it.

    ``kind``: which of a step's angles are its own; ``group``: which of its layouts, that of the layer's KV
    group; ``number``: its index in a block of that. ``attention``, ``head_norm``: the settings of its attention
    and of the norm of queries and keys (None: no norm). ``next_norm``: the weight of the norm that is applied
    to its output: the first norm of the next layer, or the final norm; None: no norm.
    """

    weights: LayerWeights
    kind: int
    group: int
    number: int
    attention: Attention
    head_norm: HeadNorm | None
    next_norm: Tensor | None


@dataclass(frozen=True, slots=True)
class LayerSizes:
    """The sizes of all layers. ``eps``: that of all norms but those of heads; ``activation``: of the gate;
    ``dtype``: of activations and of K and V."""

    hidden: int
    q_heads: int
    kv_heads: int
    head_dim: int
    eps: float
    activation: str
    dtype: torch.dtype


class FusedLayers(Protocol):
    """All layers of a decoder, computed in one call."""

    def __call__(
        self,
        x: Tensor,
        residual: Tensor,
        angles: Sequence[tuple[Tensor, Tensor]],
        batches: Sequence[PagedBatch],
        arena: Tensor,
    ) -> Tensor:
        """Normed hidden states of a step's tokens, ``[tokens, hidden]``; stores their K and V.

        ``residual``: the embeddings; ``x``: these after the first norm; both may be overwritten, and share no
        memory. ``angles``: cos and sin, each ``[tokens, rotary_dim]``, by kind of layer; ``batches``: by
        KV group.
        """
        ...
