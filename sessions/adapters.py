"""The adapter (LoRA) of a session: its name, and the digest of the weights that the session began with.

All of a session's tokens are computed with one adapter, so it is of use only while exactly those weights are
loaded.
"""

from __future__ import annotations

import msgspec

from ..runtime.link.client import EngineLink
from .errors import AdapterUnavailable


class SessionAdapter(msgspec.Struct, frozen=True):
    """An adapter by its ``name`` and the ``digest`` of its configuration and weights."""

    name: str
    digest: bytes


def digest_of(adapter: SessionAdapter | None) -> bytes:
    """The adapter's digest; empty for none."""
    return b"" if adapter is None else adapter.digest


def check_loaded(link: EngineLink, adapter: SessionAdapter | None) -> None:
    """Raise ``AdapterUnavailable`` unless the adapter is loaded, with the weights of this digest."""
    if adapter is None:
        return
    loaded = link.adapters.get(adapter.name)
    if loaded is None:
        raise AdapterUnavailable(f"The session's adapter {adapter.name!r} is not loaded")
    if loaded.digest != adapter.digest:
        raise AdapterUnavailable(
            f"The session's adapter {adapter.name!r} is loaded with other weights: its digest is"
            f" {loaded.digest.hex()[:16]}, the session's {adapter.digest.hex()[:16]}"
        )
