"""The decoder: transformer blocks with grouped-query attention over a paged KV cache.

Families differ by data only: which weights there are, factors, the kind of each layer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...kernels.batch import PagedBatch
from ...kernels.interface import Attention, HeadNorm, Kernels
from ...kernels.layer import Layer, LayerSizes
from ...kernels.linear import rows_of
from ...kernels.reference import backend
from .config import ModelConfig
from .rope import Rope
from .weights import DecoderWeights


class Decoder:
    """Computes hidden states and logits of a step's tokens; stores their K and V in an arena."""

    def __init__(
        self,
        config: ModelConfig,
        weights: DecoderWeights,
        kernels: Kernels = backend,
        key_scale: float = 1.0,
    ) -> None:
        """``weights``: as `weights.assemble` makes them. ``kernels``: the backend that computes.
        ``key_scale``: the factor that stored keys have to be multiplied by; attention multiplies its scores
        by it instead."""
        self.config = config
        self.key_scale = key_scale
        self.weights = weights
        self.kernels = kernels
        self.groups = len(config.kv_layers)
        """The number of KV groups."""
        self.device = weights.norm.device
        """The device of the weights."""
        self.dtype = weights.norm.dtype
        """The type of activations and KV, and of weights that are not packed."""
        self._ropes = {kind.rope: Rope(kind.rope, self.device) for kind in config.kinds}
        self._layers = tuple(self._layer(number) for number in range(config.layers))
        # The factor is rounded to the type of the embedding, as in transformers.
        self._embedding_scale = float(torch.tensor(config.scales.embedding, dtype=self.dtype))
        heads = (config.query_heads, config.kv_heads, config.head_dim)
        sizes = LayerSizes(config.hidden_size, *heads, config.norm_eps, config.activation, self.dtype)
        plain = config.scales.residual == 1.0
        self._fused = kernels.fuse_layers(self._layers, sizes) if plain else None
        """What computes all layers in one call, if the backend has it."""

    def computing_by(self, kernels: Kernels) -> Decoder:
        """The same decoder, computing with another backend."""
        return Decoder(self.config, self.weights, kernels, self.key_scale)

    def hidden(self, ids: Tensor, batches: Sequence[PagedBatch], arena: Tensor) -> Tensor:
        """Normed hidden states ``[tokens, hidden]`` of ``ids`` int64 ``[tokens]``; stores their K and V.

        ``batches``: which tokens belong to which sequence, and each sequence's block table, by KV group.
        ``arena``: ``[block, layer, k|v, head, slot, dim]`` in the decoder's dtype or a narrower one.
        """
        batch = batches[0]
        residual = rows_of(self.weights.embedding, ids, self.dtype, self.kernels)
        if self._embedding_scale != 1.0:
            residual = residual * self._embedding_scale
        at = batch.positions, self.dtype
        by_rope = {rope: (made.angles(*at), made.query_scale(*at)) for rope, made in self._ropes.items()}
        turns = [by_rope[kind.rope] for kind in self.config.kinds]
        first = self.weights.layers[0].before_attention
        x = residual if first is None else self.kernels.rms_norm(residual, first, self.config.norm_eps)
        if self._fused is not None and all(query_scale is None for _, query_scale in turns):
            x = x.clone() if first is None else x
            return self._fused(x, residual, [angles for angles, _ in turns], batches, arena)
        for layer in self._layers:
            weights = layer.weights
            x = self._attend(layer, x, *turns[layer.kind], batches[layer.group], arena)
            residual, x = self._join(x, residual, weights.after_attention, weights.before_mlp)
            x = self.kernels.gated(weights.gate_up(x, self.kernels, batch.adapters), self.config.activation)
            x = weights.down(x, self.kernels, batch.adapters)
            residual, x = self._join(x, residual, weights.after_mlp, layer.next_norm)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """The logits of normed hidden states ``[rows, hidden]``: fp32 ``[rows, vocab]``."""
        logits, scales = self.weights.head(hidden, self.kernels).float(), self.config.scales
        if scales.logits != 1.0:
            logits = logits / scales.logits
        if scales.logits_cap is not None:
            logits = scales.logits_cap * torch.tanh(logits / scales.logits_cap)
        return logits

    def _attend(
        self,
        layer: Layer,
        x: Tensor,
        angles: tuple[Tensor, Tensor],
        query_scale: Tensor | None,
        batch: PagedBatch,
        arena: Tensor,
    ) -> Tensor:
        """``angles``: cos and sin of each token's rotation; ``query_scale``: the factor on its queries, None:
        1."""
        heads, dim = self.config.query_heads + 2 * self.config.kv_heads, self.config.head_dim
        qkv = layer.weights.qkv(x, self.kernels, batch.adapters).view(-1, heads, dim)
        norm, slots = layer.head_norm, batch.slots
        query = self.kernels.rotate_and_store(qkv, norm, angles, arena, layer.number, slots)
        if query_scale is not None:
            query = query * query_scale
        attended = self.kernels.paged_attention(query, arena, layer.number, batch, layer.attention)
        return layer.weights.output(attended.flatten(1), self.kernels, batch.adapters)

    def _join(
        self, x: Tensor, residual: Tensor, after: Tensor | None, before: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Add a sublayer's output ``x`` to ``residual``; returns the sum and the next sublayer's input.

        ``after``: the weight of the norm of ``x`` before it is added. ``before``: the weight of the norm of
        the next sublayer's input. None: no norm.
        """
        if after is not None:
            x = self.kernels.rms_norm(x, after, self.config.norm_eps)
        if self.config.scales.residual != 1.0:
            x = x * self.config.scales.residual
        if before is None:
            total = x + residual
            return total, total
        return self.kernels.add_norm(x, residual, before, self.config.norm_eps)

    def _layer(self, number: int) -> Layer:
        config, layers, kind = self.config, self.weights.layers, self.config.kind_of[number]
        groups = config.kv_layers
        group = next(at for at, own in enumerate(groups) if number in own)
        window, scales, head_norm = config.kinds[kind].window, config.scales, layers[number].head_norm
        norm = self.weights.norm if number + 1 == len(layers) else layers[number + 1].before_attention
        whole = config.family.qk_norm == "whole"
        return Layer(
            weights=layers[number],
            kind=kind,
            group=group,
            number=groups[group].index(number),
            attention=Attention(scales.attention * self.key_scale, window, scales.attention_cap),
            head_norm=None if head_norm is None else HeadNorm(head_norm, config.norm_eps, whole),
            next_norm=norm,
        )
