"""What a client removes from a conversation that goes on leaves the store's files, too."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from holdfast.sessions.forks import Forks
from holdfast.sessions.journal.records import SessionSnapshot
from holdfast.sessions.turn.request import TurnRequest
from holdfast.tests.stored_files import bytes_below

from ..session_stage import ask, prompts, read, reciting, run, say, toks
from .journal_stage import folder, registry_in
from .test_journal import left, resumed

SECRET = "The password is swordfish. "


def holds(store: Path, text: str) -> bool:
    """Whether a file has the text, or its token ids."""
    ids = b"".join(one.to_bytes(4, "little") for one in toks(text))
    data = bytes_below(store)
    return text.encode() in data or ids in data


async def gone_from(store: Path, text: str) -> None:
    while holds(store, text):
        await asyncio.to_thread(bool)


@run
@pytest.mark.parametrize("dies", [False, True], ids=["in the same server", "in the next one"])
@pytest.mark.parametrize("how", ["an item", "a reply", "all behind an item"])
async def test_what_is_removed_from_a_session_leaves_the_files(how: str, dies: bool) -> None:
    with folder() as path:
        reply = SECRET if how == "a reply" else "Thanks."
        late = 3600.0 if dies else 0.0
        async with registry_in(path, reciting("Hello.", reply), erase_seconds=late) as registry:
            session = registry.create()
            first = (await ask(session, "Hi.")).items[-1]
            item = say(session, "Well?" if how == "a reply" else SECRET)
            said = (await read(session))[1].items[-1]
            await left(session)
            assert holds(path, SECRET)
            match how:
                case "an item":
                    session.history.delete(item.id)
                case "a reply":
                    session.history.delete(said.id)
                case _:
                    session.history.rewind(first.id)
            handle, shown = await left(session), session.history.items()
            if not dies:
                await gone_from(path, SECRET)
        link = reciting("Still here.")
        async with registry_in(path, link, erase_seconds=0.0) as registry:
            await gone_from(path, SECRET)
            found = await resumed(registry, handle)
            assert found.session.history.items() == shown
            assert (await ask(found.session, "And now?")).items[0].text == "Still here."
            secret, given = toks(SECRET), prompts(link)[-1]
            assert secret not in [given[at : at + len(secret)] for at in range(len(given))]


@run
async def test_what_is_removed_while_a_response_runs_goes_when_it_has_ended() -> None:
    with folder() as path:
        async with registry_in(path, reciting("One two three."), erase_seconds=0.0) as registry:
            session = registry.create()
            item = say(session, SECRET)
            response = session.respond(TurnRequest.checked(), "resp_1")
            await anext(response)
            session.history.delete(item.id)
            await left(session)
            stored = await registry.journal.read(lambda store: store.session(session.log.number))
            assert not isinstance(stored.operations[0], SessionSnapshot), "it would lose the response"
            async for _ in response:
                pass
            await gone_from(path, SECRET)


@run
async def test_a_fork_made_before_keeps_what_the_other_session_removes() -> None:
    with folder() as path:
        async with registry_in(path, reciting("Thanks.", "Fine."), erase_seconds=0.0) as registry:
            session = registry.create()
            item = say(session, SECRET)
            await read(session)
            (child,) = await Forks(registry).fork(session.id, [b""])
            session.history.delete(item.id)
            handle, forks = await left(session), await left(child)
        async with registry_in(path, reciting(), erase_seconds=0.0) as registry:
            found = await resumed(registry, forks)
            assert found.session.history.items()[0].text == SECRET
            number = found.session.log.number
            await registry.close(found.session.id)
            registry.journal.delete(number)
            await gone_from(path, SECRET)
            assert [one.text for one in (await resumed(registry, handle)).session.history.items()] == [
                "Thanks."
            ]


@run
async def test_a_session_of_which_no_client_was_told_leaves_the_files() -> None:
    """Its first turn failed: no client could ever delete it."""
    with folder() as path:
        async with registry_in(path, reciting(), erase_seconds=0.0) as registry:
            session = registry.create()
            say(session, SECRET)
            await session.log.sync()
            assert holds(path, SECRET)
            await registry.discard(session.id)
            await gone_from(path, SECRET)


@run
@pytest.mark.parametrize("dies", [False, True], ids=["in the same server", "in the next one"])
@pytest.mark.parametrize("how", ["the item", "the session"])
async def test_a_fork_keeps_nothing_that_came_after_it(how: str, dies: bool) -> None:
    with folder() as path:
        late = 3600.0 if dies else 0.0
        async with registry_in(path, reciting("Hello.", "Thanks."), erase_seconds=late) as registry:
            session = registry.create()
            await ask(session, "Hi.")
            (child,) = await Forks(registry).fork(session.id, [b""])
            (grandchild,) = await Forks(registry).fork(child.id, [b""])
            item = say(session, SECRET)
            await read(session)
            number, shown = session.log.number, child.history.items()
            if how == "the item":
                session.history.delete(item.id)
            handles = [await left(one) for one in (session, child, grandchild)]
            if how == "the session":
                await registry.close(session.id)
                registry.journal.delete(number)
            if not dies:
                await gone_from(path, SECRET)
        async with registry_in(path, reciting(), erase_seconds=0.0) as registry:
            await gone_from(path, SECRET)
        async with registry_in(path, reciting("Still here."), erase_seconds=0.0) as registry:
            first, *forks = handles
            found = [await resumed(registry, handle) for handle in forks]
            assert [one.session.history.items() for one in found] == [shown, shown]
            assert (await ask(found[1].session, "And now?")).items[0].text == "Still here."
            tree = await Forks(registry).page(found[1].session.id)
            parents = [session.id] if how == "the item" else []
            assert [one.id for one in tree.members] == [*parents, child.id, grandchild.id]
            if how == "the item":
                kept = (await resumed(registry, first)).session.history.items()
                assert [one.text for one in kept] == [*(one.text for one in shown), "Thanks."]
