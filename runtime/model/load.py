"""Loads a model: finds its folder, reads its shape and the weights, builds the decoder."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ...kernels.packed import Packed, plain
from ...kernels.packed_types import TYPES
from ...kvstore.groups import KVGroup
from ...kvstore.keys import namespace_digest
from ..errors import SettingsInvalid
from .checkpoint import Checkpoint
from .config import DTYPES, ModelConfig, read_config
from .decoder import Decoder
from .folder import find_model
from .kv_format import AS_COMPUTED, KVFormat
from .weights import (
    EMBEDDING,
    HEAD,
    Piece,
    allocate,
    assemble,
    fold_kv_scales,
    may_be_ignored,
    pieces_of,
    text_name,
)

COMPARED = 4096
"""How many rows are compared at a time, to see whether the output head equals the embedding."""

log = logging.getLogger(__name__)

if TYPE_CHECKING:
    from .gguf_weights import GGUFWeights


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A loaded model. ``name``: as it was asked for; ``folder``: where it lies (a folder or GGUF file).
    ``weights_digest``: a digest of the content of the weight files, 32 bytes. ``parameters``: how many
    numbers the weights have, ``weight_bytes``: what they take. ``packed``: the types of weights that stay
    packed, sorted. ``kv``: how K and V are stored."""

    name: str
    folder: Path
    config: ModelConfig
    decoder: Decoder
    weights_digest: bytes
    parameters: int
    weight_bytes: int = 0
    packed: tuple[str, ...] = ()
    kv: KVFormat = AS_COMPUTED

    def kv_groups(self, block_tokens: int) -> tuple[KVGroup, ...]:
        """The model's KV groups, one for each kind of layer, in the order of `ModelConfig.kinds`."""
        kind_of = self.config.kind_of
        return tuple(
            KVGroup(
                id=number,
                layers=tuple(layer for layer, its in enumerate(kind_of) if its == number),
                kv_heads=self.config.kv_heads,
                head_dim=self.config.head_dim,
                dtype=self.kv.stored_as(str(self.decoder.dtype).removeprefix("torch.")),
                block_tokens=block_tokens,
                window=kind.window,
                key_scale=self.kv.key_scale,
                value_scale=self.kv.value_scale,
            )
            for number, kind in enumerate(self.config.kinds)
        )

    def namespace(self, groups: Sequence[KVGroup], adapter: bytes = b"") -> bytes:
        """The namespace of this model's block keys, 16 bytes: it differs for other weights, settings or KV
        groups, and where weights stay packed. A key names one block in each group's arena. ``adapter``: the
        digest of the one that computes with it; empty: none."""
        config = {**self.config.shaping_kv(), **({"packed": self.packed} if self.packed else {})}
        return namespace_digest(weights=self.weights_digest, config=config, groups=groups, adapter=adapter)


def load_model(
    name: str | Path,
    device: str = "auto",
    dtype: str = "auto",
    progress: Callable[[float, str], None] = lambda done, what: None,
    max_context: int | None = None,
    kv: KVFormat = AS_COMPUTED,
    pack: bool = False,
) -> LoadedModel:
    """Load model ``name`` (``pocket``, ``smollm2``, a folder, a GGUF file or a hub id).

    ``device``: as torch names it; ``auto``: CUDA if there is one. ``dtype``: ``float32``, ``bfloat16``,
    ``float16``; ``auto``: as stored. ``max_context``: the longest sequence to serve; rotary settings may
    depend on it. ``kv``: how K and V are stored. ``pack``: whether matrices are kept in panels, as the CPU's
    kernels take them, quantised ones as they are; otherwise these are dequantised. ``progress``: called with
    the fraction that is done, 0 to 1, and what is being done.

    Raises:
        ModelUnreadable: a subclass, naming file and cause. Nothing is allocated on the device in this case.
        SettingsInvalid: no such device or dtype.
    """
    progress(0.0, "reading the configuration")
    folder = find_model(str(name))
    config = read_config(folder, max_context)
    target, kind = device_named(device), dtype_named(dtype, config)
    with open_weights(folder, config) as checkpoint:
        config, pieces = as_stored(config, checkpoint, kind)
        checkpoint.start_digest()
        forms = forms_of(pieces, checkpoint, kind, target, kv, pack)
        numbers, done = [prod(piece.shape) for piece in pieces], 0
        tensors = allocate((piece for piece in pieces if piece.name not in forms.together), target, kind)
        packed: dict[str, list[Packed]] = {}
        for piece, count in zip(pieces, numbers, strict=True):
            if piece.name not in forms.together:
                stored = checkpoint.read(piece.name)
                # The offset is added in fp32: in bf16, 1 + w would lose a small w.
                value = stored.float() + piece.offset if piece.offset else stored
                tensors[piece.into][piece.row : piece.row + piece.shape[0]].copy_(value)
            elif names := forms.together[piece.name]:
                assert not isinstance(checkpoint, Checkpoint), "no tensor of safetensors stays packed"
                packed.setdefault(piece.into, []).append(checkpoint.packed(names))
            done += count
            progress(done / sum(numbers), f"loading {piece.name}")
        digest = checkpoint.digest()
    fold_kv_scales(kv, config, tensors)
    if pack and target.type == "cpu":
        for into in [name for name, tensor in tensors.items() if tensor.ndim == 2]:
            packed[into] = [plain(tensors.pop(into))]
    return LoadedModel(
        name=str(name),
        folder=folder,
        config=config,
        decoder=Decoder(config, assemble(config, tensors, packed), key_scale=kv.key_scale),
        weights_digest=digest,
        parameters=sum(numbers),
        weight_bytes=forms.bytes,
        packed=forms.types,
        kv=kv,
    )


