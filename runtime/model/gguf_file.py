"""A GGUF file: its metadata and its table of tensors, checked against the file's size. No torch.

The header is read here, because the reader of the `gguf` package makes an array for each string (3 s for a
vocabulary of 49,000 tokens) and does not check counts and lengths. Format: ggml's ``docs/gguf.md``. Errors are
one line with the file, the key or tensor, and the cause. A file with more of anything than `MOST` is refused.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, GGUFValueType
from numpy.typing import DTypeLike, NDArray

from ...kernels.packed_types import GGML
from ..errors import ConfigInvalid
from .fields import Fields, StoredTensor

MAGIC = b"GGUF"
VERSIONS = (2, 3)
SERVED = ("F32", "F16", "BF16", *GGML)
"""The served types of tensors, by their names in ggml."""
MOST = {"keys": 1 << 16, "tensors": 1 << 17, "strings": 1 << 22, "dimensions": 4}
_SCALARS = GGUFReader.gguf_scalar_to_np


class GGUFFile:
    """An open GGUF file. ``metadata``: the values by key; an array of numbers is a numpy array. ``tensors``: by
    name, each of a type in `SERVED`.

    Raises:
        ConfigInvalid: not a GGUF file, or its metadata is broken.
        TensorInvalid: a tensor is there twice, of a type that is not served, or not inside the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._at = 0
        try:
            with path.open("rb") as file:
                self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError:
            raise ConfigInvalid(f"{path}: empty, not a GGUF file") from None
        except OSError as error:
            raise ConfigInvalid(f"{path}: {error.strerror or error}") from error
        self._size = len(self._bytes)
        self._beyond = f"beyond the file's {self._size} bytes: the file is cut short or wrong"
        tensors = self._begin()
        self.metadata: dict[str, Any] = {}
        for number in range(self._count("keys", "<Q", "the number of metadata keys")):
            key = self._label(f"the name of metadata key {number}")
            if key in self.metadata:
                raise ConfigInvalid(f"{self.path}: {key}: doubled")
            self.metadata[key] = self._value(key, self._type(key))
        self.tensors = self._table(tensors)

    def fields(self, prefix: str, defaults: Mapping[str, Any] | None = None) -> Fields:
        """The metadata with keys that begin with ``prefix``, by the rest of the key."""
        values = {
            key.removeprefix(prefix): value for key, value in self.metadata.items() if key.startswith(prefix)
        }
        return Fields(self.path, values, defaults or {}, prefix)

    def array(self, tensor: StoredTensor) -> NDArray[np.uint8]:
        """The bytes of a tensor, uint8 ``[bytes]``; a view of the memory-mapped file."""
        return np.frombuffer(self._bytes, np.uint8, tensor.end - tensor.begin, self._base + tensor.begin)

    def forget(self) -> None:
        """Give the system back the memory of the file's pages, which are read again when they are needed: also
        of those that came along, up to 2 MiB around each tensor."""
        self._bytes.madvise(mmap.MADV_DONTNEED)

    def _begin(self) -> int:
        """Check the magic number and the version, and read the number of tensors, which is returned."""
        if self._bytes[:4] != MAGIC:
            raise ConfigInvalid(f"{self.path}: not a GGUF file: it begins with {self._bytes[:4]!r}")
        self._at = 4
        version = self._number("<I", "the version")
        if version not in VERSIONS:
            turned = " (a file of a big-endian machine)" if version & 0xFFFF == 0 else ""
            raise ConfigInvalid(
                f"{self.path}: GGUF version {version}{turned} is not served (served: 2 and 3, little-endian)"
            )
        return self._count("tensors", "<Q", "the number of tensors")

    def _value(self, key: str, kind: GGUFValueType) -> Any:
        if kind == GGUFValueType.STRING:
            return self._string(key)
        if kind != GGUFValueType.ARRAY:
            return self._number(_SCALARS[kind], key)
        inner = self._type(key)
        if inner == GGUFValueType.ARRAY:
            raise ConfigInvalid(f"{self.path}: {key}: an array of arrays is not served")
        if inner == GGUFValueType.STRING:
            return [self._string(key) for _ in range(self._count("strings", "<Q", key))]
        return self._numbers(_SCALARS[inner], self._number("<Q", key), key)

    def _type(self, key: str) -> GGUFValueType:
        number = self._number("<I", key)
        try:
            return GGUFValueType(number)
        except ValueError:
            raise ConfigInvalid(f"{self.path}: {key}: a value of the unknown type {number}") from None

    def _table(self, count: int) -> dict[str, StoredTensor]:
        """Read the table of tensors, and check that each lies in the file, apart from the others."""
        rows = [self._row(number) for number in range(count)]
        alignment = self.metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise ConfigInvalid(f"{self.path}: general.alignment: {alignment!r} is not a power of two")
        self._base = -(-self._at // alignment) * alignment
        tensors: dict[str, StoredTensor] = {}
        for row in rows:
            end = self._base + row.end
            if row.name in tensors:
                raise row.wrong("doubled")
            if end > self._size:
                raise row.wrong(f"it ends at byte {end}, {self._beyond}")
            if row.begin % alignment:
                raise row.wrong(f"its offset {row.begin} is not a multiple of {alignment}")
            tensors[row.name] = row
        for one, other in pairwise(sorted(rows, key=lambda row: row.begin)):
            if other.begin < one.end:
                raise other.wrong(f"it overlaps {one.name}")
        return tensors

    def _row(self, number: int) -> StoredTensor:
        name = self._label(f"the name of tensor {number}")
        dimensions = self._count("dimensions", "<I", name)
        shape = tuple(self._number("<Q", name) for _ in range(dimensions))[::-1]
        code = self._number("<I", name)
        offset = self._number("<Q", name)
        try:
            kind = GGMLQuantizationType(code).name
        except ValueError:
            kind = f"number {code}"
        stored = StoredTensor(self.path, name, shape, kind, offset)
        if kind not in SERVED:
            raise stored.wrong(f"type {kind} is not served (served: {', '.join(SERVED)})")
        items, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
        if not shape or min(shape) < 1:
            raise stored.wrong(f"shape {list(shape)} has no numbers")
        if shape[-1] % items:
            raise stored.wrong(f"rows of {shape[-1]} are not whole blocks of {items} ({kind})")
        return replace(stored, end=offset + prod(shape) // items * size)

    def _count(self, what: str, form: str, key: str) -> int:
        count: int = self._number(form, key)
        if count > MOST[what]:
            raise ConfigInvalid(f"{self.path}: {key}: {count} {what} are more than {MOST[what]}")
        return count

    def _number(self, form: DTypeLike, key: str) -> Any:
        return self._numbers(form, 1, key)[0].item()

    def _numbers(self, form: DTypeLike, count: int, key: str) -> NDArray[Any]:
        kind = np.dtype(form)
        return np.frombuffer(self._bytes, kind, count, self._take(count * kind.itemsize, key))

    def _string(self, key: str) -> str:
        at = self._take(8, key)
        begin = self._take(int.from_bytes(self._bytes[at : at + 8], "little"), key)
        try:
            return self._bytes[begin : self._at].decode()
        except UnicodeDecodeError as error:
            raise ConfigInvalid(f"{self.path}: {key}: not UTF-8: {error.reason}") from None

    def _label(self, what: str) -> str:
        """Read the next string of the header, one that appears in errors, such as the name of a key or
        tensor. ``what``: names it in an error. Raises ``ConfigInvalid`` if it has characters that cannot be
        printed."""
        label = self._string(what)
        if not label.isprintable():
            raise ConfigInvalid(f"{self.path}: {what}: {label!r:.60} is not printable")
        return label

    def _take(self, count: int, key: str) -> int:
        """Skip ``count`` bytes of the header; returns where they begin. If the file is too short, raises
        ``ConfigInvalid`` with ``key`` in its text."""
        begin = self._at
        if count > self._size - begin:
            raise ConfigInvalid(f"{self.path}: {key}: it goes {self._beyond}")
        self._at = begin + count
        return begin
