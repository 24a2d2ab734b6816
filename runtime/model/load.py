"""Loads a model: finds its folder, reads its shape and the weights, builds the decoder."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from math import prod
from pathlib import Path
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from ...kernels.linear import Matrix, Permuted
from ...kernels.packed import plain
from ...kernels.packed_types import RUN, TYPES
from ...kernels.quantised import (
    AS_THEY_ARE,
    Quantised,
    Scheme,
    joined,
    panel_type,
    panels,
    quantised,
    said_in_panels,
    scheme_at_load,
)
from ...kvstore.groups import HeadLayout, KVGroup
from ...kvstore.keys import namespace_digest
from ..errors import SettingsInvalid
from .checkpoint import StoredWeights
from .config import ModelConfig, read_config
from .decoder import Decoder
from .folder import find_model
from .kv_format import AS_COMPUTED, DTYPES, KVFormat
from .progress import WeightsProgress
from .quantised_weights import QuantisedCheckpoint
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

Keeping: TypeAlias = Literal["packed", "quantised", "dequantised"]
"""How matrices are kept: all in panels, quantised ones as they are (`kernels.packed`); quantised ones as their
codes (`kernels.quantised`), but those of GGUF files dequantised; or all as numbers of the computing type."""

COMPARED = 4096
"""How many rows are compared at a time, to see whether the output head equals the embedding."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A loaded model. ``name``: as it was asked for; ``folder``: where it lies (a folder or GGUF file).
    ``weights_digest``: a digest of the content of the weight files, 32 bytes. ``parameters``: how many
    numbers the weights have, ``weight_bytes``: what they take. ``packed``: the types of weights that are in
    panels, sorted. ``quantisation``: how weights are quantised, in words, sorted. ``kv``: how K and V are
    stored."""

    name: str
    folder: Path
    config: ModelConfig
    decoder: Decoder
    weights_digest: bytes
    parameters: int
    weight_bytes: int = 0
    packed: tuple[str, ...] = ()
    quantisation: tuple[str, ...] = ()
    kv: KVFormat = AS_COMPUTED

    def kv_groups(self, block_tokens: int) -> tuple[KVGroup, ...]:
        """The model's KV groups, by `ModelConfig.kv_layers`."""
        config, groups = self.config, self.config.kv_layers
        most = max(map(len, groups))
        layout = HeadLayout(config.kv_heads, config.head_dim, self.kv.key_scale, self.kv.value_scale)
        return tuple(
            KVGroup(
                id=number,
                layers=layers,
                layout=layout,
                dtype=self.kv.stored_as(str(self.decoder.dtype).removeprefix("torch.")),
                block_tokens=block_tokens,
                window=window,
                spare_layers=most - len(layers),
            )
            for number, (layers, window) in enumerate(zip(groups, config.kv_windows, strict=True))
        )

    def namespace(self, adapter: bytes = b"") -> bytes:
        """The namespace of this model's block keys, 16 bytes: it differs for other weights or settings, and for
        another arithmetic. ``adapter``: the digest of the one that
        computes with it; empty: none."""
        numerics = {
            "kernels": self.decoder.kernels.numerics,
            "dtype": str(self.decoder.dtype),
            "weights": self.quantisation,
        }
        return namespace_digest(
            weights=self.weights_digest,
            config=self.config.shaping_kv(),
            adapter=adapter,
            numerics=numerics,
        )


