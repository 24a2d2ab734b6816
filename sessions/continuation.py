"""Conversation digests: how a request that carries a whole conversation finds the session that it continues.

A conversation has one digest for each of its beginnings: the preamble alone, the preamble and one item, and so
on. Each is a hash of the one before and of the next item's content, so two conversations share exactly the
digests of their common beginning. Ids of items do not count: clients that send messages have none. Pure.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import msgspec

from .items import FunctionCall, FunctionCallOutput, Item, Message, Preamble

Digest: TypeAlias = bytes
DIGEST_BYTES = 32
PERSON = b"holdfast-convers"
"""Personalization of BLAKE2b: keeps these hashes apart from others of the same bytes, such as those of
handles."""

MOST_KNOWN = 1 << 16
"""The most digests of open sessions in memory. Beyond that, those that were added first are forgotten."""

_ENCODER = msgspec.msgpack.Encoder(order="sorted")


def digests_of(salt: bytes, preamble: Preamble, items: Iterable[Item]) -> list[Digest]:
    """The digests of a conversation's beginnings: entry ``n`` covers the preamble and the first ``n`` items, so
    there is one more than items. ``salt``: of the tenant, so that two tenants share no digest."""
    digests = [_hashed(b"", _ENCODER.encode(preamble), key=salt)]
    for item in items:
        digests.append(_hashed(digests[-1], _ENCODER.encode(_content(item))))
    return digests


def shared_length(one: Sequence[Digest], other: Sequence[Digest]) -> int:
    """How many first items two conversations share, by their digests from `digests_of`; -1 if their preambles
    or tenants differ."""
    low, high = -1, min(len(one), len(other)) - 1
    while low < high:  # if two digests are equal, so are all before them
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[middle] == other[middle] else (low, middle - 1)
    return low


class HistoryDigests:
    """Computes the digests of one session's history. Those of items that did not change since the last call are
    not computed again."""

    def __init__(self, salt: bytes) -> None:
        self._salt = salt
        self._preamble: Preamble | None = None
        self._items: tuple[Item, ...] = ()
        self._digests: list[Digest] = []

    def of(self, preamble: Preamble, items: tuple[Item, ...]) -> list[Digest]:
        """The digests of the history's beginnings: entry ``n`` covers the preamble and the first ``n`` items.
        The caller must not change the list."""
        if self._preamble is not preamble:
            self._preamble, self._items = preamble, ()
            self._digests = digests_of(self._salt, preamble, ())
        pairs = enumerate(zip(self._items, items, strict=False))
        kept = next((at for at, (old, new) in pairs if old is not new), min(len(self._items), len(items)))
        self._digests = self._digests[: kept + 1]
        for item in items[kept:]:
            self._digests.append(_hashed(self._digests[-1], _ENCODER.encode(_content(item))))
        self._items = items
        return self._digests


class OpenConversations:
    """Finds the open session with a history that has reached a conversation, by the conversation's digest. At
    most ``most`` digests are remembered, the latest."""

    def __init__(self, most: int = MOST_KNOWN) -> None:
        self._most = most
        self._sessions: OrderedDict[Digest, str] = OrderedDict()

    def add(self, digest: Digest, session_id: str) -> None:
        """Remember that this session's history has reached the conversation ``digest``."""
        self._sessions[digest] = session_id
        self._sessions.move_to_end(digest)
        if len(self._sessions) > self._most:
            self._sessions.popitem(last=False)

    def find(self, digests: Sequence[Digest]) -> str | None:
        """The id of the session that shares the longest beginning with a conversation; None if no digest is
        known. ``digests``: of the conversation's beginnings, the shortest first. The session may be closed by
        now."""
        return next((found for one in reversed(digests) if (found := self._sessions.get(one))), None)

    def forget(self, digests: Iterable[Digest], session_id: str) -> None:
        """Forget the ``digests`` that were added for this session, which is not open any more."""
        for digest in digests:
            if self._sessions.get(digest) == session_id:
                del self._sessions[digest]


def _hashed(before: bytes, content: bytes, key: bytes = b"") -> Digest:
    return hashlib.blake2b(before + content, digest_size=DIGEST_BYTES, key=key, person=PERSON).digest()


def _content(item: Item) -> tuple[str, ...]:
    """The parts of an item that its digest covers: its kind or role, and its content without its id.

    White space around a model's message does not count: many clients strip it. Nor does the spelling of a
    call's arguments: some clients parse and write them again.
    """
    match item:
        case Message(role="assistant", text=text):
            return ("assistant", text.strip())
        case Message(role=role, text=text):
            return (role, text)
        case FunctionCall(call_id=call_id, name=name, arguments=arguments):
            return ("call", call_id, name, _canonical(arguments))
        case FunctionCallOutput(call_id=call_id, output=output):
            return ("output", call_id, output)


def _canonical(arguments: str) -> str:
    try:
        return json.dumps(json.loads(arguments or "{}"), sort_keys=True, separators=(",", ":"))
    except (ValueError, RecursionError):
        return arguments
