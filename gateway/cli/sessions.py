"""``holdfast sessions``: the sessions of a running server, asked with an operator's key, or those of the store
of a server that does not run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TypeAlias
from urllib.parse import quote, urlencode

import anyio
import msgspec
import typer

from ...runtime.errors import SettingsInvalid
from ...runtime.kv_placement.store_admin import tend
from ...sdk.connection.transport import requested
from ...sdk.errors import ServerError
from ...sessions.errors import RecordDamaged, SessionUnknown, StoreHeld
from ...sessions.exports import at_rest
from ...sessions.journal import admin
from ...sessions.journal.records import SessionRecord
from ...sessions.journal.replay import MANY_ITEMS, Replayed, replay
from ...sessions.journal.store import JournalStore, Walk
from ..access.auth import salt_of
from ..access.tenants import Tenants
from ..operator.frames import (
    MOST,
    ForkedSession,
    ListedSession,
    SessionPage,
    ShownSession,
    damaged,
    listed,
    shown,
)
from ..operator.routes import SESSIONS
from ..realtime.exports import export_of, resource_of
from ..settings import GatewaySettings
from .store import code_of
from .terminal import in_units

WALK = 128
"""So many entries of the store are looked at before those found are read."""


class ServerSessions:
    """The sessions of the running server at ``url``. ``key``: an operator's; None: the server has no keys.
    Methods raise the errors that `run` tells."""

    def __init__(self, url: str, key: str | None) -> None:
        self._url = url
        self._key = key

    def page(self, limit: int, after: str | None, tenant: str | None) -> SessionPage:
        """At most ``limit`` of them, the latest made first. ``after``: `SessionPage.next` of the page before.
        ``tenant``: only those of the tenant with this name."""
        asked = {"limit": str(min(limit, MOST)), "after": after, "tenant": tenant}
        query = urlencode({name: value for name, value in asked.items() if value is not None})
        return msgspec.json.decode(self._ask("GET", f"?{query}"), type=SessionPage)

    def shown(self, session_id: str, items: int) -> ShownSession:
        """One of them, with its latest ``items``."""
        answer = self._ask("GET", f"{_path(session_id)}?items={items}")
        return msgspec.json.decode(answer, type=ShownSession)

    def exported(self, session_id: str) -> bytes:
        """One of them as JSON lines."""
        return self._ask("GET", f"{_path(session_id)}/export")

    def close(self, session_id: str) -> ListedSession:
        """End the connection of one, and return it as it is then."""
        return msgspec.json.decode(self._ask("POST", f"{_path(session_id)}/close"), type=ListedSession)

    def delete(self, session_id: str) -> None:
        """Delete one; nothing else is asked after that."""
        self._ask("DELETE", _path(session_id))

    def end(self) -> None:
        """Nothing is open between two requests."""

    def _ask(self, method: str, path: str) -> bytes:
        return anyio.run(requested, self._url, method, SESSIONS + path, self._key)


def _path(session_id: str) -> str:
    return f"/{quote(session_id, safe='')}"


class StoredSessions:
    """The sessions of the store in ``folder``, of all its models, while no server runs on it: it is locked
    until `end`. Its methods are those of `ServerSessions`. ``keys``: a keys file with the tenants' names; None:
    there are none. Raises ``SettingsInvalid``, ``KeysUnusable``, ``StoreUnusable``."""

    def __init__(self, folder: Path, keys: Path | None) -> None:
        if not admin.journals(folder):
            raise SettingsInvalid(f"{folder}: " + ("no store" if folder.is_dir() else "no such folder"))
        self._folder = folder
        self._names = {} if keys is None else Tenants.of(GatewaySettings(keys=keys)).names()
        self._opened = ExitStack()
        try:
            self._stores = self._opened.enter_context(admin.locked(folder))
        except StoreHeld as held:
            raise StoreHeld(f"{held.message}: ask that server, by --url instead of --store") from None

    def page(self, limit: int, after: str | None, tenant: str | None) -> SessionPage:
        """One model after the other."""
        found: list[ListedSession] = []
        model, _, cursor = self._cursor_of(after).partition(".")
        salt = None if tenant is None else salt_of(tenant)
        for at, store in list(enumerate(self._stores))[int(model) :]:
            walk = Walk((), int(cursor) if cursor else None)
            while True:
                walk = store.walk(walk.cursor, WALK, salt)
                for behind, number, record in walk.found:
                    if record is None or record.is_session:
                        found.append(self._listed(store, number, record))
                    if len(found) == limit:
                        return SessionPage(data=found, next=f"{at}.{behind}" if behind else f"{at + 1}.")
                if walk.cursor is None:
                    break
            cursor = ""
        return SessionPage(data=found)

    def shown(self, session_id: str, items: int) -> ShownSession:
        store, number, record = self._found(session_id)
        history = at_rest(_replayed(store, number))
        forks = [one for _, one in store.fork_tree(number) if one.parent == session_id]
        children = [ForkedSession(id=one.id, name=one.name) for one in forks]
        return shown(self._listed(store, number, record), history, children, items)

    def exported(self, session_id: str) -> bytes:
        store, number, record = self._found(session_id)
        replayed = _replayed(store, number)
        resource = resource_of(record, replayed.config)
        return export_of(record, at_rest(replayed), resource, store.logs.header.model)

    def close(self, session_id: str) -> ListedSession:
        """Raises ``SettingsInvalid``: none is open."""
        raise SettingsInvalid("no session of a store is open: close one at its server, by --url")

    def delete(self, session_id: str) -> None:
        """It leaves every file, and with it the KV of all, which is computed again."""
        number = self._known(session_id)[1]
        self.end()

        def chosen(store: JournalStore) -> list[int]:
            there = number in store.sessions.states and store.name_of(number) == session_id
            return [number] if there else []

        for _ in admin.erase(self._folder, chosen):
            pass
        if (self._folder / "kv").is_dir():
            for _ in tend("clear", self._folder):
                pass

    def end(self) -> None:
        self._opened.close()

    def _cursor_of(self, after: str | None) -> str:
        """Where a page begins: the number of a model's store, and behind a point a cursor of its walk."""
        if after is None:
            return "0"
        if "." in after and after.isascii() and after.replace(".", "", 1).isdecimal():
            return after
        for at, store in enumerate(self._stores):
            if (found := _searched(store, after)) is not None:
                return f"{at}.{found[0]}"
        raise SettingsInvalid(
            "--after is neither the id of a session nor what a list with --limit ended with"
        )

    def _known(self, session_id: str) -> tuple[JournalStore, int, SessionRecord | None]:
        """Where a session is, and its record; None if that is damaged."""
        for store in self._stores:
            if (found := _searched(store, session_id)) is not None:
                return store, *found[1:]
        raise SessionUnknown(f"the store has no session {session_id!r}")

    def _found(self, session_id: str) -> tuple[JournalStore, int, SessionRecord]:
        store, number, record = self._known(session_id)
        if record is None:
            raise RecordDamaged("The session's record is damaged")
        return store, number, record

    def _listed(self, store: JournalStore, number: int, record: SessionRecord | None) -> ListedSession:
        tenant = "" if record is None else self._names.get(record.salt) or record.salt.hex()
        try:
            if record is None:
                raise RecordDamaged("its record is damaged")
            history = at_rest(_replayed(store, number))
        except RecordDamaged:
            return damaged(store.name_of(number), tenant)
        return listed(record, history, tenant, "offloaded", unused_seconds=store.unused_seconds(number))