@dataclass(frozen=True, slots=True)
class WeightForms:
    """In which form the tensors of a model are kept. ``together``: of those that stay packed, by the name of
    the first the names of all that are packed as one matrix; of the others, none. ``types``: theirs, sorted.
    ``bytes``: of all weights."""

    together: dict[str, tuple[str, ...]]
    types: tuple[str, ...]
    bytes: int


def forms_of(
    pieces: Sequence[Piece],
    weights: Checkpoint | GGUFWeights,
    dtype: torch.dtype,
    device: torch.device,
    kv: KVFormat = AS_COMPUTED,
    pack: bool = False,
) -> WeightForms:
    """The forms of the ``pieces`` of ``weights`` on ``device``, with ``dtype`` for what does not stay packed.

    On a CPU quantised matrices stay packed if ``pack``, unless a scale of ``kv`` is folded into them. Those
    of one map that follow one another and have one type are packed as one; a map of which one matrix is not
    quantised is dequantised."""
    kinds: dict[str, str | None] = {}
    pack = pack and device.type == "cpu" and (kv.key_scale, kv.value_scale) == (1.0, 1.0)
    if pack and not isinstance(weights, Checkpoint):
        kinds = {piece.name: weights.packed_type(piece.name) for piece in pieces}
    into: dict[str, list[tuple[str | None, Piece]]] = {}
    for piece in pieces:
        into.setdefault(piece.into, []).append((kinds.get(piece.name), piece))
    together: dict[str, tuple[str, ...]] = {}
    types, size = set[str](), 0
    for some in into.values():
        if any(kind is None for kind, _ in some):
            size += sum(prod(piece.shape) for _, piece in some) * dtype.itemsize
            continue
        for kind, alike in groupby(some, lambda one: one[0]):
            assert kind is not None
            found = [piece for _, piece in alike]
            first, *others = (piece.name for piece in found)
            together |= {first: (first, *others), **dict.fromkeys(others, ())}
            types.add(kind)
            size += TYPES[kind].bytes_of(sum(piece.shape[0] for piece in found), found[0].shape[1])
    return WeightForms(together, tuple(sorted(types)), size)


def open_weights(path: Path, config: ModelConfig) -> Checkpoint | GGUFWeights:
    """The weights of the model in a folder or a GGUF file, opened. Raises ``ModelUnreadable``."""
    if not path.is_file():
        return Checkpoint(path, lambda tensor: text_name(tensor, config))
    from .gguf_weights import GGUFWeights  # it imports the library, which other models do not need

    return GGUFWeights(path)


def as_stored(
    config: ModelConfig, weights: Checkpoint | GGUFWeights, dtype: torch.dtype
) -> tuple[ModelConfig, tuple[Piece, ...]]:
    """Check the weights against ``config``. Returns the configuration as it is served, and its pieces (the
    tensors to read).

    If ``config`` ties the output head to the embedding, but the weights hold a head that differs from the
    embedding, the returned configuration is not tied; transformers does the same. ``dtype``: the type in
    which both are compared. Raises ``TensorInvalid``.
    """
    pieces = pieces_of(config)
    weights.check(pieces, lambda tensor: may_be_ignored(tensor, config))
    if not isinstance(weights, Checkpoint) or not config.tied_head or HEAD not in weights.tensors:
        return config, pieces
    head, embedding = weights.read(HEAD), weights.read(EMBEDDING)
    if head.shape == embedding.shape:
        parts = zip(torch.split(head, COMPARED), torch.split(embedding, COMPARED), strict=True)
        if all(torch.equal(one.to(dtype), other.to(dtype)) for one, other in parts):
            return config, pieces
    if config.inside is not None:  # tied only as its file does not say it
        return as_stored(replace(config, tied_head=False), weights, dtype)
    note = f"{weights.tensors[HEAD].name} is not the embedding: it is served, not tie_word_embeddings"
    return as_stored(replace(config, tied_head=False, notes=(*config.notes, note)), weights, dtype)


def device_named(name: str) -> torch.device:
    """The torch device ``name``; ``auto``: CUDA if there is one, else the CPU, and a warning says why a GPU's
    driver cannot be used. Raises ``SettingsInvalid``."""
    if name == "auto":
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            found = torch.cuda.is_available()
        for warning in told:
            log.warning("computing on the CPU: %s", " ".join(str(warning.message).split())[:200])
        return torch.device("cuda" if found else "cpu")
    if name.split(":")[0] not in ("cpu", "cuda"):
        raise SettingsInvalid(f"device {name}: not one of auto, cpu, cuda, cuda:N")
    if name.startswith("cuda") and not torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]
        raise SettingsInvalid(
            f"device {name}: the torch that is installed, {torch.__version__}, is built without CUDA:"
            " install a build of torch for your CUDA, or use --device cpu"
        )
    try:
        device = torch.device(name)
        there = torch.cuda.device_count()
        if device.type == "cuda" and (device.index or 0) >= there > 0:
            raise RuntimeError("there is none; there are " + ", ".join(f"cuda:{one}" for one in range(there)))
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise SettingsInvalid(f"device {name}: {' '.join(str(error).split())[:160]}") from error
    return device


def dtype_named(name: str, config: ModelConfig) -> torch.dtype:
    """The torch type called ``name``; ``auto``: the type of the stored weights, float32 if that is not known.
    Raises ``SettingsInvalid``."""
    resolved = (config.dtype or DTYPES[0]) if name == "auto" else name
    if resolved not in DTYPES:
        raise SettingsInvalid(f"dtype {name}: not one of auto, {', '.join(DTYPES)}")
    kind: torch.dtype = getattr(torch, resolved)
    return kind
