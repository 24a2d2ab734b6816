"""The decoder: pre-norm transformer blocks with grouped-query attention over a paged cache, in plain torch.

What sets families apart (head norms, biases, a tied head) is data: a weight that is there or is not.
Knows no files, no sequences, no sampling.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ...kernels import reference
from ...kernels.batch import PagedBatch
from ...kernels.interface import Attention, HeadNorm, Kernels
from .config import ModelConfig
from .rope import make_rope
from .weights import DecoderWeights, LayerWeights


class Decoder:
    """Computes hidden states and logits; K and V go into the arena it is given."""

    def __init__(self, config: ModelConfig, weights: DecoderWeights, kernels: Kernels = reference) -> None:
        self.config = config
        self.weights = weights
        self.kernels = kernels
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
        residual = F.embedding(ids, self.weights.embedding)
        angles = self.rope.angles(batch.positions, residual.dtype)
        eps, add_norm = self.config.norm_eps, self.kernels.add_norm
        x = self.kernels.rms_norm(residual, self.weights.layers[0].input_norm, eps)
        for number, layer in enumerate(self.weights.layers):
            x = self._attention(layer, number, x, angles, batch, arena)
            residual, x = add_norm(x, residual, layer.mlp_norm, eps)
            x = F.linear(self.kernels.gated(F.linear(x, layer.gate_up), "silu"), layer.down)
            residual, x = add_norm(x, residual, self._norm_behind(number), eps)
        return x

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
        heads, dim = self.config.query_heads + 2 * self.config.kv_heads, self.config.head_dim
        qkv = F.linear(x, layer.qkv, layer.qkv_bias).view(len(x), heads, dim)
        norm = None if layer.head_norm is None else HeadNorm(layer.head_norm, self.config.norm_eps)
        query = self.kernels.rotate_and_store(qkv, norm, angles, arena, number, batch.slots)
        attended = self.kernels.paged_attention(query, arena, number, batch, Attention(dim**-0.5))
        return F.linear(attended.view(len(x), -1), layer.output, layer.output_bias)

    def _norm_behind(self, number: int) -> Tensor:
        """The norm that reads what layer ``number`` leaves: the next layer's, or the last one."""
        layers = self.weights.layers
        return self.weights.norm if number + 1 == len(layers) else layers[number + 1].input_norm
