"""The decoder: pre-norm transformer blocks with grouped-query attention over a paged cache, in plain torch.

What sets families apart (head norms, biases, a tied head) is data: a weight that is there or is not.
Knows no files, no sequences, no sampling.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ...kernels.batch import PagedBatch
from ...kernels.reference import paged_attention, rms_norm, rotary, silu_mul, store_kv
from .config import ModelConfig
from .rope import make_rope
from .weights import DecoderWeights, LayerWeights


class Decoder:
    """Computes hidden states and logits; K and V go into the arena it is given."""

    def __init__(self, config: ModelConfig, weights: DecoderWeights) -> None:
        self.config = config
        self.weights = weights
        self.rope = make_rope(config.rope, config.head_dim, weights.embedding.device)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.weights.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        """The type of weights, activations and KV."""
        return self.weights.embedding.dtype

    def hidden(self, ids: Tensor, batch: PagedBatch, arena: Tensor) -> Tensor:
        """Normed hidden states ``[tokens, hidden]`` of ``ids`` int64 ``[tokens]``; stores their K and V.

        ``arena``: ``[block, layer, k|v, head, slot, dim]`` in the decoder's dtype.
        """
        x = F.embedding(ids, self.weights.embedding)
        angles = self.rope.angles(batch.positions, x.dtype)
        for number, layer in enumerate(self.weights.layers):
            x = x + self._attention(layer, number, self._norm(x, layer.input_norm), angles, batch, arena)
            x = x + F.linear(silu_mul(F.linear(self._norm(x, layer.mlp_norm), layer.gate_up)), layer.down)
        return self._norm(x, self.weights.norm)

    def logits(self, hidden: Tensor) -> Tensor:
        """fp32 ``[rows, vocab]`` of normed hidden states ``[rows, hidden]``."""
        return F.linear(hidden, self.weights.head).float()

    def _attention(
        self,
        layer: LayerWeights,
        number: int,
        x: Tensor,
        angles: tuple[Tensor, Tensor],
        batch: PagedBatch,
        arena: Tensor,
    ) -> Tensor:
        queries, pairs, dim = self.config.query_heads, self.config.kv_heads, self.config.head_dim
        qkv = F.linear(x, layer.qkv, layer.qkv_bias).view(len(x), queries + 2 * pairs, dim)
        turning, values = torch.split(qkv, [queries + pairs, pairs], dim=1)
        if layer.head_norm is not None:
            turning = self._norm(turning, layer.head_norm)
        query, keys = torch.split(rotary(turning, *angles), [queries, pairs], dim=1)
        store_kv(arena, number, keys, values, batch.slots)
        attended = paged_attention(query, arena, number, batch, scale=dim**-0.5)
        return F.linear(attended.view(len(x), -1), layer.output, layer.output_bias)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight, self.config.norm_eps)
