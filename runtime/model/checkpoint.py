"""Weights on disk: safetensors shards, checked against the configuration before anything is allocated.

An error is one line with the file, the tensor and the cause.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..errors import ModelUnreadable, ShardMissing, TensorInvalid
from .fields import read_json
from .weights import Piece

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
FLOAT_TYPES = ("F32", "BF16", "F16")
DIGEST_BYTES = 32
HASHING_THREADS = 4


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as a shard's header describes it. ``shard``: the file. ``name``: its name there. ``dtype``: as
    safetensors names types."""

    shard: Path
    name: str
    shape: tuple[int, ...]
    dtype: str


class Checkpoint:
    """The open safetensors files (shards) of a model folder; a context manager. Opening it reads only
    headers.

    ``renamed``: maps a tensor's name in the shards to the name that `check` and `read` use for it.
    ``shards``: the paths; ``tensors``: the tensors by their new names.

    Raises:
        ShardMissing: no weights, or a file that the index names is missing.
        TensorInvalid: an unreadable header, ranges that overlap or leave holes, or an index that contradicts
        the headers.
    """

    def __init__(self, folder: Path, renamed: Callable[[str], str] = lambda name: name) -> None:
        self._open = ExitStack()
        self.shards, placed = _shards(folder)
        try:
            self._files: dict[Path, Any] = {
                shard: self._open.enter_context(_opened(shard)) for shard in self.shards
            }
            stored = _catalogue(self._files)
            _check_index(folder / INDEX, placed, stored)
            self.tensors: dict[str, StoredTensor] = _by_new_name(stored, renamed)
        except BaseException:
            self._open.close()
            raise
        self._hashing = ThreadPoolExecutor(HASHING_THREADS, thread_name_prefix="weights-digest")
        self._digests: list[Future[bytes]] = []

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hashing.shutdown(cancel_futures=True)
        self._open.close()

    def check(self, pieces: Iterable[Piece], ignorable: Callable[[str], bool]) -> None:
        """Check that each of ``pieces`` (the tensors that the decoder is made of) is stored with its shape
        and a float type, and that the shards hold no other tensor. ``ignorable``: tells of a tensor's name
        whether it may be there although no piece asks for it.

        Raises:
            TensorInvalid: a tensor is missing, not expected, or has another shape or type.
        """
        wanted = {piece.name: piece for piece in pieces}
        for name, piece in wanted.items():
            stored = self.tensors.get(name)
            if stored is None:
                raise TensorInvalid(f"{self._place}: {name}: missing, config.json asks for it{_by(piece)}")
            if stored.shape != piece.shape:
                raise TensorInvalid(
                    f"{stored.shard}: {stored.name}: shape {list(stored.shape)}, config.json asks for"
                    f" {list(piece.shape)}{_by(piece)}"
                )
            if stored.dtype not in FLOAT_TYPES:
                raise TensorInvalid(
                    f"{stored.shard}: {stored.name}: type {stored.dtype} is not served"
                    f" ({', '.join(FLOAT_TYPES)})"
                )
        for name, stored in self.tensors.items():
            if name not in wanted and not ignorable(name):
                raise TensorInvalid(f"{stored.shard}: {stored.name}: config.json asks for no such tensor")

    def read(self, name: str) -> Tensor:
        """Read the tensor ``name`` to the CPU, in its stored type. Raises ``TensorInvalid`` if it cannot be
        read."""
        stored = self.tensors[name]
        try:
            tensor: Tensor = self._files[stored.shard].get_tensor(stored.name)
        except (SafetensorError, OSError) as error:
            raise TensorInvalid(f"{stored.shard}: {stored.name}: {_one_line(error)}") from error
        return tensor

    def start_digest(self) -> None:
        """Start to hash the shards in other threads."""
        self._digests = [self._hashing.submit(file_digest, shard) for shard in self.shards]

    def digest(self) -> bytes:
        """A digest of the content of all shards, 32 bytes. Waits for the hashing, which `start_digest`
        began."""
        total = hashlib.blake2b(digest_size=DIGEST_BYTES)
        for shard, digest in zip(self.shards, self._digests, strict=True):
            try:
                total.update(digest.result())
            except OSError as error:
                raise ModelUnreadable(f"{shard}: {_one_line(error)}") from error
        return total.digest()

    @property
    def _place(self) -> Path:
        return self.shards[0] if len(self.shards) == 1 else self.shards[0].parent / INDEX


