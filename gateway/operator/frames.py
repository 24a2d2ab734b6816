"""The bodies of the operator's routes, as types."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

from ...runtime.verbs import BlockMap, KVTier
from ...sessions.conversation.history import History
from ...sessions.conversation.items import FunctionCall, FunctionCallOutput, Item, Message
from ...sessions.journal.records import SessionRecord

PAGE, MOST = 20, 100
"""``PAGE``: the sessions of a page, and the items of a session, if the operator asks for no number. ``MOST``:
the most that may be asked for."""
BRIEF = 200
"""So many characters of a text are shown."""
SessionState: TypeAlias = Literal["running", "open", "idle", "offloaded", "damaged"]


class SessionsQuery(msgspec.Struct, kw_only=True, frozen=True):
    """The URL parameters of the list of sessions."""

    limit: Annotated[int, Meta(ge=1, le=MOST, description="The most sessions of a page.")] = PAGE
    after: Annotated[
        str | None,
        Meta(description="The id of a session: only those behind it. Or `next` of the page before."),
    ] = None
    tenant: Annotated[str | None, Meta(description="Only sessions of the tenant with this name.")] = None


class ShownQuery(msgspec.Struct, kw_only=True, frozen=True):
    """The URL parameters of one session."""

    items: Annotated[int, Meta(ge=0, le=MOST, description="How many items are shown, the latest.")] = PAGE


class KVTiers(msgspec.Struct, kw_only=True, frozen=True):
    """How many tokens of a session have their KV in which tier; `none`: it is computed when it is needed."""

    device: int
    host: int
    disk: int
    none: int

    @classmethod
    def of(cls, blocks: BlockMap) -> KVTiers:
        """By a map of the session's blocks."""
        counts = dict.fromkeys((tier.value for tier in KVTier), 0)
        left = blocks.tokens
        for run in blocks.runs:
            tokens = min(left, run.count * blocks.block_tokens)
            counts[run.tier.value] += tokens
            left -= tokens
        return cls(**counts)


class ListedSession(msgspec.Struct, kw_only=True, frozen=True):
    """A session as an operator sees it. Its `id` opens nothing: a client needs a handle, and the key of the
    session.

    `state`: `running`: a response runs; `open`: it has a connection; `idle`: it is in memory without one;
    `offloaded`: only the journal has it; `damaged`: its records cannot be read. `tenant`: the name, or what
    stands for it where no key has it. `created`: ISO 8601. `unused_seconds`: for how long servers have run
    since it was last written to; null for one that the journal does not keep. `turns`: replies of the model in
    its history. `tokens`: up to the end of its last turn. `kv`: null where it is not known: of an offloaded
    session it is told only when that one is asked for.
    """

    id: str
    tenant: str
    state: SessionState
    created: str
    name: str = ""
    parent: str | None = None
    turns: int = 0
    items: int = 0
    tokens: int = 0
    unused_seconds: float | None = None
    kv: KVTiers | None = None


class SessionPage(msgspec.Struct, kw_only=True, frozen=True):
    """Some sessions, the latest made first. There may be fewer than were asked for. `next`: the `after` of the
    next page; null on the last one."""

    data: list[ListedSession]
    next: str | None = None
    object: Literal["list"] = "list"


class BriefItem(msgspec.Struct, kw_only=True, frozen=True):
    """An item, with the beginning of its text. `characters`: of the whole text. `name`: of a tool. `left_out`:
    it is out of the context."""

    id: str
    type: str
    text: str
    characters: int
    role: str | None = None
    name: str | None = None
    left_out: bool = False


class ForkedSession(msgspec.Struct, kw_only=True, frozen=True):
    """A session that was forked from another one."""

    id: str
    name: str


class ShownSession(ListedSession, kw_only=True, frozen=True):
    """One session. `instructions`: their beginning. `tools`: their names. `forks`: of this one directly, the
    first 100. `latest`: its last items, in order."""

    instructions: str
    tools: list[str]
    forks: list[ForkedSession]
    latest: list[BriefItem]


class DeletedSession(msgspec.Struct, kw_only=True, frozen=True):
    """The session with this `id` is deleted."""

    id: str
    object: Literal["session"] = "session"
    deleted: bool = True


def listed(
    record: SessionRecord,
    history: History,
    tenant: str,
    state: SessionState,
    *,
    unused_seconds: float | None = None,
    kv: KVTiers | None = None,
) -> ListedSession:
    """What is told of the session with this ``record`` and ``history``."""
    head = history.head
    return ListedSession(
        id=record.id,
        tenant=tenant,
        state=state,
        created=record.created,
        name=record.name,
        parent=record.parent or None,
        turns=history.turns,
        items=len(history),
        tokens=0 if head is None else head.length,
        unused_seconds=None if unused_seconds is None else round(unused_seconds, 1),
        kv=kv,
    )


def damaged(name: str, tenant: str) -> ListedSession:
    """What is told of a session that cannot be read. ``name``: its id, or what the journal calls it."""
    return ListedSession(id=name, tenant=tenant, state="damaged", created="")


def shown(session: ListedSession, history: History, forks: list[ForkedSession], items: int) -> ShownSession:
    """What is told of one session. ``history``: no turn runs in it. ``items``: how many of the latest are
    told."""
    preamble = history.preamble
    outside = {id(entry) for gap in history.gaps for entry in gap.entries}
    latest: list[BriefItem] = []
    for entry in reversed(history.entries):
        found = entry.items if hasattr(entry, "items") else (entry,)
        latest += [_brief(item, left_out=id(entry) in outside) for item in reversed(found)]
        if len(latest) >= items:
            break
    return ShownSession(
        **msgspec.structs.asdict(session),
        instructions=preamble.instructions[:BRIEF],
        tools=[tool.name for tool in preamble.tools],
        forks=forks[:MOST],
        latest=latest[:items][::-1],
    )


def _brief(item: Item, *, left_out: bool) -> BriefItem:
    role: str | None = None
    name: str | None = None
    match item:
        case Message():
            kind, text, role = "message", item.text, item.role
        case FunctionCall():
            kind, text, name = "function_call", item.arguments, item.name
        case FunctionCallOutput():
            kind, text = "function_call_output", item.output
    return BriefItem(
        id=item.id,
        type=kind,
        text=text[:BRIEF],
        characters=len(text),
        role=role,
        name=name,
        left_out=left_out,
    )
