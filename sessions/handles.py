"""Handles: secrets with which a client comes back to its session.

A new one is issued on use, and the one used stays valid until a newer one has been used: an answer that was
lost on the way, or came to the wrong one of two sockets, locks nobody out. Only digests are kept anywhere but
in memory. Knows nothing of sockets.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

from .journal.records import Keyring, SessionLog

HANDLE_BYTES = 24  # 192 random bits
MAX_FRESH = 4  # issued, and perhaps lost on the way


def digest_of(handle: str) -> bytes:
    """What is kept of a handle."""
    return hashlib.blake2b(handle.encode(errors="replace"), digest_size=32).digest()


class SessionHandles:
    """The handles of one session. ``current`` is the newest; empty where only its digest is known."""

    def __init__(self, owner: bytes, log: SessionLog, keyring: Keyring | None = None) -> None:
        self.owner = owner
        self.current = ""
        self._log = log
        self._keyring = keyring or Keyring(fresh=())
        if keyring is None:
            self._issue(Keyring(fresh=()))

    def digests(self) -> tuple[bytes, ...]:
        """Of the handles that are valid."""
        return self._keyring.digests()

    def opens(self, digest: bytes, owner: bytes) -> bool:
        """Whether this is one of them, in the hands of whose key made it."""
        known = any(hmac.compare_digest(digest, valid) for valid in self.digests())
        return hmac.compare_digest(owner, self.owner) and known

    def use(self, digest: bytes) -> str:
        """One of them was used: issue the next. With the first use of one, all older ones are used up."""
        ring = self._keyring
        if digest in ring.fresh:
            ring = Keyring(fresh=(), used=digest)
        self._issue(ring)
        return self.current

    def _issue(self, ring: Keyring) -> None:
        self.current = f"hold_{secrets.token_urlsafe(HANDLE_BYTES)}"
        fresh = (*ring.fresh, digest_of(self.current))[-MAX_FRESH:]
        before = self.digests()
        self._keyring = Keyring(fresh=fresh, used=ring.used)
        dropped = [digest for digest in before if digest not in self.digests()]
        self._log.keep_handles(self._keyring, self.owner, dropped)
