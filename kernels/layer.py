"""A decoder layer as data, for a backend that computes all layers in one call."""

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
class Layer:
    """What a layer computes. Norms that the model does not have are None.

    ``kind``: which of the step's arenas and angles are its own; ``number``: its index in that arena.
    ``before_*``: the weight of the norm of a sublayer's input; ``after_*``: of its output, before that is added
    to the residual. ``next_norm``: of the norm of the layer's output, which the next layer takes, or which is
    the final one.
    """

    kind: int
    number: int
    attention: Attention
    head_norm: HeadNorm | None
    qkv: Linear
    output: Linear
    after_attention: Tensor | None
    before_mlp: Tensor | None
    gate_up: Linear
    down: Linear
    after_mlp: Tensor | None
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


class WholeLayers(Protocol):
    """All layers of a decoder."""

    def __call__(
        self,
        x: Tensor,
        residual: Tensor,
        angles: Sequence[tuple[Tensor, Tensor]],
        batch: PagedBatch,
        arenas: Sequence[Tensor],
    ) -> Tensor:
        """Normed hidden states of a step's tokens, ``[tokens, hidden]``; stores their K and V.

        ``residual``: the embeddings; ``x``: these after the first norm; both may be overwritten, and share no
        memory. ``angles``: cos and sin, each ``[tokens, rotary_dim]``, by kind of layer; ``arenas``: likewise.
        """
        ...
