"""Adapters (LoRA) as peft writes them: a folder with ``adapter_config.json`` and ``adapter_model.safetensors``.

All is checked by the configuration and the file's header before a tensor is read. An error is one line with the
file, the tensor or field, and the cause. No code of a folder is run: weights are read from safetensors alone.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...kernels.layer import LayerWeights
from ...kernels.low_rank import LowRank, Pair
from ..errors import AdapterInvalid, ConfigInvalid, TensorInvalid
from .checkpoint import DIGEST_BYTES, file_digest, opened_file, tensor_of, tensors_in
from .config import ModelConfig
from .decoder import Decoder
from .fields import Fields, StoredTensor, read_json
from .files import ADAPTER
from .kv_format import AS_COMPUTED, KVFormat
from .weights import MAPS, DecoderWeights, Piece, kv_divisors, pieces_of, text_name

WEIGHTS = "adapter_model.safetensors"
HIGHEST_RANK = 256
LONGEST_HEADER = 100_000_000
"""Bytes of a header that safetensors reads, at most."""

_INSIDE = "base_model.model."
_A, _B = ".lora_A.weight", ".lora_B.weight"
_EMBEDDINGS = ("embed_tokens", "lm_head")
_PLAIN = re.compile(r"\^?[\w.]+")
_UNSERVED = (
    ("use_dora", "DoRA"),
    ("lora_bias", "a bias beside the pairs"),
    ("fan_in_fan_out", "weights that are stored transposed"),
    ("modules_to_save", "whole modules"),
    ("target_parameters", "parameters that are no linear layers"),
    ("trainable_token_indices", "rows of the embedding"),
    ("layer_replication", "layers that are replicated"),
    ("alora_invocation_tokens", "aLoRA"),
    ("use_qalora", "QALoRA"),
)
"""Fields of the configuration that ask for what is not computed, and what that is."""


class AdapterMaps:
    """The linear maps of a model that adapters may change. ``dtype``: in which the decoder computes; ``kv``:
    how it stores K and V, as scales of these are folded into the weights that make them."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, kv: KVFormat = AS_COMPUTED) -> None:
        self.dtype = dtype
        self.parts: dict[str, list[Piece]] = {}
        """The weights that each map is made of, by its name in the decoder, such as ``0.qkv``."""
        self._kv = kv
        self._weights: dict[str, Piece] = {}
        self._config = config
        for piece in pieces_of(config):
            if piece.into.rpartition(".")[2] in MAPS:
                self.parts.setdefault(piece.into, []).append(piece)
                self._weights[piece.name.removesuffix(".weight")] = piece

    def weight(self, module: str) -> Piece | None:
        """The weight of a module, by its name in a checkpoint; None: adapters cannot change it."""
        return self._weights.get(text_name(module, self._config))

    def scaled(self, piece: Piece, pair: Pair) -> Pair:
        """The pair as it is added to the weight ``piece``, into which the scales of K and V are folded
        (`weights.fold_kv_scales`)."""
        name = piece.into.rpartition(".")[2]
        if name == "output":
            return Pair(pair.a * self._kv.value_scale, pair.b)
        if name == "qkv":
            divisors = kv_divisors(self._kv, self._config)
            return Pair(pair.a, pair.b / divisors[piece.row : piece.row + piece.shape[0]])
        return pair

    def with_slots(self, decoder: Decoder, slots: int, rank: int) -> Decoder:
        """The decoder with room for ``slots`` adapters of ``rank`` at most, on its device."""

        sizes = [(parts[0].shape[1], [part.shape[0] for part in parts]) for parts in self.parts.values()]
        pairs = dict(zip(self.parts, LowRank.several(slots, rank, sizes, decoder.weights.norm), strict=True))

        def roomy(layer: LayerWeights, number: int) -> LayerWeights:
            own = {name: replace(getattr(layer, name), pairs=pairs[f"{number}.{name}"]) for name in MAPS}
            return replace(layer, **own)

        layers = tuple(roomy(layer, number) for number, layer in enumerate(decoder.weights.layers))
        weights = replace(decoder.weights, layers=layers)
        return Decoder(decoder.config, weights, decoder.kernels, decoder.key_scale)


def fill_slot(weights: DecoderWeights, slot: int, adapter: AdapterWeights) -> None:
    """Put an adapter into a slot of the decoder, in place of the one that is there."""
    for number, layer in enumerate(weights.layers):
        for name in MAPS:
            getattr(layer, name).pairs.fill(slot, adapter.pairs[f"{number}.{name}"])


