"""Handles: secrets with which a client comes back to its session.

A new one is issued on use, and the one used stays valid until the new one has been used: an answer that was
lost on the way locks nobody out. Only digests are kept anywhere but in memory. Knows nothing of sockets.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

from .journal.log import SessionLog
from .journal.records import Keyring

HANDLE_BYTES = 24  # 192 random bits


def digest_of(handle: str) -> bytes:
    """What is kept of a handle."""
    return hashlib.blake2b(handle.encode(errors="replace"), digest_size=32).digest()


class SessionHandles:
    """The handles of one session. ``current`` is the newest; empty where only its digest is known."""

    def __init__(self, owner: bytes, log: SessionLog, keyring: Keyring | None = None) -> None:
        self.owner = owner
        self.current = ""
        self._log = log
        self._keyring = keyring
        if keyring is None:
            self._issue(None, None)

    def digests(self) -> tuple[bytes, ...]:
        """Of the handles that are valid."""
        ring = self._keyring
        return () if ring is None else tuple(filter(None, (ring.current, ring.previous)))

    def opens(self, digest: bytes, owner: bytes) -> bool:
        """Whether this is one of them, in the hands of whose key made it."""
        known = any(hmac.compare_digest(digest, valid) for valid in self.digests())
        return hmac.compare_digest(owner, self.owner) and known

    def use(self, digest: bytes) -> str:
        """One of them was used: issue the next. The other one is valid no longer."""
        ring = self._keyring
        assert ring is not None
        self._issue(digest, ring.previous if digest == ring.current else ring.current)
        return self.current

    def _issue(self, previous: bytes | None, dropped: bytes | None) -> None:
        self.current = f"hold_{secrets.token_urlsafe(HANDLE_BYTES)}"
        self._keyring = Keyring(current=digest_of(self.current), previous=previous)
        self._log.keep_handles(self._keyring, self.owner, dropped)
