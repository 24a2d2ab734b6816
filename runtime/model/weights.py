"""The tensors of a model: their names and shapes in a checkpoint, and the decoder's tensors made of them.

Projections with the same input are fused: q, k and v into one matrix, gate and up into another. Reads no
files.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from ...kernels.layer import LayerWeights
from ...kernels.linear import Linear, Matrix
from ...kernels.packed import Packed
from .config import ModelConfig
from .families import PICTURES, TEXT_NAMES
from .kv_format import KVFormat

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
MAPS = ("qkv", "output", "gate_up", "down")
"""The linear maps of a layer, by the names of the decoder's tensors."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A tensor of a checkpoint and where it goes in the decoder: the values of the tensor ``name`` become the
    rows ``[row, row + shape[0])`` of the decoder's tensor ``into``.

    ``fields``: the configuration fields that decide the shape, for errors. ``offset``: added to the stored
    values.
    """

    name: str
    shape: tuple[int, ...]
    into: str
    row: int = 0
    fields: str = ""
    offset: float = 0.0


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """The weights of the whole decoder. ``embedding``: ``[vocab, hidden]``; ``head``: a map to the
    vocabulary, of the same matrix if they are tied. ``norm``: the final norm."""

    embedding: Tensor | Packed
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    head: Linear

    @property
    def adapts(self) -> bool:
        """Whether there is room for adapters."""
        return self.layers[0].qkv.pairs is not None


def pieces_of(config: ModelConfig) -> tuple[Piece, ...]:
    """The tensors that a checkpoint of this shape must hold, all of them, and what becomes of each."""
    hidden = config.hidden_size
    table = (config.vocab_size, hidden)
    pieces = [Piece(EMBEDDING, table, "embedding", fields="vocab_size, hidden_size")]
    for layer in range(config.layers):
        pieces += _layer_pieces(config, f"model.layers.{layer}.", f"{layer}.")
    pieces.append(_norm(config, "model.norm", "norm"))
    if not config.tied_head:
        fields = "vocab_size, hidden_size, tie_word_embeddings"
        pieces.append(Piece(HEAD, table, "head", fields=fields))
    return tuple(pieces)


def may_be_ignored(name: str, config: ModelConfig) -> bool:
    """Whether the stored tensor ``name`` may be left unread: the head if it is tied to the embedding, stored
    rotary frequencies, or a tensor of another part of a multimodal checkpoint."""
    if config.inside is not None and name.startswith(PICTURES):
        return True
    return name.endswith(".rotary_emb.inv_freq") or (config.tied_head and name == HEAD)


def text_name(name: str, config: ModelConfig) -> str:
    """The name that the stored tensor ``name`` would have in a checkpoint of the decoder alone: another one
    only in a multimodal checkpoint."""
    for stored, alone in TEXT_NAMES.items() if config.inside is not None else ():
        if name.startswith(stored):
            return alone + name.removeprefix(stored)
    return name


def allocate(pieces: Iterable[Piece], device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """Uninitialised tensors that the pieces will fill, by their names in the decoder (``Piece.into``). The
    pieces of one come in the order of its rows."""
    shapes = {piece.into: (piece.row + piece.shape[0], *piece.shape[1:]) for piece in pieces}
    return {name: torch.empty(shape, device=device, dtype=dtype) for name, shape in shapes.items()}


def assemble(
    config: ModelConfig, tensors: Mapping[str, Tensor], packed: Mapping[str, Sequence[Matrix]] | None = None
) -> DecoderWeights:
    """The decoder's weights, from the filled tensors of `allocate`. ``packed``: by name, the parts of matrices
    that are in no tensor."""
    parts = {**{name: (tensor,) for name, tensor in tensors.items()}, **(packed or {})}
    (embedding,) = parts["embedding"]
    assert isinstance(embedding, Tensor | Packed), "no other form has single rows"
    return DecoderWeights(
        embedding=embedding,
        layers=tuple(_layer(config, tensors, parts, f"{layer}.") for layer in range(config.layers)),
        norm=tensors["norm"],
        head=Linear(tuple(parts.get("head", (embedding,)))),
    )


def kv_divisors(kv: KVFormat, config: ModelConfig) -> Tensor:
    """What the columns of queries, keys and values are divided by, as the scales of ``kv`` are folded into the
    weights that make them: ``[(query_heads + 2 * kv_heads) * head_dim]``, powers of two. Keys that are normed
    are not, as a norm would undo it: the norm's weight is."""
    keys = kv.key_scale if config.family.qk_norm == "none" else 1.0
    scales = torch.tensor((1.0, keys, kv.value_scale))
    heads = torch.tensor((config.query_heads, config.kv_heads, config.kv_heads))
    return scales.repeat_interleave(heads * config.head_dim)


