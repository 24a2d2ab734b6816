"""Servers on one store with locks that keep none out, in any order: what one of them has acknowledged is there,
and nothing that was written by another one stands there instead."""

from __future__ import annotations

import fcntl
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from dataclasses import replace as changed
from functools import partial
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from holdfast.sessions.errors import RecordDamaged, StorageUnavailable, StoreUnusable
from holdfast.sessions.journal import model_store
from holdfast.sessions.journal import store as store_module
from holdfast.sessions.journal.folder import Disk
from holdfast.sessions.journal.lock import StoreLock
from holdfast.sessions.journal.model_store import open_for
from holdfast.sessions.journal.records import EventReceived, append, drop
from holdfast.sessions.journal.segment import Fresh
from holdfast.sessions.journal.store import JournalStore

from .bad_disks import killed
from .journal_stage import MODEL, SMALL, birth, folder

NUMBERS = changed(SMALL, segment_bytes=16 << 10)
MOST = 3


class Interrupting(Disk):
    """A disk on which something else happens, once, before or after a call: ``meanwhile`` is done at the
    ``at``-th call from now on."""

    def __init__(self) -> None:
        self.at = -1
        self.meanwhile: Callable[[], None] | None = None

    def _step(self) -> None:
        self.at -= 1
        if self.at == 0 and (meanwhile := self.meanwhile) is not None:
            self.meanwhile = None
            meanwhile()

    def create(self, path: Path) -> int:
        self._step()
        return super().create(path)

    def write(self, fd: int, data: bytes, offset: int) -> None:
        self._step()
        super().write(fd, data, offset)

    def sync(self, fd: int) -> None:
        self._step()
        super().sync(fd)
        self._step()

    def rename_new(self, old: Path, new: Path) -> None:
        self._step()
        super().rename_new(old, new)
        self._step()

    def remove(self, path: Path) -> None:
        self._step()
        super().remove(path)


@dataclass(repr=False)
class Server:
    """A server, and what it knows of each session: the texts."""

    lock: StoreLock
    store: JournalStore
    disk: Interrupting
    knows: dict[int, list[str]] = field(default_factory=dict)


class Servers(RuleBasedStateMachine):
    """``held``: what was acknowledged last of each session; ``tried``: what may have been written beyond that
    before a server read the store; ``gone``: sessions that were forgotten."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = ExitStack()
        patch = self.stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(fcntl, "flock", lambda fd, how: None)
        patch.setattr(store_module, "DEAD_SHARE", -1.0)  # any log is rewritten
        patch.setattr(store_module, "MOST_VICTIMS", 3)
        self.path = self.stack.enter_context(folder())
        self.servers: list[Server] = []
        self.held: dict[int, list[str]] = {}
        self.tried: dict[int, list[list[str] | None]] = {}
        self.words = 0

    def teardown(self) -> None:
        for server in self.servers:
            server.store.close()
            server.lock.release()
        self.stack.close()

    # --- what happens ---------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.servers) < MOST)
    @rule()
    def start(self) -> None:
        """A server takes the store from those that have it."""
        lock, disk = StoreLock(self.path).acquire(0.0), Interrupting()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(model_store, "JournalStore", partial(JournalStore, disk=disk))
            try:
                store = open_for(self.path, MODEL, NUMBERS, lock.lost)
            except StoreUnusable:  # another one begins at the same time
                lock.release()
                return
        assert not store.mismatches and not store.damaged() and not store.logs.findings.lines
        server = Server(lock, store, disk)
        for number, state in store.sessions.states.items():
            if state.kept:
                server.knows[number] = [one.event for one in store.session(number).operations]
        for number in {*server.knows, *self.held, *self.tried}:
            found = server.knows.get(number)
            assert found in [self.held.get(number), *self.tried.get(number, [])]
        self.held, self.tried = {number: list(words) for number, words in server.knows.items()}, {}
        self.servers.append(server)

    @precondition(lambda self: self.servers)
    @rule(data=st.data())
    def write(self, data: st.DataObject) -> None:
        self.written(self.one_of_them(data), data)

    @precondition(lambda self: 0 < len(self.servers) < MOST)
    @rule(data=st.data(), at=st.integers(1, 6))
    def write_while_another_starts(self, data: st.DataObject, at: int) -> None:
        server = self.one_of_them(data)
        server.disk.at, server.disk.meanwhile = at, self.start
        self.written(server, data)
        server.disk.meanwhile = None

    @precondition(lambda self: self.servers)
    @rule(data=st.data(), steps=st.integers(1, 4))
    def merge(self, data: st.DataObject, steps: int) -> None:
        self.merged(self.one_of_them(data), steps)

    @precondition(lambda self: 0 < len(self.servers) < MOST)
    @rule(data=st.data(), at=st.integers(1, 12))
    def merge_while_another_starts(self, data: st.DataObject, at: int) -> None:
        server = self.one_of_them(data)
        server.disk.at, server.disk.meanwhile = at, self.start
        self.merged(server, 4)
        server.disk.meanwhile = None

    @precondition(lambda self: self.servers)
    @rule(data=st.data())
    def note(self, data: st.DataObject) -> None:
        self.one_of_them(data).store.note()

    @precondition(lambda self: self.servers)
    @rule(data=st.data(), clean=st.booleans())
    def end(self, data: st.DataObject, clean: bool) -> None:
        server = self.one_of_them(data)
        self.servers.remove(server)
        server.store.close() if clean else killed(server.store)
        server.lock.release()

    # --- inside ---------------------------------------------------------------------------------------------

    def one_of_them(self, data: st.DataObject) -> Server:
        return data.draw(st.sampled_from(self.servers))

    def written(self, server: Server, data: st.DataObject) -> None:
        group, number, words = self.drawn(server, data)
        before = server.knows.get(number)
        self.tried.setdefault(number, []).append(words)
        try:
            server.store.write(group)
        except StorageUnavailable:
            return
        if server is self.servers[-1]:
            assert self.held.get(number) == before, "no other server has written to it"
            self.tried[number].remove(words)
        else:  # one that has begun since then has read it
            assert self.held.get(number) == words
        if words is None:
            self.held.pop(number, None)
            del server.knows[number]
        else:
            self.held[number] = words
            server.knows[number] = list(words)

    def drawn(self, server: Server, data: st.DataObject) -> tuple[list[Fresh], int, list[str] | None]:
        self.words += 1
        text = f"<{self.words}>" * data.draw(st.sampled_from([1, 400]))
        known = data.draw(st.sampled_from([0, *server.knows]))
        if not known:
            number = server.store.logs.next_session
            return [*birth(number), append(number, 0, EventReceived(event=text))], number, [text]
        if data.draw(st.integers(0, 5)) == 0:
            return [drop(known)], known, None
        index = server.store.sessions.states[known].count
        return [append(known, index, EventReceived(event=text))], known, [*server.knows[known], text]

    def merged(self, server: Server, steps: int) -> None:
        with suppress(StorageUnavailable, RecordDamaged):
            server.store.logs.roll()
            for _ in range(steps):
                while server.store.merge():
                    pass


TestServers = Servers.TestCase
TestServers.settings = settings(max_examples=settings().max_examples, stateful_step_count=30)