def _searched(store: JournalStore, session_id: str) -> tuple[int, int, SessionRecord | None] | None:
    """What `Walk.found` has of the session with this id; None if the store has none."""
    cursor: int | None = None
    while True:
        found, cursor = store.search(cursor, WALK, session_id)
        if found is not None or cursor is None:
            return found


def _replayed(store: JournalStore, number: int) -> Replayed:
    return replay(store.session(number).operations, max_items=MANY_ITEMS)


SessionSource: TypeAlias = ServerSessions | StoredSessions

# --- the command --------------------------------------------------------------------------------------------


def run(where: Callable[[], SessionSource], work: Callable[[SessionSource], Iterator[str]]) -> int:
    """Print the lines of ``work`` on the sessions that ``where`` opens. Returns the exit code, as `code_of`."""

    def lines() -> Iterator[str]:
        sessions = where()
        try:
            yield from work(sessions)
        finally:
            sessions.end()

    return code_of(lines)


def list_(
    sessions: SessionSource, limit: int | None, after: str | None, tenant: str | None, *, as_json: bool
) -> Iterator[str]:
    """The lines of the list. ``limit``: at most so many sessions; None: all. ``after``: where an earlier list
    has ended. ``as_json``: a JSON object for each session."""
    left, first = limit, not as_json
    while True:
        page = sessions.page(MOST if left is None else min(left, MOST), after, tenant)
        if first:
            yield _ROW.format("ID", "STATE", "TENANT", "TURNS", "TOKENS", "CREATED", "UNUSED", "KV")
            first = False
        for one in page.data:
            yield msgspec.json.encode(one).decode() if as_json else _row(one)
        after = page.next
        if left is not None:
            left -= len(page.data)
        if after is None:
            return
        if left == 0:
            print(f"holdfast: there are more: --after {page.data[-1].id}", file=sys.stderr)
            return


