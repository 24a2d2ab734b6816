"""Which tensors a model has: their names and shapes in a checkpoint, and where each goes in ours.

Projections that read the same input are fused: q, k and v into one matrix, gate and up into another.
Knows names and shapes; reads no files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .config import ModelConfig


@dataclass(frozen=True, slots=True)
class Piece:
    """A checkpoint's tensor ``name`` of ``shape``: rows ``[row, row + shape[0])`` of our tensor ``into``."""

    name: str
    shape: tuple[int, ...]
    into: str
    row: int = 0


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer. Matrices are ``[out, in]``; biases and head norms None where the model has none.

    ``head_norm``: ``[q_heads + kv_heads, head_dim]``, for queries and keys together.
    """

    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    head_norm: Tensor | None
    output: Tensor
    output_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """The whole decoder; ``head`` is ``embedding`` itself where they are tied. Both ``[vocab, hidden]``."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    head: Tensor


def pieces_of(config: ModelConfig) -> tuple[Piece, ...]:
    """All tensors that a checkpoint of this shape must hold."""
    hidden = config.hidden_size
    pieces = [Piece("model.embed_tokens.weight", (config.vocab_size, hidden), "embedding")]
    for layer in range(config.layers):
        pieces += _layer_pieces(config, f"model.layers.{layer}.", f"{layer}.")
    pieces.append(Piece("model.norm.weight", (hidden,), "norm"))
    if not config.tied_head:
        pieces.append(Piece("lm_head.weight", (config.vocab_size, hidden), "head"))
    return tuple(pieces)


def may_be_ignored(name: str, config: ModelConfig) -> bool:
    """Tensors that nothing reads: the copy of a tied head, saved rotary frequencies."""
    return name.endswith(".rotary_emb.inv_freq") or (config.tied_head and name == "lm_head.weight")


def allocate(pieces: tuple[Piece, ...], device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """Our tensors, uninitialised, by their name in ``Piece.into``."""
    rows: dict[str, int] = {}
    for piece in pieces:
        rows[piece.into] = max(rows.get(piece.into, 0), piece.row + piece.shape[0])
    trailing = {piece.into: piece.shape[1:] for piece in pieces}
    return {
        name: torch.empty((count, *trailing[name]), device=device, dtype=dtype)
        for name, count in rows.items()
    }


def assemble(config: ModelConfig, tensors: Mapping[str, Tensor]) -> DecoderWeights:
    """Filled tensors as the decoder reads them."""
    embedding = tensors["embedding"]
    return DecoderWeights(
        embedding=embedding,
        layers=tuple(_layer(config, tensors, f"{layer}.") for layer in range(config.layers)),
        norm=tensors["norm"],
        head=tensors.get("head", embedding),
    )


def _layer_pieces(config: ModelConfig, source: str, into: str) -> Iterator[Piece]:
    hidden, mlp, dim = config.hidden_size, config.mlp_size, config.head_dim
    queries, keys = config.query_heads * dim, config.kv_heads * dim
    fused = (("q", queries, 0), ("k", keys, queries), ("v", keys, queries + keys))
    for letter, rows, at in fused:
        yield Piece(f"{source}self_attn.{letter}_proj.weight", (rows, hidden), f"{into}qkv", at)
    yield Piece(f"{source}self_attn.o_proj.weight", (hidden, queries), f"{into}output")
    if config.attention_bias:
        for letter, rows, at in fused:
            yield Piece(f"{source}self_attn.{letter}_proj.bias", (rows,), f"{into}qkv_bias", at)
        yield Piece(f"{source}self_attn.o_proj.bias", (hidden,), f"{into}output_bias")
    if config.qk_norm:
        yield Piece(f"{source}self_attn.q_norm.weight", (dim,), f"{into}query_norm")
        yield Piece(f"{source}self_attn.k_norm.weight", (dim,), f"{into}key_norm")
    yield Piece(f"{source}input_layernorm.weight", (hidden,), f"{into}input_norm")
    yield Piece(f"{source}post_attention_layernorm.weight", (hidden,), f"{into}mlp_norm")
    yield Piece(f"{source}mlp.gate_proj.weight", (mlp, hidden), f"{into}gate_up")
    yield Piece(f"{source}mlp.up_proj.weight", (mlp, hidden), f"{into}gate_up", mlp)
    yield Piece(f"{source}mlp.down_proj.weight", (hidden, mlp), f"{into}down")


def _layer(config: ModelConfig, tensors: Mapping[str, Tensor], at: str) -> LayerWeights:
    head_norm = None
    if config.qk_norm:
        head_norm = torch.cat(
            (
                tensors[f"{at}query_norm"].expand(config.query_heads, -1),
                tensors[f"{at}key_norm"].expand(config.kv_heads, -1),
            )
        )
    return LayerWeights(
        input_norm=tensors[f"{at}input_norm"],
        qkv=tensors[f"{at}qkv"],
        qkv_bias=tensors.get(f"{at}qkv_bias"),
        head_norm=head_norm,
        output=tensors[f"{at}output"],
        output_bias=tensors.get(f"{at}output_bias"),
        mlp_norm=tensors[f"{at}mlp_norm"],
        gate_up=tensors[f"{at}gate_up"],
        down=tensors[f"{at}down"],
    )
