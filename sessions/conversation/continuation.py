"""How a request that carries a whole conversation finds the session that it continues.

A `GivenConversation` has a digest for each of its beginnings, computed when it is asked for. It covers the
number of items, the size of the preamble, the start of the first item and the last two items, so its cost does
not depend on what lies between. Two different beginnings may have one digest: all items of a session that is
found by it are compared (`GivenConversation.shared`). Names lead to sessions, too: ids of responses and
conversations, and keys that clients choose; what they find is compared in the same way. Ids of items do not
count: clients that send messages have none. Pure.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import islice, takewhile
from typing import TypeAlias

import msgspec

from .history import History
from .items import FunctionCall, FunctionCallOutput, Item, Message, Preamble

Digest: TypeAlias = bytes
DIGEST_BYTES = 32
PERSON = b"holdfast-convers"
"""Personalization of BLAKE2b: keeps these hashes apart from others of the same bytes, such as those of
handles."""

MOST_KNOWN = 1 << 16
"""The most digests of open sessions in memory. Beyond that, those that were added first are forgotten."""
ALIKE = 8
"""The most sessions that are remembered for one digest: the latest."""
FIRST_CHARACTERS = 1024
"""So many characters of the first item are hashed."""

MOST_CANONICAL = 1 << 16
"""A call's arguments of more characters are compared as they are spelled."""

_ENCODER = msgspec.msgpack.Encoder(order="sorted")


class GivenConversation:
    """A conversation of the tenant with this ``salt``: its preamble and its items. Two tenants share no
    digest. ``truncates``: its oldest turns may be left out of the prompt. ``adapter``: the digest of the one
    that it goes on with: sessions with another one do not share its tokens."""

    def __init__(
        self,
        salt: bytes,
        preamble: Preamble,
        items: Sequence[Item],
        *,
        truncates: bool = False,
        adapter: bytes = b"",
    ) -> None:
        self.salt = salt
        self.adapter = adapter
        self.space = space_of(salt, adapter)
        self.preamble = preamble
        self.items = items
        self._truncates = truncates
        self._hashed: dict[int, bytes] = {}  # hashes of items, by their indexes

    @cached_property
    def said(self) -> int:
        """How many first items there are up to the last one that the model wrote."""
        lengths = range(len(self.items), 0, -1)
        return next((length for length in lengths if _is_of_model(self.items[length - 1])), 0)

    def digest(self, length: int) -> Digest:
        """The digest of the beginning with ``length`` items, at least one. Each item is hashed once at most."""
        last = [self._hash(at) for at in range(max(0, length - 2), length)]
        return _digest(self.space, self.preamble, length, self.items[0], last)

    def _hash(self, at: int) -> bytes:
        if at not in self._hashed:
            self._hashed[at] = _item_hash(self.items[at])
        return self._hashed[at]

    def shared(self, preamble: Preamble, items: Iterable[Item]) -> int:
        """How many first items it shares with another conversation of its tenant; 0 if their preambles differ.
        It compares texts, and hashes nothing."""
        if not _same_preamble(self.preamble, preamble):
            return 0
        pairs = zip(self.items, items, strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0] is pair[1] or _same(*pair), pairs))

    def goes_on_in(self, history: History) -> int:
        """How many first items it shares with the history of a session of its tenant, up to a reply that runs,
        if it can go on behind them. 0 if it cannot: they have no tokens, or the history has left out something
        that this conversation must keep."""
        if history.gaps and not self._truncates:
            return 0
        shared = self.shared(history.preamble, history.before_reply())
        return shared if shared and history.is_worth(shared) else 0


def space_of(salt: bytes, adapter: bytes) -> bytes:
    """What separates the digests of tenants, and in a tenant those of its adapters. ``adapter``: the digest of
    the adapter; empty: none."""
    return _blake2b(b"adapter" + adapter, key=salt) if adapter else salt


def digest_of(space: bytes, history: History) -> Digest:
    """The digest of a whole history with at least one item, as `GivenConversation.digest` has it. ``space``:
    from `space_of`."""
    last = [_item_hash(item) for item in islice(history.backwards(), 2)]
    first = next(history.forwards())
    return _digest(space, history.preamble, len(history), first, last[::-1])


