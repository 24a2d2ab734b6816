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

from .journal.records import Keyring
from .journal.session_log import SessionLog

HANDLE_BYTES = 24  # 192 random bits
MAX_FRESH = 4  # issued and not used: their answers may have been lost
MAX_CONVERSATIONS = 8
"""How many digests of a session's conversation (`continuation`) are kept, one for each turn's end: the first,
because a client may go back to it, and the latest."""
MAX_NAMES = 4
"""A session keeps so many digests of names by which clients know it: the latest."""


def digest_of(handle: str) -> bytes:
    """The digest under which a handle is stored: BLAKE2b, 32 bytes. ``handle`` is the client's text, valid or
    not."""
    return hashlib.blake2b(handle.encode(errors="replace"), digest_size=32).digest()


class SessionHandles:
    """The handles of one session: which are valid, and the next one. Each change is written to ``log``, the
    session's log in the journal.

    ``owner``: the digest of the API key that made the session. ``current``: the newest handle; "" if only its
    digest is known. ``keyring``: the digests from the journal; None for a new session, which gets a handle.
    """

    def __init__(self, owner: bytes, log: SessionLog, keyring: Keyring | None = None) -> None:
        self.owner = owner
        self.current = ""
        self._log = log
        self._keyring = keyring or Keyring(fresh=())
        if keyring is None:
            self._issue()

    def digests(self) -> tuple[bytes, ...]:
        """Digests of the handles that are valid now: the last used one, and those that were issued since."""
        return self._keyring.digests()

    def opens(self, digest: bytes, owners: Iterable[bytes]) -> bool:
        """Whether ``digest`` is that of a valid handle, and one of ``owners``, digests of API keys, is that of
        the key that made the session."""
        known = any(hmac.compare_digest(digest, valid) for valid in self.digests())
        return any(hmac.compare_digest(owner, self.owner) for owner in owners) and known

    def use(self, digest: bytes) -> str:
        """Called when a client has used the valid handle with this digest: issues the next handle and returns
        its text. If the used one had not been used before, all other handles that were issued before this call
        become invalid."""
        if digest in self._keyring.fresh:
            self._keyring = msgspec.structs.replace(self._keyring, fresh=(), used=digest)
        self._issue()
        return self.current

    def reached(self, conversation: bytes) -> None:
        """Called after a turn, when the history has become the conversation with this digest (`continuation`):
        stores the digest with the handles in the journal, which then finds the session by it when a request
        carries that conversation."""
        known = self._keyring.conversations
        if conversation in known[-1:]:
            return
        kept = (*known, conversation)
        if len(kept) > MAX_CONVERSATIONS:
            kept = (kept[0], *kept[2:])
        self._change(conversations=kept)

    def named(self, name: bytes) -> None:
        """A client knows the session by the name with this digest (`continuation`): keep it likewise."""
        known = self._keyring.names
        if name not in known:
            self._change(names=(*known, name)[-MAX_NAMES:])

    def _issue(self) -> None:
        self.current = f"hold_{secrets.token_urlsafe(HANDLE_BYTES)}"
        self._change(fresh=(*self._keyring.fresh, digest_of(self.current))[-MAX_FRESH:])

    def _change(self, **digests: tuple[bytes, ...]) -> None:
        self._keyring = msgspec.structs.replace(self._keyring, **digests)
        self._log.keep(self._keyring)