def fold_kv_scales(kv: KVFormat, config: ModelConfig, tensors: Mapping[str, Tensor]) -> None:
    """Change weights in place so that K and V come out divided by the scales of ``kv``.

    The weights that make K and V are divided by the scales (`kv_divisors`). For V, the output projection is
    multiplied by its scale again. For K, attention multiplies scores by its scale: see `Decoder`.
    """
    if (kv.key_scale, kv.value_scale) == (1.0, 1.0):
        return
    divisors = kv_divisors(kv, config).to(tensors["norm"].device)
    for layer in range(config.layers):
        tensors[f"{layer}.qkv"] /= divisors[:, None]
        if config.biases.qkv:
            tensors[f"{layer}.qkv_bias"] /= divisors
        if config.family.qk_norm != "none":
            tensors[f"{layer}.k_norm"] /= kv.key_scale
        tensors[f"{layer}.output"] *= kv.value_scale


def _norm(config: ModelConfig, source: str, into: str) -> Piece:
    offset = config.family.norm_offset
    return Piece(f"{source}.weight", (config.hidden_size,), into, fields="hidden_size", offset=offset)


def _layer_pieces(config: ModelConfig, source: str, into: str) -> Iterator[Piece]:
    yield from _attention_pieces(config, f"{source}self_attn.", into)
    yield from _mlp_pieces(config, f"{source}mlp.", into)
    for norm, name in asdict(config.family.norms).items():
        if name is not None:
            yield _norm(config, source + name, into + norm)


def _attention_pieces(config: ModelConfig, source: str, into: str) -> Iterator[Piece]:
    hidden, dim, biases = config.hidden_size, config.head_dim, config.biases
    queries, keys = config.query_heads * dim, config.kv_heads * dim
    fields = ("attention_bias", "num_attention_heads, num_key_value_heads, head_dim, hidden_size")
    rows = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
    if config.family.fused:
        rows = {"qkv_proj": queries + 2 * keys}
    yield from _linear_pieces(source, rows, hidden, f"{into}qkv", biases.qkv, *fields)
    yield from _linear_pieces(source, {"o_proj": hidden}, queries, f"{into}output", biases.output, *fields)
    sizes = {"none": (), "head": (dim, dim), "whole": (queries, keys)}[config.family.qk_norm]
    for name, size in zip(("q_norm", "k_norm"), sizes, strict=False):
        yield Piece(f"{source}{name}.weight", (size,), into + name, 0, fields[1], config.family.norm_offset)


def _mlp_pieces(config: ModelConfig, source: str, into: str) -> Iterator[Piece]:
    hidden, mlp, bias = config.hidden_size, config.mlp_size, config.biases.mlp
    fields = ("mlp_bias", "intermediate_size, hidden_size")
    rows = {"gate_up_proj": 2 * mlp} if config.family.fused else {"gate_proj": mlp, "up_proj": mlp}
    yield from _linear_pieces(source, rows, hidden, f"{into}gate_up", bias, *fields)
    yield from _linear_pieces(source, {"down_proj": hidden}, mlp, f"{into}down", bias, *fields)


def _linear_pieces(
    source: str, rows: Mapping[str, int], width: int, into: str, bias: bool, flag: str, fields: str
) -> Iterator[Piece]:
    """The projections of one input that become one map. ``rows``: of each, in their order; ``bias``: whether
    they have one, which the field ``flag`` says."""
    at = 0
    for name, count in rows.items():
        yield Piece(f"{source}{name}.weight", (count, width), into, at, fields)
        if bias:
            yield Piece(f"{source}{name}.bias", (count,), f"{into}_bias", at, f"{flag}, {fields}")
        at += count


def _layer(
    config: ModelConfig, tensors: Mapping[str, Tensor], parts: Mapping[str, Sequence[Matrix]], at: str
) -> LayerWeights:
    fields: dict[str, Any] = {name: tensors.get(at + name) for name in asdict(config.family.norms)}
    for name in MAPS:
        fields[name] = Linear(tuple(parts[at + name]), tensors.get(f"{at}{name}_bias"))
    head_norm = None
    if config.family.qk_norm != "none":
        norms = ((tensors[f"{at}q_norm"], config.query_heads), (tensors[f"{at}k_norm"], config.kv_heads))
        head_norm = torch.cat([norm.view(-1, config.head_dim).expand(heads, -1) for norm, heads in norms])
    return LayerWeights(head_norm=head_norm, **fields)