def slot_bytes(weights: DecoderWeights) -> int:
    """What the slots for adapters take; 0 without any."""
    maps = (getattr(layer, name) for layer in weights.layers for name in MAPS)
    return sum(one.pairs.bytes for one in maps if one.pairs is not None)


@dataclass(frozen=True, slots=True)
class AdapterWeights:
    """An adapter in host memory. ``digest``: of its configuration and weights, 32 bytes. ``rank``: its highest.
    ``pairs``: by the decoder's map, such as ``0.qkv``, the pair of each part, in which its scale is; None: the
    part has none."""

    digest: bytes
    rank: int
    pairs: Mapping[str, tuple[Pair | None, ...]]

    @property
    def bytes(self) -> int:
        """What it takes."""
        return sum(pair.a.nbytes + pair.b.nbytes for parts in self.pairs.values() for pair in parts if pair)


@dataclass(frozen=True, slots=True)
class _Numbers:
    """What the configuration says of ranks and scales. ``ranks``, ``alphas``: by the end of a module's name,
    where they differ. ``rooted``: the scale is ``alpha / sqrt(rank)``."""

    rank: int
    alpha: float
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]
    rooted: bool

    def of(self, module: str) -> tuple[int, float]:
        """The rank and the scale of a module."""
        rank, alpha = _matching(self.ranks, module, self.rank), _matching(self.alphas, module, self.alpha)
        return rank, alpha / (math.sqrt(rank) if self.rooted else rank)


def _matching(patterns: Mapping[str, Any], module: str, usual: Any) -> Any:
    for name, value in patterns.items():
        whole = name.removeprefix("^")
        if module == whole or (whole == name and module.endswith(f".{name}")):
            return value
    return usual


def read_adapter(folder: Path, maps: AdapterMaps, most_rank: int = HIGHEST_RANK) -> AdapterWeights:
    """Read the adapter in ``folder`` for a model with these ``maps``. ``most_rank``: the highest that is
    served.

    Raises ``AdapterInvalid``, naming the file, the field or tensor, and the cause.
    """
    try:
        if not folder.is_dir():
            raise AdapterInvalid(f"{folder}: not a folder")
        if not (folder / WEIGHTS).is_file():
            raise AdapterInvalid(f"{folder / WEIGHTS}: missing (weights are read from safetensors only)")
        before = _identity(folder)
        numbers = _read_config(folder / ADAPTER, most_rank)
        with _copy_of(folder / WEIGHTS) as (copy, fill):
            with opened_file(folder / WEIGHTS, copy) as file:
                stored = _check(folder / WEIGHTS, tensors_in(folder / WEIGHTS, file), maps, numbers)
                fill()
                pairs = _pairs(file, maps, numbers, stored)
            digests = file_digest(folder / ADAPTER) + file_digest(copy)
            digest = hashlib.blake2b(digests, digest_size=DIGEST_BYTES).digest()
        if _identity(folder) != before:
            raise AdapterInvalid(f"{folder}: it changed while it was read")
    except (ConfigInvalid, TensorInvalid) as error:
        raise AdapterInvalid(error.message) from None
    except OSError as error:
        raise AdapterInvalid(f"{error.filename or folder}: {error.strerror or error}") from error
    return AdapterWeights(digest, max(numbers.of(module)[0] for module in stored), pairs)


def _identity(folder: Path) -> list[tuple[int, int, int, int]]:
    told = [(folder / name).stat() for name in (ADAPTER, WEIGHTS)]
    return [(one.st_dev, one.st_ino, one.st_size, one.st_mtime_ns) for one in told]


@contextmanager
def _copy_of(path: Path) -> Iterator[tuple[Path, Callable[[], None]]]:
    """A copy of the weights' file ``path`` in memory that is ours alone: a file that is cut while it is mapped
    kills the process that reads it. Gives the copy's path, and what copies the bytes behind the header, which
    alone are there at first."""
    with path.open("rb") as file, open(os.memfd_create("holdfast-adapter"), "wb", buffering=0) as copy:
        length = file.read(8)
        copy.write(length + file.read(min(int.from_bytes(length, "little"), LONGEST_HEADER)))
        copy.truncate(os.fstat(file.fileno()).st_size)
        yield Path(f"/proc/self/fd/{copy.fileno()}"), lambda: shutil.copyfileobj(file, copy)


