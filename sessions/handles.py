"""Handles: secrets with which a client resumes its session.

Each use issues a new one. The used one stays valid until a newer one has been used, so an answer that was lost
on the way does not lock the client out. Outside memory only digests are kept. Knows nothing of sockets.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

from .journal.records import Keyring, SessionLog

HANDLE_BYTES = 24  # 192 random bits
MAX_FRESH = 4  # issued and not used: their answers may have been lost


def digest_of(handle: str) -> bytes:
    """The digest of a handle, 32 bytes."""
    return hashlib.blake2b(handle.encode(errors="replace"), digest_size=32).digest()


class SessionHandles:
    """The handles of one session. ``current`` is the newest, or "" if only its digest is known."""

    def __init__(self, owner: bytes, log: SessionLog, keyring: Keyring | None = None) -> None:
        self.owner = owner
        self.current = ""
        self._log = log
        self._keyring = keyring or Keyring(fresh=())
        if keyring is None:
            self._issue(Keyring(fresh=()))

    def digests(self) -> tuple[bytes, ...]:
        """Digests of the valid handles."""
        return self._keyring.digests()

    def opens(self, digest: bytes, owner: bytes) -> bool:
        """Whether the digest is of a valid handle, and ``owner`` is the key that made the session."""
        known = any(hmac.compare_digest(digest, valid) for valid in self.digests())
        return hmac.compare_digest(owner, self.owner) and known

    def use(self, digest: bytes) -> str:
        """A handle was used: issue the next and return it. Its first use ends all older ones."""
        ring = self._keyring
        if digest in ring.fresh:
            ring = Keyring(fresh=(), used=digest)
        self._issue(ring)
        return self.current

    def _issue(self, ring: Keyring) -> None:
        self.current = f"hold_{secrets.token_urlsafe(HANDLE_BYTES)}"
        fresh = (*ring.fresh, digest_of(self.current))[-MAX_FRESH:]
        self._keyring = Keyring(fresh=fresh, used=ring.used)
        self._log.keep_handles(self._keyring)