def _shards(folder: Path) -> tuple[tuple[Path, ...], Mapping[str, str]]:
    """The paths of the weights' files in the order of their names; and the index's map from a tensor's name
    to its file, empty without an index. Raises ``ShardMissing``, ``TensorInvalid``."""
    if _there(folder / SINGLE):
        return (folder / SINGLE,), {}
    index = folder / INDEX
    if not _there(index):
        raise ShardMissing(f"{folder}: neither {SINGLE} nor {INDEX} (weights are read from safetensors only)")
    placed = read_json(index).get("weight_map")
    if not isinstance(placed, dict) or not placed:
        raise TensorInvalid(f"{index}: weight_map: an object from tensor to file is expected")
    for tensor, shard in placed.items():
        if not isinstance(shard, str) or Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise TensorInvalid(
                f"{index}: {tensor}: {shard!r} is not the name of a safetensors file beside it"
            )
    for shard in sorted(set(placed.values())):
        if not _there(folder / shard):
            raise ShardMissing(f"{folder / shard}: missing, {INDEX} names it")
    return tuple(folder / shard for shard in sorted(set(placed.values()))), placed


def _there(path: Path) -> bool:
    """Whether the file exists. Raises ``ShardMissing`` for a broken symbolic link, or no regular file."""
    if path.is_symlink() and not path.exists():
        raise ShardMissing(f"{path}: a symbolic link to {path.readlink()}, which is not there")
    if path.exists() and not path.is_file():
        raise ShardMissing(f"{path}: not a file")
    return path.exists()


def _opened(shard: Path) -> Any:
    try:
        return safe_open(shard, framework="pt")
    except (SafetensorError, OSError) as error:
        raise TensorInvalid(f"{shard}: {_one_line(error)}") from error


def _catalogue(files: Mapping[Path, Any]) -> dict[str, StoredTensor]:
    tensors: dict[str, StoredTensor] = {}
    for shard, file in files.items():
        for name in file.keys():  # noqa: SIM118 (not a mapping)
            if name in tensors:
                raise TensorInvalid(f"{shard}: {name}: also in {tensors[name].shard.name}")
            view = file.get_slice(name)
            tensors[name] = StoredTensor(shard, name, tuple(view.get_shape()), view.get_dtype())
    return tensors


def _by_new_name(
    tensors: Mapping[str, StoredTensor], renamed: Callable[[str], str]
) -> dict[str, StoredTensor]:
    named: dict[str, StoredTensor] = {}
    for name, stored in tensors.items():
        other = named.setdefault(renamed(name), stored)
        if other is not stored:
            raise TensorInvalid(f"{stored.shard}: {name}: the same tensor as {other.name}")
    return named


def _check_index(index: Path, placed: Mapping[str, str], tensors: Mapping[str, StoredTensor]) -> None:
    for name, shard in placed.items():
        stored = tensors.get(name)
        if stored is None or stored.shard.name != shard:
            where = "in no shard" if stored is None else f"in {stored.shard.name}"
            raise TensorInvalid(f"{index}: {name}: said to be in {shard}, but is {where}")


def file_digest(path: Path) -> bytes:
    """A digest of the content of the file ``path``, 32 bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=DIGEST_BYTES)).digest()


def _by(piece: Piece) -> str:
    """The configuration fields that decide a tensor's shape, as text for an error."""
    return f" ({piece.fields})" if piece.fields else ""


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
