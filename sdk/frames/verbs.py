"""What only a session can do: events that cut a reply where it was heard, go back, branch off and steer, and
list, name and prune the branches.

`conversation.item.truncate` is the standard's, with a field of ours; the others are ours.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, UnsetType

from .events import ClientFrame, EventId, Handle, OwnFrame, ServerFrame
from .items import AnyItem, Identifier
from .response import ResponseParams

# --- from the client ---


class Heard(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """At `ms` of its audio, so many characters of the text had been spoken."""

    ms: Annotated[int, Meta(ge=0)]
    text_end: Annotated[int, Meta(ge=0)]


class ItemTruncate(ClientFrame, frozen=True, tag="conversation.item.truncate"):
    """End a message of the model where it was heard: after `text_end` characters (ours; Unicode code points).

    `audio_end_ms`, the standard's, says it in time; `timing` (ours) then has to say what was spoken when, since
    there is no audio here. A reply that runs is cancelled first.
    """

    item_id: Identifier
    content_index: Annotated[int, Meta(ge=0)] = 0
    text_end: Annotated[int, Meta(ge=0)] | None = None
    audio_end_ms: Annotated[int, Meta(ge=0)] | None = None
    timing: Annotated[list[Heard], Meta(max_length=65536)] | None = None


class SessionRewind(ClientFrame, frozen=True, tag="session.rewind"):
    """Go back to an item, which becomes the last (`root`: before the first), or to so many tokens."""

    to: Identifier | Annotated[int, Meta(ge=0)]


class SessionFork(ClientFrame, frozen=True, tag="session.fork"):
    """Make `children` sessions that go on from here, or from the item `at`.

    Also while a reply runs: as far as it has come it is theirs, and ends there.
    """

    at: Identifier | None = None
    children: Annotated[int, Meta(ge=1, le=64)] = 1


class SessionTree(ClientFrame, frozen=True, tag="session.tree"):
    """List the session's tree: all that were forked from one another with this one among them.

    At most `limit` of them, those behind the session `after`: the `next` of the page before.
    """

    limit: Annotated[int, Meta(ge=1, le=1000)] = 100
    after: Identifier | None = None


class SessionName(ClientFrame, frozen=True, tag="session.name"):
    """Name this session, as a branch of its tree; an empty name takes the name back.

    It is kept in Unicode's normal form C. No two of one tree have the same name.
    """

    name: Annotated[str, Meta(max_length=128)]


class SessionPrune(ClientFrame, frozen=True, tag="session.prune"):
    """End another session of this one's tree for good: what runs in it is cancelled, a socket that has it is
    told as when it goes on elsewhere, its handles open nothing any more.

    What it shares with others, forks of it among them, stays theirs.
    """

    session: Identifier


class ResponseSteer(ClientFrame, frozen=True, tag="response.steer"):
    """Say `input` while a reply runs: that ends in order (`incomplete`, `steered`), and the next one begins.

    Where none runs any more it is a plain new turn. `response` is as in `response.create`.
    """

    input: Annotated[list[AnyItem], Meta(min_length=1, max_length=64)]
    response: ResponseParams | None = None


class SessionAttach(ClientFrame, frozen=True, tag="session.attach"):
    """Let this socket have the session that the handle `session` opens, besides those it has.

    Answered by `session.resumed`. From now on every event names its session in `session_id`. `last_event` is as
    in `session.resume`.
    """

    session: Handle
    last_event: EventId | None = None


class SessionDetach(ClientFrame, frozen=True, tag="session.detach"):
    """The session `session_id` leaves this socket; it can be come back to."""


# --- from the server ---


class ItemTruncated(ServerFrame, frozen=True, tag="conversation.item.truncated"):
    """Answers `conversation.item.truncate`, after the reply's `response.done` where that ran.

    `text_end`: the characters that are left (ours).
    """

    item_id: str
    content_index: int = 0
    audio_end_ms: int = 0
    text_end: int | UnsetType = UNSET


class SessionRewound(OwnFrame, frozen=True, tag="session.rewound"):
    """Answers `session.rewind`: `item_id` is the last item now (null: there is none), and what stays of the
    turns is `tokens` long."""

    item_id: str | None
    tokens: int


class Fork(msgspec.Struct, kw_only=True, frozen=True):
    """A session that was forked off, and the handle that opens it."""

    id: str
    handle: str


class SessionForked(OwnFrame, frozen=True, tag="session.forked"):
    """Answers `session.fork`."""

    sessions: list[Fork]


class Relative(msgspec.Struct, kw_only=True, frozen=True):
    """A session of a tree. `parent`: whom it was forked from (null: it is the first), who may be pruned by now.

    `open`: the server has it in memory, where it has so many `items` and `tokens`; else these are null.
    """

    id: str
    parent: str | None
    name: str = ""
    open: bool = False
    items: int | None = None
    tokens: int | None = None


class SessionTreeListed(OwnFrame, frozen=True, tag="session.tree.listed"):
    """Answers `session.tree`: parents stand before their children.

    `has_more`: there are more, which come `after` the session `next`.
    """

    sessions: list[Relative]
    has_more: bool = False
    next: str | None = None


class SessionNamed(OwnFrame, frozen=True, tag="session.named"):
    """Answers `session.name`: the name as it is kept."""

    name: str


class SessionPruned(OwnFrame, frozen=True, tag="session.pruned"):
    """Answers `session.prune`: `session` is gone."""

    session: str


class SteerAccepted(OwnFrame, frozen=True, tag="response.steer.accepted"):
    """Answers `response.steer`: `response_id` has been ended for it (null: none ran)."""

    response_id: str | None


class SessionDetached(OwnFrame, frozen=True, tag="session.detached"):
    """The session `session_id` is on this socket no more: it was detached, or goes on on a newer one."""
