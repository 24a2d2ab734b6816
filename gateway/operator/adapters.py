"""Adapters (LoRA) that an operator loads and unloads while the server serves: vLLM's routes, for an operator's
key alone, and for folders below the one that the settings name."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from ...kvstore.log_lines import logging_with
from ...kvstore.options import expanded
from ...runtime.errors import SettingsInvalid
from ...runtime.settings import MOST_NAME, check_adapter_name
from ...sdk.errors import FieldInvalid
from ...sdk.frames.codec import decode_body
from ..access.auth import LOAD_ADAPTER, UNLOAD_ADAPTER
from ..clients import RefusedFields
from ..documents.rows import RouteRow
from ..errors import AdapterFolderUnset
from ..net.bodies import TEXT
from ..service import Service

Name: TypeAlias = Annotated[str, Meta(min_length=1, max_length=MOST_NAME)]
"""The name of an adapter, by which clients choose it as their `model`."""
WEIGHTS = ("adapter_config.json", "adapter_model.safetensors")
"""The files of a folder that are read."""


class LoadedAdapterRequest(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Load the adapter in the folder `lora_path`, which peft has written, under `lora_name`. The folder lies
    below that of `--lora-folder`, from where a relative path begins."""

    lora_name: Name
    lora_path: Annotated[str, Meta(min_length=1, max_length=4096)]


class UnloadedAdapterRequest(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Unload the adapter `lora_name`. Replies that run with it end as they would; no other begins.
    `lora_int_id`, vLLM's number of it, has no effect."""

    lora_name: Name
    lora_int_id: int | None = None


_LOAD = msgspec.json.Decoder(LoadedAdapterRequest)
_UNLOAD = msgspec.json.Decoder(UnloadedAdapterRequest)
_REFUSED = RefusedFields(frozenset({"load_inplace"}))


async def load(service: Service, request: Request) -> Response:
    """Serve ``POST /v1/load_lora_adapter``."""
    body, _ = await service.read(request, lambda data: decode_body(data, _LOAD, _REFUSED), TEXT)
    if body.lora_name in service.names:
        raise FieldInvalid(f"`lora_name` {body.lora_name!r} is a name of the model itself", "lora_name")
    try:
        check_adapter_name(body.lora_name)
    except SettingsInvalid as error:
        raise FieldInvalid(f"`lora_name`: {error.message}", "lora_name") from None
    path = await asyncio.to_thread(below, service.settings.lora_folder, body.lora_path)
    with logging_with(adapter=body.lora_name):
        await service.load_adapter(body.lora_name, str(path))
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


async def unload(service: Service, request: Request) -> Response:
    """Serve ``POST /v1/unload_lora_adapter``."""
    body, _ = await service.read(request, lambda data: decode_body(data, _UNLOAD, _REFUSED), TEXT)
    with logging_with(adapter=body.lora_name):
        await service.unload_adapter(body.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


def below(folder: Path | None, path: str) -> Path:
    """The folder ``path`` with all links followed, if it lies below ``folder``, and the files in it that are
    read, too. Raises ``AdapterFolderUnset``, ``FieldInvalid``."""
    if folder is None:
        raise AdapterFolderUnset("No folder of adapters is set: start the server with --lora-folder")
    outside = FieldInvalid(
        f"`lora_path` {path[:256]!r} is not below the server's folder of adapters", "lora_path"
    )
    try:
        root = expanded(folder).resolve()
        found = (root / path).resolve()
        files = [(found / name).resolve() for name in WEIGHTS]
    except (OSError, ValueError, RuntimeError):  # a name with a NUL, a loop of links
        raise outside from None
    if found == root or not all(one.is_relative_to(root) for one in (found, *files)):
        raise outside
    return found


ROWS = (
    RouteRow(
        "POST",
        LOAD_ADAPTER,
        "Load an adapter (LoRA) from a folder of the server.",
        load,
        request=LoadedAdapterRequest,
        media_type="text/plain",
        group="Operator",
    ),
    RouteRow(
        "POST",
        UNLOAD_ADAPTER,
        "Unload an adapter.",
        unload,
        request=UnloadedAdapterRequest,
        media_type="text/plain",
        group="Operator",
    ),
)
"""The routes of adapters; what they share is the `Service`."""