def name_digest(space: bytes, name: str) -> Digest:
    """The digest of a name that leads a tenant to a session. ``space``: from `space_of`."""
    return _blake2b(b"name" + name.encode(errors="surrogatepass"), key=space)


class OpenConversations:
    """Which open sessions have a conversation with this digest, or are known by this name. At most
    ``most`` digests are remembered."""

    def __init__(self, most: int = MOST_KNOWN) -> None:
        self._most = most
        self._sessions: OrderedDict[Digest, tuple[str, ...]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sessions)

    def add(self, digest: Digest, session_id: str) -> None:
        """Remember that this session's history has reached the conversation ``digest``, or has this name."""
        others = (other for other in self._sessions.get(digest, ()) if other != session_id)
        self._sessions[digest] = (session_id, *islice(others, ALIKE - 1))
        self._sessions.move_to_end(digest)
        if len(self._sessions) > self._most:
            self._sessions.popitem(last=False)

    def find(self, digest: Digest) -> tuple[str, ...]:
        """The ids of the sessions with this digest, the latest first. They may be closed by now."""
        return self._sessions.get(digest, ())

    def forget(self, digests: Iterable[Digest], session_id: str) -> None:
        """Forget the ``digests`` that were added for this session, which is not open any more."""
        for digest in digests:
            left = tuple(other for other in self._sessions.get(digest, ()) if other != session_id)
            if left:
                self._sessions[digest] = left
            else:
                self._sessions.pop(digest, None)


def _blake2b(content: bytes, key: bytes = b"") -> bytes:
    return hashlib.blake2b(content, digest_size=DIGEST_BYTES, key=key, person=PERSON).digest()


def _item_hash(item: Item) -> bytes:
    return _blake2b(_ENCODER.encode(_content(item)))


def _digest(salt: bytes, preamble: Preamble, length: int, first: Item, last: Sequence[bytes]) -> Digest:
    begins = _content(first, FIRST_CHARACTERS)
    sizes = (length, len(preamble.instructions), len(preamble.tools))
    return _blake2b(_ENCODER.encode((sizes, begins, last)), key=salt)


def _is_of_model(item: Item) -> bool:
    return isinstance(item, FunctionCall) or (isinstance(item, Message) and item.role == "assistant")


def _same_preamble(one: Preamble, other: Preamble) -> bool:
    """Whether two preambles are equal, as they are encoded: 1 is not 1.0, and the order of keys does not
    count."""
    if one.instructions != other.instructions or len(one.tools) != len(other.tools):
        return False
    return one.tools is other.tools or _ENCODER.encode(one.tools) == _ENCODER.encode(other.tools)


def _same(one: Item, other: Item) -> bool:
    """Whether two items have the same content (`_content`)."""
    match one, other:
        case FunctionCall(arguments=text), FunctionCall() if text == other.arguments:  # not parsed then
            return one.call_id == other.call_id and one.name == other.name
    return _content(one) == _content(other)


def _content(item: Item, most: int | None = None) -> tuple[str, ...]:
    """The parts of an item that make it what it is. White space around a model's message does not count: many
    clients strip it. Nor does the spelling of a call's arguments: some clients parse and write them again.
    ``most``: only so many first characters of its text."""
    match item:
        case Message(role="assistant", text=text):
            return ("assistant", text.strip()[:most])
        case Message(role=role, text=text):
            return (role, text[:most])
        case FunctionCall(call_id=call_id, name=name, arguments=arguments):
            return ("call", call_id, name, _canonical(arguments)[:most])
        case FunctionCallOutput(call_id=call_id, output=output):
            return ("output", call_id, output[:most])


def _canonical(arguments: str) -> str:
    if len(arguments) > MOST_CANONICAL:
        return arguments
    try:
        return json.dumps(json.loads(arguments or "{}"), sort_keys=True, separators=(",", ":"))
    except (ValueError, RecursionError):
        return arguments
