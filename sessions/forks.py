"""Forks: sessions that begin with the history of another one, open or in the journal, and share its KV.

The registry opens them. A fork is in the fork tree of its parent; the tree's sessions are listed, named and
pruned here. A session that is branched off begins a tree of its own.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING, Literal

import msgspec

from .adapters import SessionAdapter, digest_of
from .conversation.continuation import GivenConversation
from .conversation.edits import rewind
from .conversation.items import new_id
from .errors import SessionLimit
from .fork_trees import ForkTree, Member, Page, root_of
from .journal.records import AnyOperation, Branched, Origin, SessionRecord
from .journal.replay import refused, replay
from .session import ForkSummary, Session

if TYPE_CHECKING:
    from .registry import SessionRegistry


class Forks:
    """The forks of the sessions of one ``registry``. ``clock``: seconds that only grow."""

    def __init__(self, registry: SessionRegistry, clock: Callable[[], float] = time.monotonic) -> None:
        self._registry = registry
        self._clock = clock

    # --- children of an open session ------------------------------------------------------------------------

    async def fork(
        self,
        session_id: str,
        configs: Sequence[bytes],
        at: str | None = None,
        compaction: ForkSummary | None = None,
        adapter: SessionAdapter | Literal["parent"] | None = "parent",
    ) -> list[Session]:
        """Fork a session as it is now, or behind the item ``at``. Makes one child for each of ``configs``,
        which the journal keeps with them. ``compaction``: shorten the children's history by a summary.
        ``adapter``: the one that computes the children; None: none.

        The children share the session's past in the journal, and in the engine, too, unless their adapter is
        another one than its own. Raises ``SessionUnknown``,
        ``SessionLimit``, ``StorageUnavailable``, and what ``Session.branch`` raises.
        """
        registry = self._registry
        session, record = registry.get(session_id), registry.record_of(session_id)
        self.check(session_id, len(configs))
        registry.tenants.check(record.salt, len(configs))
        if session.log.fault is not None:
            raise session.log.fault
        history, operations = session.branch(at, compaction)
        tree = registry.trees.of(record)
        children: list[Session] = []
        own = record.adapter if adapter == "parent" else adapter
        shares = own == record.adapter
        try:
            for config in configs:
                fork = _begun_like(record, config, session.log.position())
                fork = msgspec.structs.replace(
                    fork,
                    adapter=own,
                    parent=session_id,
                    root=root_of(record),
                    tree=record.tree if record.root else fork.origin,
                )
                sequence = session.heir() if shares else None
                children.append(registry.open(fork, history, operations, sequence))
                tree.unopened.add(fork.id)
            if shares:
                await session.lend(children, history.head)
        except BaseException:  # all of them or none: no client has a handle of those that were made
            for child in children:
                await registry.discard(child.id)
            raise
        return children

    def check(self, session_id: str, children: int) -> None:
        """Raises ``SessionUnknown``, or ``SessionLimit`` if the fork tree would have too many unopened forks
        with ``children`` more."""
        there = len(self._tree_of(session_id).unopened)
        most = self._registry.settings.max_unopened
        if there + children > most:
            raise SessionLimit(
                f"This tree has {there} forks that were never opened; it may have {most}:"
                " open or prune some first"
            )

    def unopened(self, session: Session) -> bool:
        """Whether this is a fork in memory that no client has opened yet."""
        return self._registry.is_open(session) and session.id in self._tree_of(session.id).unopened

    # --- conversations that a client sends whole ------------------------------------------------------------

    async def branch_off(self, session: Session, items: int, config: bytes, *, kept: bool = True) -> Session:
        """A new session that begins with the first ``items`` items of an open one, at least one. It shares
        their operations in the journal and their KV, and begins a fork tree of its own, since another client
        may have it. ``config`` and ``kept``: as in `SessionRegistry.create`; one that the journal keeps comes
        from one that it keeps.

        Raises ``SessionLimit``, ``StorageUnavailable``, and what ``Session.branch`` raises.
        """
        registry, record = self._registry, self._registry.record_of(session.id)
        registry.tenants.check(record.salt)
        if session.log.fault is not None:
            raise session.log.fault
        history, operations = session.branch(session.history.items()[items - 1].id)
        record = _begun_like(record, config, session.log.position())
        child = registry.open(record, history, operations, session.heir(), kept=kept)
        try:
            await session.lend([child], history.head)
        except BaseException:
            await registry.discard(child.id)
            raise
        return child

    async def branch_off_stored(
        self, number: int, conversation: GivenConversation, config: bytes, *, kept: bool = True
    ) -> tuple[Session, int] | None:
        """Branch off a closed session, with this ``number`` in the journal: a new session that begins with what
        it shares with a conversation, and the number of these items. None: it shares no turn. ``config`` and
        ``kept``: as in `SessionRegistry.create`.

        Raises ``SessionLimit``, ``StorageUnavailable``, ``RecordDamaged``.
        """
        registry, salt = self._registry, conversation.salt
        journal = registry.journal
        assert journal is not None, "it has a number there"
        journal.hold(number)
        try:
            stored = await journal.read(lambda store: store.session(number))
            if stored.record.salt != salt or stored.record.id in registry.trees.pruned:
                return None
            if digest_of(stored.record.adapter) != conversation.adapter:
                return None
            registry.tenants.check(salt)
            limits = {"max_items": registry.settings.max_items, "max_events": journal.settings.max_events}
            replayed = await asyncio.to_thread(replay, stored.operations, **limits)
            history, operations = replayed.history, list[AnyOperation]()
            last = replayed.last
            if last is not None and last.ended is None and last.prepared.turn is not None:
                history.abort_turn(last.prepared.turn)  # its client did not get it whole
                operations.append(refused(last.id, None))
            history = history.branch(operations.append)
            history.drop_silent()
            shared = conversation.goes_on_in(history)
            if not shared:
                return None
            if shared < len(history):
                rewind(history, history.items()[shared - 1].id, registry.language.tokenizer)
            record = _begun_like(stored.record, config, Origin.of(number, stored.written))
            session = registry.open(record, history, [*operations, Branched()], kept=kept)
        finally:
            journal.leave(number)
        return session, shared

    # --- the fork tree --------------------------------------------------------------------------------------

    async def page(self, session_id: str, limit: int | None = None, after: str | None = None) -> Page:
        """At most ``limit`` sessions of this session's fork tree, parents before children. ``after``: begin
        behind this session; None: at the first one.

        Raises ``SessionUnknown``, ``MemberUnknown``, ``RecordDamaged``, ``StorageUnavailable``.
        """
        tree = await self._whole_tree(session_id)
        page = tree.page(limit, after)
        members = [self._sized(member) if member.id in tree.open else member for member in page.members]
        return replace(page, members=members)

    async def name(self, session_id: str, name: str) -> str:
        """Name a session within its fork tree; "" removes the name. Returns the name as it is kept. Raises
        ``NameInvalid``, and what `page` raises."""
        name = (await self._whole_tree(session_id)).checked_name(name, session_id)
        self._registry.rename(session_id, name)
        return name

    async def begin_pruning(self, session_id: str, target: str) -> int | None:
        """Begin to prune: take the session ``target`` out of the fork tree, so that no handle opens it.
        Returns its number in the journal, which `forget` takes; None without a journal. Raises
        ``MemberUnknown``, ``PruneInvalid``, and what `page` raises."""
        number = (await self._whole_tree(session_id)).check_pruned(target, session_id)
        self._registry.trees.begin_pruning(self._registry.record_of(session_id), target)
        return None if self._registry.journal is None else number

    async def forget(self, target: str, number: int | None) -> None:
        """Forget the session ``target`` after it has closed. ``number``: what `begin_pruning` returned. Its
        forks keep the operations that they share with it."""
        registry = self._registry
        try:
            await registry.wait_closed(target)  # it may still write; the drop must be its last record
            if number is not None:
                await registry.delete(number)
        finally:
            registry.trees.pruned.discard(target)

    def _sized(self, member: Member) -> Member:
        told = self._registry.get(member.id).statistics()
        return replace(member, open=True, items=int(told["items"]), tokens=int(told["tokens"]))

    def _tree_of(self, session_id: str) -> ForkTree:
        """The fork tree of an open session, as far as it is known. Raises ``SessionUnknown``."""
        return self._registry.trees.of(self._registry.record_of(session_id))

    async def _whole_tree(self, session_id: str) -> ForkTree:
        """A session's fork tree. It is read from the journal first if that was not done yet, or long ago.
        Raises what `page` raises."""
        registry, tree = self._registry, self._tree_of(session_id)
        journal = registry.journal
        if journal is None:
            return tree
        log, root = registry.get(session_id).log, root_of(registry.record_of(session_id))
        async with tree.loading:
            if tree.stale(self._clock()):
                tree.changed = set()
                log.sync()
                kept = await journal.read(lambda store: store.fork_tree(log.number))
                kept = [(number, record) for number, record in kept if root_of(record) == root]
                tree.load(kept, self._clock(), registry.trees.pruned)
        # It may have been closed meanwhile, and opened again.
        return tree if tree is self._tree_of(session_id) else await self._whole_tree(session_id)


def _begun_like(record: SessionRecord, config: bytes, origin: Origin | None) -> SessionRecord:
    """The record of a new session that begins like the one of ``record``, in a fork tree of its own."""
    return msgspec.structs.replace(
        record,
        id=new_id("sess"),
        config=config,
        origin=origin,
        name="",
        parent="",
        root="",
        tree=None,
        deleted=False,
        forked=datetime.now().astimezone().isoformat(),
    )
