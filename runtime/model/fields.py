"""What a model's files say: the fields of a JSON object, and the tensors in a header. No torch.

An error is one line with the file, the field or tensor, and the cause.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ConfigInvalid, TensorInvalid, UnsupportedArchitecture
from .files import FolderFiles, ModelFiles

LARGEST = 2**31 - 1
LARGEST_FLOAT = sys.float_info.max  # JSON may have larger integers
FLOAT_TYPES = ("F32", "BF16", "F16")


def read_json(path: Path, defaults: Mapping[str, Any] | None = None) -> Fields:
    """The JSON object in the file ``path``.

    Raises:
        ConfigInvalid: missing, not readable, not JSON, or not an object.
    """
    return read_object(FolderFiles(path.parent), path.name, defaults)


def read_object(
    files: ModelFiles, name: str, defaults: Mapping[str, Any] | None = None, *, required: bool = True
) -> Fields:
    """The JSON object in a model's file ``name``; without fields if there is no such file and it is not
    ``required``.

    Raises:
        ConfigInvalid: missing but required, not readable, not JSON, or not an object.
    """
    path = files.where(name)
    try:
        content = files.content(name)
        if content is None and required:
            raise ConfigInvalid(f"{path}: missing")
        value = {} if content is None else json.loads(content)
    except OSError as error:
        raise ConfigInvalid(f"{path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigInvalid(f"{path}: not JSON: {' '.join(str(error).split())}") from error
    if not isinstance(value, dict):
        raise ConfigInvalid(f"{path}: an object is expected, not {_shown(value)}")
    return Fields(path, value, defaults or {})


@dataclass(frozen=True, slots=True)
class Fields:
    """A JSON object with typed getters; each raises `ConfigInvalid`.

    ``path``: the file, for errors. ``inside``: where in the file the object is, as a prefix of field names in
    errors, such as ``rope_scaling.``. ``defaults``: values of fields that are absent or null.
    """

    path: Path
    values: Mapping[str, Any]
    defaults: Mapping[str, Any]
    inside: str = ""

    def get(self, name: str) -> Any:
        """The raw value of the field ``name``; its default if it is absent or null; None without a default."""
        value = self.values.get(name)
        return self.defaults.get(name) if value is None else value

    def integer(self, name: str, *, least: int = 1, most: int = LARGEST) -> int:
        """The field ``name``, which must be a whole number from ``least`` to ``most``."""
        value = self._needed(name)
        if type(value) is not int or not least <= value <= most:
            raise self.wrong(name, f"a whole number from {least} to {most} is expected, not {_shown(value)}")
        return value

    def number(
        self, name: str, *, above: float = 0.0, least: float | None = None, most: float = LARGEST_FLOAT
    ) -> float:
        """The field ``name``, which must be a finite number greater than ``above`` (or ``least`` or more), at
        most ``most``."""
        value, low = self._needed(name), above if least is None else least
        if not _is_number(value, low, most) and not (value == least and type(value) is not bool):
            bound = f"above {above:g}" if least is None else f"from {least:g}"
            bound += f" and at most {most:g}" if most < LARGEST_FLOAT else ""
            raise self.wrong(name, f"a finite number {bound} is expected, not {_shown(value)}")
        return float(value)

    def optional_integer(self, name: str, *, least: int = 1) -> int | None:
        """The field ``name``, which must be a whole number from ``least`` on; None if it is null, or absent
        without a default."""
        return self.integer(name, least=least) if self._given(name) else None

    def optional_number(self, name: str) -> float | None:
        """The field ``name``, which must be a finite number above 0; None if it is null, or absent without a
        default."""
        return self.number(name) if self._given(name) else None

    def numbers(self, name: str, count: int) -> tuple[float, ...]:
        """The field ``name``, which must be a list of ``count`` finite numbers above 0."""
        value = self._needed(name)
        sound = isinstance(value, list) and all(_is_number(one, 0.0, LARGEST_FLOAT) for one in value)
        if not sound or len(value) != count:
            raise self.wrong(
                name, f"a list of {count} finite numbers above 0 is expected, not {_shown(value)}"
            )
        return tuple(float(one) for one in value)

    def flag(self, name: str) -> bool:
        """The field ``name``, which must be true or false."""
        value = self._needed(name)
        if type(value) is not bool:
            raise self.wrong(name, f"true or false is expected, not {_shown(value)}")
        return value

    def text(self, name: str) -> str:
        """The field ``name``, which must be a string."""
        value = self._needed(name)
        if type(value) is not str:
            raise self.wrong(name, f"a string is expected, not {_shown(value)}")
        return value

    def object(self, name: str) -> Fields | None:
        """The object in the field ``name``, without defaults; None if the field is absent or null. Raises
        ConfigInvalid for any other type."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.wrong(name, f"an object is expected, not {_shown(value)}")
        return Fields(self.path, value, {}, f"{self.inside}{name}.")

    def wrong(self, name: str, cause: str) -> ConfigInvalid:
        """Make the error that says what is wrong with the field ``name``: ``cause``. The caller raises it."""
        return ConfigInvalid(f"{self.path}: {self.inside}{name}: {cause}")

    def unserved(self, name: str, cause: str) -> UnsupportedArchitecture:
        """Make the error that says why the field ``name`` is not served: ``cause``. The caller raises it."""
        return UnsupportedArchitecture(f"{self.path}: {self.inside}{name}: {cause}")

    def _given(self, name: str) -> bool:
        return self.values.get(name, self.defaults.get(name)) is not None

    def _needed(self, name: str) -> Any:
        value = self.get(name)
        if value is None:
            raise self.wrong(name, "missing")
        return value


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as a file's header describes it. ``shard``: the file. ``name``: its name there. ``shape``: in
    torch's order. ``dtype``: as the format names types. ``begin``, ``end``: in a GGUF file the range of its
    bytes behind the header."""

    shard: Path
    name: str
    shape: tuple[int, ...]
    dtype: str
    begin: int = 0
    end: int = 0

    def wrong(self, cause: str) -> TensorInvalid:
        """Make the error that says what is wrong with this tensor: ``cause``. The caller raises it."""
        return TensorInvalid(f"{self.shard}: {self.name}: {cause}")

    def check(
        self, asks: str, *shapes: tuple[int, ...], types: Sequence[str] = FLOAT_TYPES, by: str = ""
    ) -> None:
        """Raise ``TensorInvalid`` if its type is none of ``types``, or its shape none of ``shapes``. ``asks``:
        what asks for them; ``by``: the configuration's fields that do."""
        if self.dtype not in types:
            raise self.wrong(f"type {self.dtype} is not served ({', '.join(types)})")
        if self.shape not in shapes:
            wanted = " or ".join(str(list(shape)) for shape in shapes)
            raise self.wrong(f"shape {list(self.shape)}, {asks} for {wanted}" + (f" ({by})" if by else ""))


def _is_number(value: object, above: float, most: float) -> bool:
    return isinstance(value, (int, float)) and type(value) is not bool and above < value <= most


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
