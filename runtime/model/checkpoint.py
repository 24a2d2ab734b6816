"""Weights on disk: safetensors shards, checked against the configuration before anything is allocated.

An error is one line with the file, the tensor and the cause.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from safetensors import SafetensorError, safe_open
from torch import Tensor

from ...kernels.packed import Packed
from ..errors import ModelUnreadable, ShardMissing, TensorInvalid
from .fields import FLOAT_TYPES, StoredTensor, read_json
from .weights import Piece

if TYPE_CHECKING:
    from .quantised_weights import StoredLinear

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
DIGEST_BYTES = 32
HASHING_THREADS = 4


class StoredWeights(ABC):
    """The weights of a model in files of one format; a context manager. Opening it reads only headers.

    ``shards``: the files. ``tensors``: by the names that `check` and `read` use. ``linears``: those that are
    quantised, by the names that their weights would have. ``asks``: what says which tensors there are.
    """

    asks = "config.json asks"
    types: Sequence[str] = FLOAT_TYPES
    linears: Mapping[str, StoredLinear] = {}

    def __init__(self, shards: Sequence[Path], tensors: dict[str, StoredTensor]) -> None:
        self.shards = shards
        self.tensors = tensors
        self._hashing = ThreadPoolExecutor(HASHING_THREADS, thread_name_prefix="weights-digest")
        self._digests: list[Future[bytes]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._hashing.shutdown(cancel_futures=True)

    def check(self, pieces: Sequence[Piece], ignorable: Callable[[str], bool]) -> None:
        """Check that each of ``pieces`` (the tensors that the decoder is made of) is stored with its shape
        and a served type, and that there is no other tensor. ``ignorable``: tells of a tensor's name whether
        it may be there although no piece asks for it.

        Raises:
            TensorInvalid: a tensor is missing, not expected, or has another shape or type.
        """
        wanted = {piece.name: piece for piece in pieces}
        for name, piece in wanted.items():
            if (stored := self.tensors.get(name)) is None:
                place = self.shards[0] if len(self.shards) == 1 else self.shards[0].parent / INDEX
                told = f"missing, {self.asks} for it ({piece.fields})"
                raise TensorInvalid(f"{place}: {self._stored_name(name)}: {told}")
            stored.check(self.asks, piece.shape, types=self.types, by=piece.fields)
        for name, stored in self.tensors.items():
            if name not in wanted and not ignorable(name):
                raise stored.wrong(f"{self.asks} for no such tensor")

    @abstractmethod
    def read(self, name: str) -> Tensor:
        """Read the tensor ``name`` to the CPU, in its stored type. Raises ``TensorInvalid`` if it cannot be
        read."""

    def packed_type(self, name: str) -> str | None:
        """The type in which the tensor ``name`` can stay packed as it is stored; None: it cannot."""
        return None

    def packed(self, names: Sequence[str], told: Callable[[int], None] = lambda count: None) -> Packed:
        """The tensors ``names``, of one type that `packed_type` names and of one width, packed as one.
        ``told``: called with the bytes of each packed part, by a thread of its own. Raises
        ``TensorInvalid``."""
        raise AssertionError("no tensor of this format stays packed")

    def start_digest(self) -> None:
        """Start to hash the files in other threads."""
        self._digests = [self._hashing.submit(file_digest, shard) for shard in self.shards]

    def digest(self) -> bytes:
        """A digest of the content of all files, 32 bytes. Waits for the hashing, which `start_digest`
        began."""
        total = hashlib.blake2b(digest_size=DIGEST_BYTES)
        for shard, digest in zip(self.shards, self._digests, strict=True):
            try:
                total.update(digest.result())
            except OSError as error:
                raise ModelUnreadable(f"{shard}: {one_line(error)}") from error
        return total.digest()

    def _stored_name(self, name: str) -> str:
        return name


class Checkpoint(StoredWeights):
    """The open safetensors files (shards) of a model folder.

    ``renamed``: maps a tensor's name in the shards to the name that `check` and `read` use for it.

    Raises:
        ShardMissing: no weights, or a file that the index names is missing.
        TensorInvalid: an unreadable header, ranges that overlap or leave holes, or an index that contradicts
        the headers.
    """

    def __init__(self, folder: Path, renamed: Callable[[str], str] = lambda name: name) -> None:
        shards, placed = _shards(folder)
        with ExitStack() as opened:
            self._files = {shard: opened.enter_context(opened_file(shard)) for shard in shards}
            tensors: dict[str, StoredTensor] = {}
            for shard, file in self._files.items():
                for stored in tensors_in(shard, file):
                    other = tensors.setdefault(renamed(stored.name), stored)
                    if other is not stored:
                        raise stored.wrong(f"also in {other.shard.name}, as {other.name}")
            _check_index(folder / INDEX, placed, tensors.values())
            super().__init__(shards, tensors)
            self._open = opened.pop_all()

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        self._open.close()

    def read(self, name: str) -> Tensor:
        stored = self.tensors[name]
        return tensor_of(self._files[stored.shard], stored)


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


def opened_file(shard: Path, path: Path | None = None) -> Any:
    """The safetensors file ``shard``, opened; ``path``: where its bytes are, if not there. Raises
    ``TensorInvalid``."""
    try:
        return safe_open(path or shard, framework="pt")
    except (SafetensorError, OSError) as error:
        raise TensorInvalid(f"{shard}: {one_line(error)}") from error


def tensors_in(shard: Path, file: Any) -> Iterator[StoredTensor]:
    """The tensors that the header of an opened file describes."""
    for name in file.keys():  # noqa: SIM118 (not a mapping)
        view = file.get_slice(name)
        yield StoredTensor(shard, name, tuple(view.get_shape()), view.get_dtype())


def tensor_of(file: Any, stored: StoredTensor) -> Tensor:
    """A tensor of an opened file, on the CPU, in its stored type. Raises ``TensorInvalid``."""
    try:
        tensor: Tensor = file.get_tensor(stored.name)
    except (SafetensorError, OSError) as error:
        raise stored.wrong(one_line(error)) from error
    return tensor


def _check_index(index: Path, placed: Mapping[str, str], tensors: Iterable[StoredTensor]) -> None:
    found = {stored.name: stored.shard.name for stored in tensors}
    for name, shard in placed.items():
        if (where := found.get(name, "no shard")) != shard:
            raise TensorInvalid(f"{index}: {name}: said to be in {shard}, but is in {where}")


def file_digest(path: Path) -> bytes:
    """A digest of the content of the file ``path``, 32 bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=DIGEST_BYTES)).digest()


def one_line(error: Exception) -> str:
    """What an error says, in one line."""
    return " ".join(str(error).split()) or type(error).__name__
