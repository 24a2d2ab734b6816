"""Finds a model's folder: a local one, the pocket model, or a download from the hub. No torch."""

from __future__ import annotations

import re
from pathlib import Path

from ..errors import ModelUnreadable

POCKET = "pocket"
HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "tokenizer*", "merges.txt", "vocab.txt")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def find_model(name: str) -> Path:
    """The folder of model ``name``: ``pocket``, a local folder, or a hub id. May download it from the hub.

    Raises:
        ModelUnreadable: no such folder, no such model on the hub, or the hub cannot be reached.
    """
    if name == POCKET:
        return Path(__file__).resolve().parent.parent / POCKET
    folder = Path(name).expanduser()
    try:
        if name and folder.is_dir():
            return folder
        exists = name and folder.exists()
    except (OSError, ValueError) as error:
        raise ModelUnreadable(f"{name!r}: not a folder's name: {error}") from error
    if exists:
        raise ModelUnreadable(f"{name}: a model is a folder, and this is a file")
    if _HUB_ID.fullmatch(name):
        return _download(name)
    raise ModelUnreadable(f"{name}: no such folder, and not a hub id (owner/name)")


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