_ROW = "{:<29} {:<9} {:<12} {:>5} {:>8}  {:<19} {:>7}  {}"


def _row(one: ListedSession) -> str:
    created = one.created[:19].replace("T", " ")
    unused = "-" if one.unused_seconds is None else in_units(one.unused_seconds)
    return _ROW.format(
        one.id, one.state, one.tenant[:12] or "-", one.turns, one.tokens, created, unused, _tiers(one)
    ).rstrip()


def _tiers(one: ListedSession) -> str:
    if one.kv is None:
        return "-"
    counts = msgspec.structs.asdict(one.kv)
    return ", ".join(f"{tier} {count}" for tier, count in counts.items() if count) or "-"


def show(sessions: SessionSource, session_id: str, items: int, *, as_json: bool) -> Iterator[str]:
    """The lines that show one session with its latest ``items``."""
    one = sessions.shown(session_id, items)
    if as_json:
        yield msgspec.json.encode(one).decode()
        return
    facts = {
        "session": one.id,
        "name": one.name,
        "tenant": one.tenant,
        "state": one.state,
        "created": one.created,
        "unused": ""
        if one.unused_seconds is None
        else f"{in_units(one.unused_seconds)} in which a server ran",
        "forked from": one.parent or "",
        "forks": ", ".join(f"{fork.id} {fork.name}".rstrip() for fork in one.forks),
        "KV": "" if one.kv is None else _tiers(one),
        "instructions": _line(one.instructions),
        "tools": ", ".join(one.tools),
        "turns": str(one.turns),
        "tokens": str(one.tokens),
        "items": f"{one.items}, the last {len(one.latest)}:" if one.latest else str(one.items),
    }
    for name, value in facts.items():
        if value:
            yield f"{name + ':':<14}{value}"
    for item in one.latest:
        kind = item.role or item.name or item.type
        out = " (out of the context)" if item.left_out else ""
        cut = f"… ({item.characters} characters)" if item.characters > len(item.text) else ""
        yield f"  {item.id}  {kind}{out}: {_line(item.text)}{cut}"


def _line(text: str) -> str:
    """The text on one line, without control characters, which a terminal would obey."""
    return "".join(one if one.isprintable() else " " for one in text)


def export(sessions: SessionSource, session_id: str, target: Path | None) -> Iterator[str]:
    """The lines of an exported session, or, with a ``target``, one that says that they are in that new file. It
    is made before the session is asked for."""
    if target is None:
        yield sessions.exported(session_id).decode().removesuffix("\n")
        return
    try:
        file = target.open("xb")
    except FileExistsError:
        raise SettingsInvalid(f"{target} exists already: name a new file") from None
    except OSError as fault:
        raise SettingsInvalid(f"{target} cannot be written: {fault.strerror}") from None
    try:
        with file:
            target.chmod(0o600)
            file.write(data := sessions.exported(session_id))
    except BaseException as fault:
        target.unlink(missing_ok=True)
        if isinstance(fault, OSError):
            raise SettingsInvalid(f"{target} cannot be written: {fault.strerror or fault}") from None
        raise
    yield f"{session_id}: {len(data.splitlines()) - 1} entries in {target}"


def close(sessions: SessionSource, session_id: str) -> Iterator[str]:
    """End a session's connection; yields a line that says so."""
    one = sessions.close(session_id)
    yield f"{session_id}: closed, {one.state}"


def delete(sessions: SessionSource, session_id: str, *, sure: bool) -> Iterator[str]:
    """Delete a session, unless the user says no; yields a line that says so. ``sure``: do not ask."""
    if not sure:
        try:
            what = f"{sessions.shown(session_id, 0).turns} turns"
        except (RecordDamaged, ServerError) as error:
            if error.code not in (RecordDamaged.code, "session_damaged"):
                raise
            what = "which is damaged"
        if not sys.stdin.isatty():
            raise SettingsInvalid(f"to delete {session_id} without being asked, give --yes")
        typer.confirm(f"Delete {session_id}, {what}, for ever?", abort=True)
    sessions.delete(session_id)
    yield f"{session_id}: deleted"