def load_model(
    name: str | Path,
    device: str = "auto",
    dtype: str = "auto",
    progress: Callable[[float, str], None] = lambda done, what: None,
    max_context: int | None = None,
    kv: KVFormat = AS_COMPUTED,
    keeping: Keeping = "dequantised",
    quantization: str | None = None,
    prepare: Callable[[ModelConfig, torch.dtype, tuple[str, ...]], None] = lambda config, dtype, types: None,
) -> LoadedModel:
    """Load model ``name`` (``pocket``, ``smollm2``, a folder, a GGUF file or a hub id).

    ``device``: as torch names it; ``auto``: CUDA if there is one. ``dtype``: ``float32``, ``bfloat16``,
    ``float16``; ``auto``: as stored. ``max_context``: the longest sequence to serve; rotary settings may
    depend on it. ``kv``: how K and V are stored. ``keeping``: how matrices are kept, where their form allows
    it; otherwise they are dequantised. ``quantization``: one of `kernels.names.AT_LOAD`, to which linears are
    quantised; None: they stay as they are. ``progress``: called with the fraction that is done, 0 to 1, and
    what is being done, also by threads that pack. ``prepare``: called when the headers are read, before weights
    take memory, with the configuration, the type of computing and the types of weights that are in panels.

    Raises:
        ModelUnreadable: a subclass, naming file and cause. Nothing is allocated on the device in this case.
        SettingsInvalid: no such device or dtype, or ``quantization`` of a model that is quantised.
    """
    progress(0.0, "reading the configuration")
    folder = find_model(str(name))
    config = read_config(folder, max_context)
    target, kind = device_named(device), dtype_named(dtype, config)
    with open_weights(folder, config) as checkpoint:
        config, pieces = as_stored(config, checkpoint, kind)
        checkpoint.start_digest()
        forms = forms_of(pieces, checkpoint, kind, target, kv, keeping, quantization)
        if isinstance(checkpoint, QuantisedCheckpoint) and checkpoint.linears:
            progress(0.0, "reading scales")
            checkpoint.read_scales()
        prepare(config, kind, forms.packed)
        told = WeightsProgress(forms.bytes, progress)
        tensors = allocate((piece for piece in pieces if piece.name not in forms.together), target, kind)
        matrices: dict[str, list[Matrix]] = {}
        for piece in pieces:
            if names := forms.together.get(piece.name):
                made = _matrix(checkpoint, names, forms, target, told)
                matrices.setdefault(piece.into, []).append(made)
            elif names is None:
                rows = tensors[piece.into][piece.row : piece.row + piece.shape[0]]
                _fill(rows, piece, checkpoint, forms)
                told.done(piece.name, rows.nbytes)
        digest = checkpoint.digest()
    fold_kv_scales(kv, config, tensors)
    if keeping == "packed" and target.type == "cpu":
        for into in [name for name, tensor in tensors.items() if tensor.ndim == 2]:
            matrices[into] = [plain(tensors.pop(into))]
    return LoadedModel(
        name=str(name),
        folder=folder,
        config=config,
        decoder=Decoder(config, assemble(config, tensors, matrices), key_scale=kv.key_scale),
        weights_digest=digest,
        parameters=sum(prod(piece.shape) for piece in pieces),
        weight_bytes=forms.bytes,
        packed=forms.packed,
        quantisation=forms.words,
        kv=kv,
    )


def _matrix(
    weights: StoredWeights,
    names: tuple[str, ...],
    forms: WeightForms,
    device: torch.device,
    told: WeightsProgress,
) -> Matrix:
    """Read the tensors ``names``, which are kept as one matrix on ``device``."""
    form = forms.of[names[0]]
    if form.scheme is None:
        return weights.packed(names, partial(told.done, names[0]))
    parts = [_quantised(weights, name, form.scheme, device) for name in names]
    whole, order = joined([part for part, _ in parts]), parts[0][1]
    matrix = whole.to(device) if form.packed is None else panels(whole)
    told.done(names[0], form.bytes_of(*whole.shape))
    return matrix if order is None else Permuted(matrix, order.to(device))


def _fill(rows: Tensor, piece: Piece, weights: StoredWeights, forms: WeightForms) -> None:
    """Read the tensor of a piece into ``rows``, its rows of a tensor of the decoder."""
    form = forms.of.get(piece.name)
    if form is not None and form.scheme is not None:
        part, order = _quantised(weights, piece.name, form.scheme, rows.device)
        part.into(rows, order)
        return
    stored = weights.read(piece.name)
    # The offset is added in fp32: in bf16, 1 + w would lose a small w.
    rows.copy_(stored.float() + piece.offset if piece.offset else stored)


def _quantised(
    weights: StoredWeights, name: str, scheme: Scheme, device: torch.device
) -> tuple[Quantised, Tensor | None]:
    """Read a linear that is quantised, to the CPU, or quantise it on ``device``; and the order of its columns,
    see `QuantisedCheckpoint.quantised`."""
    if isinstance(weights, QuantisedCheckpoint) and name in weights.linears:
        return weights.quantised(name)
    return quantised(weights.read(name).to(device), scheme), None


@dataclass(frozen=True, slots=True)
class WeightForm:
    """The form in which a quantised tensor is kept. ``words``: in words. ``packed``: its type in panels; None:
    it is not kept in panels. ``scheme``: how it is quantised; None: as ``packed`` says. ``scale_bytes``: of a
    scale. ``alone``: whether it is not joined with its neighbours. ``kept``: whether it stays quantised."""

    words: str
    packed: str | None = None
    scheme: Scheme | None = None
    scale_bytes: int = 4
    alone: bool = False
    kept: bool = True

    def bytes_of(self, rows: int, width: int) -> int:
        """The bytes of a matrix of this form."""
        if self.packed is not None:
            return TYPES[self.packed].bytes_of(rows, width)
        assert self.scheme is not None, "one of both is there"
        return self.scheme.bytes_of(rows, width, self.scale_bytes)


@dataclass(frozen=True, slots=True)
class WeightForms:
    """In which form the tensors of a model are kept. ``of``: the forms of those that are quantised, by name.
    ``together``: of those that stay quantised, by the name of the first the names of all that are one matrix;
    of the others, none. ``packed``: the types in panels, sorted. ``words``: all forms in words, sorted.
    ``bytes``: of all weights."""

    of: dict[str, WeightForm]
    together: dict[str, tuple[str, ...]]
    packed: tuple[str, ...]
    words: tuple[str, ...]
    bytes: int


