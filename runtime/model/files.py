"""The files that describe a model: those of a Hugging Face folder, or the same made from a GGUF file. No torch.

Configuration, tokenizer and chat template are read from a `ModelFiles`, so that they need not know the format.
Weights are opened by `load.open_weights`.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from .gguf_file import GGUFFile


ADAPTER = "adapter_config.json"
"""The file of an adapter (LoRA), which changes a model."""
LARGEST_BYTES = 256 << 20
"""Of a file that describes a model or an adapter, at most."""


class FolderFiles:
    """The describing files of a model in a Hugging Face folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def where(self, name: str) -> Path:
        """The path of the file in the folder."""
        return self.path / name

    def content(self, name: str) -> bytes | None:
        """The bytes of the file in the folder; None if there is none. Raises `OSError`."""
        path = self.path / name
        try:
            told = path.stat()
            if not (S_ISREG(told.st_mode) or S_ISDIR(told.st_mode)):  # reading a pipe might never end
                raise OSError(errno.EINVAL, "not a file")
            if told.st_size > LARGEST_BYTES:
                raise OSError(errno.EFBIG, f"{told.st_size} bytes, at most {LARGEST_BYTES} are read")
            return path.read_bytes()
        except FileNotFoundError:
            return None


class GGUFFiles:
    """The describing files of a model in a GGUF file, each made from the file's metadata."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @cached_property
    def file(self) -> GGUFFile:
        """The opened file. Raises ``ModelUnreadable``."""
        from .gguf_file import GGUFFile  # it imports the library, which other models do not need

        return GGUFFile(self.path)

    def where(self, name: str) -> Path:
        """The path of the GGUF file, for any ``name``."""
        return self.path

    def content(self, name: str) -> bytes | None:
        """The bytes that the file would have in a folder; None if the metadata do not describe such a file.
        Raises ``ModelUnreadable``: they do not describe it rightly."""
        from . import gguf_config, gguf_tokenizer

        makers: dict[str, Callable[[GGUFFile], dict[str, Any]]] = {
            "config.json": gguf_config.config_of,
            "generation_config.json": gguf_config.generation_of,
            "tokenizer.json": gguf_tokenizer.tokenizer_of,
            "tokenizer_config.json": gguf_tokenizer.tokenizer_config_of,
        }
        make = makers.get(name)
        return None if make is None else json.dumps(make(self.file), ensure_ascii=False).encode()


ModelFiles: TypeAlias = FolderFiles | GGUFFiles
"""The files that describe one model, by name: ``where`` a file is, to name it in an error, and its
``content``."""


def files_of(path: Path) -> ModelFiles:
    """The describing files of the model at ``path``: a folder, or a GGUF file."""
    return GGUFFiles(path) if path.is_file() else FolderFiles(path)
