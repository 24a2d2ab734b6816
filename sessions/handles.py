"""Handles: secrets with which a client resumes its session.

Each use issues a new one. The used one stays valid until a newer one has been used, so an answer that was lost
on the way does not lock the client out. Outside memory only digests are kept. Knows nothing of sockets.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterable

import msgspec

from .journal.records import Keyring, SessionLog

HANDLE_BYTES = 24  # 192 random bits
MAX_FRESH = 4  # issued and not used: their answers may have been lost
MAX_CONVERSATIONS = 8
"""So many conversation digests are kept: the first, because a client may go back to it, and the latest."""
MAX_NAMES = 4
"""So many digests of names are kept: the latest."""


def digest_of(handle: str) -> bytes:
    """The digest under which a handle is stored: BLAKE2b, 32 bytes. ``handle`` is the client's text, valid or
    not."""
    return hashlib.blake2b(handle.encode(errors="replace"), digest_size=32).digest()


class SessionHandles:
    """The handles of one session. ``owner``: the API key that made the session. ``current``: the newest
    handle, or "" if only its digest is known. Each change is written to the session's log."""

    def __init__(self, owner: bytes, log: SessionLog, keyring: Keyring | None = None) -> None:
        self.owner = owner
        self.current = ""
        self._log = log
        self._keyring = keyring or Keyring(fresh=())
        if keyring is None:
            self._issue(Keyring(fresh=()))

    def digests(self) -> tuple[bytes, ...]:
        """Digests of the handles that are valid now: the last used one, and those that were issued since."""
        return self._keyring.digests()

    def opens(self, digest: bytes, owners: Iterable[bytes]) -> bool:
        """Whether the digest is of a valid handle, and one of ``owners`` is the key that made the session."""
        known = any(hmac.compare_digest(digest, valid) for valid in self.digests())
        return any(hmac.compare_digest(owner, self.owner) for owner in owners) and known

    def use(self, digest: bytes) -> str:
        """A client used the valid handle with this digest: issue the next one and return its text. If the
        used one is newer than the last used one, all others that were issued before this call end."""
        ring = self._keyring
        if digest in ring.fresh:
            ring = msgspec.structs.replace(ring, fresh=(), used=digest)
        self._issue(ring)
        return self.current

    def reached(self, conversation: bytes) -> None:
        """The history has become the conversation with this digest (`continuation`): keep the digest with the
        handles, so that the journal finds the session by it."""
        known = self._keyring.conversations
        if conversation in known[-1:]:
            return
        kept = (*known, conversation)
        if len(kept) > MAX_CONVERSATIONS:
            kept = (kept[0], *kept[2:])
        self._keyring = msgspec.structs.replace(self._keyring, conversations=kept)
        self._log.keep_handles(self._keyring)

    def named(self, name: bytes) -> None:
        """A client knows the session by the name with this digest (`continuation`): keep it likewise."""
        known = self._keyring.names
        if name not in known:
            self._keyring = msgspec.structs.replace(self._keyring, names=(*known, name)[-MAX_NAMES:])
            self._log.keep_handles(self._keyring)

    def _issue(self, ring: Keyring) -> None:
        self.current = f"hold_{secrets.token_urlsafe(HANDLE_BYTES)}"
        fresh = (*ring.fresh, digest_of(self.current))[-MAX_FRESH:]
        self._keyring = msgspec.structs.replace(ring, fresh=fresh)
        self._log.keep_handles(self._keyring)