def forms_of(
    pieces: Sequence[Piece],
    weights: StoredWeights,
    dtype: torch.dtype,
    device: torch.device,
    kv: KVFormat = AS_COMPUTED,
    keeping: Keeping = "dequantised",
    quantization: str | None = None,
) -> WeightForms:
    """The forms of the ``pieces`` of ``weights`` on ``device``, with ``dtype`` for what does not stay
    quantised. ``keeping``, ``quantization``: as for `load_model`.

    Nothing stays quantised if a scale of ``kv`` is folded into the weights. Matrices of one map that follow one
    another and have one form are kept as one; a map of which one matrix does not stay quantised is dequantised.
    Raises ``SettingsInvalid``: ``quantization`` of a model that is quantised already.
    """
    if (kv.key_scale, kv.value_scale) != (1.0, 1.0) or (keeping == "packed" and device.type != "cpu"):
        keeping = "dequantised"
    of = {one.name: form for one in pieces if (form := _form(one, weights, keeping, quantization))}
    into: dict[str, list[Piece]] = {}
    for piece in pieces:
        into.setdefault(piece.into, []).append(piece)
    forms: dict[str, WeightForm] = {}
    together: dict[str, tuple[str, ...]] = {}
    size = 0
    for some in into.values():
        theirs = {piece.name: of[piece.name] for piece in some if piece.name in of}
        if len(theirs) < len(some) or not all(form.kept for form in theirs.values()):
            size += sum(prod(piece.shape) for piece in some) * dtype.itemsize
            forms |= {name: _dequantised(form, form.scheme) for name, form in theirs.items() if form.scheme}
            continue
        # What is kept as one matrix has one form, and is not alone.
        for (form, _), alike in groupby(some, lambda one: (of[one.name], of[one.name].alone and one.name)):
            joint = list(alike)
            first, *others = (piece.name for piece in joint)
            together |= {first: (first, *others), **dict.fromkeys(others, ())}
            size += form.bytes_of(sum(piece.shape[0] for piece in joint), joint[0].shape[1])
            forms |= {piece.name: form for piece in joint}
    packed = sorted({form.packed for form in forms.values() if form.packed is not None})
    words = sorted({form.words for form in forms.values()})
    return WeightForms(forms, together, tuple(packed), tuple(words), size)


def _form(
    piece: Piece, weights: StoredWeights, keeping: Keeping, quantization: str | None
) -> WeightForm | None:
    """The form of a tensor that is quantised, or is to be; None: it is neither. Raises ``SettingsInvalid``:
    both."""
    if len(piece.shape) != 2:
        return None
    kind, linear = weights.packed_type(piece.name), weights.linears.get(piece.name)
    if quantization is not None and (already := kind or (linear and linear.scheme)):
        raise SettingsInvalid(f"--quantization {quantization}: the model is quantised already: {already}")
    if kind is not None:
        return WeightForm(kind, kind, kept=keeping == "packed")
    scheme, scale_bytes, alone = None, 4, False
    if linear is not None:
        scheme, scale_bytes, alone = linear.scheme, linear.scale_bytes, linear.alone
    elif quantization is not None and piece.into not in ("embedding", "head"):
        scheme = scheme_at_load(quantization, piece.shape[1])
    if scheme is None:
        return None
    packed = panel_type(scheme, piece.shape[1]) if keeping == "packed" else None
    kept = packed is not None or (keeping == "quantised" and scheme.group % RUN == 0)
    words = str(scheme) if packed is None else said_in_panels(scheme)
    return WeightForm(words, packed, scheme, scale_bytes, alone, kept)


def _dequantised(form: WeightForm, scheme: Scheme) -> WeightForm:
    """The form of a tensor that is quantised, of which the numbers are kept. Activations are not rounded."""
    words = f"{replace(scheme, activations=AS_THEY_ARE)}, dequantised"
    return replace(form, words=words, packed=None, kept=False)


def open_weights(path: Path, config: ModelConfig) -> StoredWeights:
    """The weights of the model in a folder or a GGUF file, opened. Raises ``ModelUnreadable``."""
    if not path.is_file():
        return QuantisedCheckpoint(path, config.quantisation, lambda tensor: text_name(tensor, config))
    from .gguf_weights import GGUFWeights  # it imports the library, which other models do not need

    return GGUFWeights(path, config)


def as_stored(
    config: ModelConfig, weights: StoredWeights, dtype: torch.dtype
) -> tuple[ModelConfig, tuple[Piece, ...]]:
    """Check the weights against ``config``. Returns the configuration as it is served, and its pieces (the
    tensors to read).

    If ``config`` ties the output head to the embedding, but the weights hold a head that differs from the
    embedding, the returned configuration is not tied; transformers does the same. ``dtype``: the type in
    which both are compared. Raises ``TensorInvalid``.
    """
    pieces = pieces_of(config)
    weights.check(pieces, lambda tensor: may_be_ignored(tensor, config))
    if not config.tied_head or HEAD not in weights.tensors:
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