def _read_config(path: Path, most_rank: int) -> _Numbers:
    fields = read_json(path, {"peft_type": "LORA", "bias": "none", "use_rslora": False})
    if (kind := fields.text("peft_type").upper()) != "LORA":
        raise fields.wrong("peft_type", f"{kind[:40]!r} is not served (LORA)")
    if (bias := fields.text("bias")) != "none":
        raise fields.wrong("bias", f"{bias[:40]!r} is not served (none)")
    for name, what in _UNSERVED:
        if fields.get(name):
            raise fields.wrong(name, f"{what}: not served")
    own_ranks, own_alphas = _patterns(fields, "rank_pattern"), _patterns(fields, "alpha_pattern")
    ranks = {name: _rank(own_ranks, name, most_rank) for name in own_ranks.values}
    alphas = {name: own_alphas.number(name) for name in own_alphas.values}
    rank = _rank(fields, "r", most_rank)
    return _Numbers(rank, fields.number("lora_alpha"), ranks, alphas, fields.flag("use_rslora"))


def _rank(fields: Fields, name: str, most: int) -> int:
    rank = fields.integer(name, most=HIGHEST_RANK)
    if rank > most:
        raise fields.wrong(name, f"rank {rank} is above --max-lora-rank {most}")
    return rank


def _patterns(fields: Fields, name: str) -> Fields:
    """The object of values by the end of a module's name; without fields if it is absent."""
    found = fields.object(name) or Fields(fields.path, {}, {})
    for key in found.values:
        if not _PLAIN.fullmatch(key):
            told = f"{key[:80]!r}: the end of a module's name is expected, no other pattern"
            raise fields.wrong(name, told)
    return found


def _check(
    path: Path, tensors: Iterable[StoredTensor], maps: AdapterMaps, numbers: _Numbers
) -> dict[str, tuple[Piece, dict[str, StoredTensor]]]:
    """Check the header of the weights. Returns, of each module that has a pair, its weight and the two
    halves, by the ends of their names."""
    found: dict[str, tuple[Piece, dict[str, StoredTensor]]] = {}
    for stored in tensors:
        name = stored.name
        side = next((end for end in (_A, _B) if name.endswith(end)), "")
        module = name.removeprefix(_INSIDE).removesuffix(side)
        if any(part in _EMBEDDINGS or part.startswith("lora_embedding_") for part in name.split(".")):
            raise stored.wrong("adapters of embeddings are not served")
        if not side or not name.startswith(_INSIDE):
            raise stored.wrong(f"not the name of a tensor of LoRA ({_INSIDE}….lora_A.weight)")
        if (weight := maps.weight(module)) is None:
            raise stored.wrong(f"the model has no linear layer {module}")
        found.setdefault(module, (weight, {}))[1][side] = stored
    for module, (weight, sides) in found.items():
        (rank, _), (rows, width) = numbers.of(module), weight.shape
        for side, shape in ((_A, (rank, width)), (_B, (rows, rank))):
            if side not in sides:
                raise AdapterInvalid(f"{path}: {_INSIDE}{module}{side}: missing, its other half is there")
            sides[side].check("rank and model ask", shape)
    if not found:
        raise AdapterInvalid(f"{path}: it holds no tensors")
    return found


def _pairs(
    file: Any,
    maps: AdapterMaps,
    numbers: _Numbers,
    stored: Mapping[str, tuple[Piece, Mapping[str, StoredTensor]]],
) -> dict[str, tuple[Pair | None, ...]]:
    pairs: dict[str, Pair] = {}
    for module, (weight, sides) in stored.items():
        halves = [sides[_A], sides[_B]]
        read = [tensor_of(file, half) for half in halves]
        _check_finite(halves, read, "not all its numbers are finite")
        a, b = (half.float() for half in read)
        pair = maps.scaled(weight, Pair(a.T, b.T * numbers.of(module)[1]))
        own = pairs[weight.name] = Pair(
            pair.a.to(maps.dtype).contiguous(), pair.b.to(maps.dtype).contiguous()
        )
        _check_finite(halves, [own.a, own.b], f"too large for {str(maps.dtype).removeprefix('torch.')}")
    return {into: tuple(pairs.get(part.name) for part in parts) for into, parts in maps.parts.items()}


def _check_finite(halves: list[StoredTensor], tensors: list[Tensor], cause: str) -> None:
    for half, tensor in zip(halves, tensors, strict=True):
        if not tensor.isfinite().all():
            raise half.wrong(cause)
