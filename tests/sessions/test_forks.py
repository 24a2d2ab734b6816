"""Forks: made with one verb; their tree listed, named and pruned, in memory and in the journal."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from holdfast.sessions.errors import HandleUnknown, MemberUnknown, NameInvalid, PruneInvalid, SessionUnknown
from holdfast.sessions.fork_trees import FRESH_SECONDS, MAX_NAME, Member
from holdfast.sessions.forks import Forks
from holdfast.sessions.journal.journal import Journal
from holdfast.sessions.journal.records import drop
from holdfast.sessions.registry import Reopened, SessionRegistry
from holdfast.sessions.session import Session

from .journal.journal_stage import MODEL, SMALL, folder, registry_in, store_in
from .session_stage import LANGUAGE, ask, reciting, run


def tokens(session: Session) -> list[int]:
    head = session.history.head
    return [] if head is None else head.tokens().tolist()


def shape(members: Sequence[Member]) -> list[tuple[str, str | None, str]]:
    return [(member.id, member.parent, member.name) for member in members]


async def grown(registry: SessionRegistry) -> list[Session]:
    """A session, two forks of it, and a fork of the first of these."""
    first = registry.create(owner=b"me")
    await ask(first, "a")
    left, right = await Forks(registry).fork(first.id, [b"", b""])
    await ask(left, "b")
    (leaf,) = await Forks(registry).fork(left.id, [b""])
    return [first, left, right, leaf]


async def prune(registry: SessionRegistry, asking: Session, target: str) -> None:
    """As the registry does it."""
    opened = {member.id for member in (await Forks(registry).page(asking.id)).members if member.open}
    number = await Forks(registry).begin_pruning(asking.id, target)
    if target in opened:
        await registry.close(target)
    await Forks(registry).forget(target, number)


@run
async def test_a_tree_is_listed_parents_first_with_names_and_sizes() -> None:
    registry = SessionRegistry(reciting("one", "two"), LANGUAGE)
    first, left, right, leaf = await grown(registry)
    stranger = registry.create(owner=b"me")
    await Forks(registry).name(left.id, "left")
    for asked in (first, leaf):
        members = (await Forks(registry).page(asked.id)).members
        assert shape(members) == [
            (first.id, None, ""),
            (left.id, first.id, "left"),
            (right.id, first.id, ""),
            (leaf.id, left.id, ""),
        ]
        assert [member.items for member in members] == [2, 4, 2, 4]
        assert all(member.open and member.tokens for member in members)
    assert [member.id for member in (await Forks(registry).page(stranger.id)).members] == [stranger.id]


@run
async def test_what_cannot_be_is_refused_and_changes_nothing() -> None:
    registry = SessionRegistry(reciting("one", "two"), LANGUAGE)
    first, left, right, _ = await grown(registry)
    stranger = registry.create(owner=b"me")
    await Forks(registry).name(left.id, "left")
    before = shape((await Forks(registry).page(first.id)).members)
    for name in ("left", "x" * (MAX_NAME + 1)):
        with pytest.raises(NameInvalid):
            await Forks(registry).name(right.id, name)
    for target in (stranger.id, "sess_none"):
        with pytest.raises(MemberUnknown):
            await Forks(registry).begin_pruning(first.id, target)
    with pytest.raises(PruneInvalid):
        await Forks(registry).begin_pruning(first.id, first.id)
    assert shape((await Forks(registry).page(first.id)).members) == before
    await Forks(registry).name(left.id, "left")
    await Forks(registry).name(left.id, "")
    await Forks(registry).name(right.id, "left")
    with pytest.raises(SessionUnknown):
        await Forks(registry).page("sess_none")


@run
async def test_a_tree_costs_nothing_for_the_sessions_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = SessionRegistry(reciting("one", "two"), LANGUAGE)
    first, *_ = await grown(registry)
    strangers = {id(registry.create(owner=b"me")) for _ in range(3)}
    statistics = Session.statistics

    def told(session: Session) -> dict[str, float]:
        assert id(session) not in strangers
        return statistics(session)

    monkeypatch.setattr(Session, "statistics", told)
    assert len((await Forks(registry).page(first.id)).members) == 4


@run
async def test_names_that_are_the_same_text_are_the_same_name() -> None:
    """One letter, or a letter and the accent that is put on it: people see the same."""
    registry = SessionRegistry(reciting("one", "two"), LANGUAGE)
    first, left, right, _ = await grown(registry)
    composed, taken_apart = "caf\N{LATIN SMALL LETTER E WITH ACUTE}", "cafe\N{COMBINING ACUTE ACCENT}"
    assert await Forks(registry).name(left.id, taken_apart) == composed
    assert [member.name for member in (await Forks(registry).page(first.id)).members] == [
        "",
        composed,
        "",
        "",
    ]
    for name in (composed, taken_apart):
        with pytest.raises(NameInvalid):
            await Forks(registry).name(right.id, name)
    assert await Forks(registry).name(right.id, "e\N{COMBINING ACUTE ACCENT}" * MAX_NAME)
    with pytest.raises(NameInvalid):  # one that takes more characters in this form
        await Forks(registry).name(right.id, "\N{MUSICAL SYMBOL HALF NOTE}" * MAX_NAME)


@run
async def test_a_pruned_branch_leaves_its_children_where_they_were() -> None:
    registry = SessionRegistry(reciting("one", "two", "three"), LANGUAGE)
    first, left, right, leaf = await grown(registry)
    await prune(registry, first, left.id)
    assert shape((await Forks(registry).page(first.id)).members) == [
        (first.id, None, ""),
        (right.id, first.id, ""),
        (leaf.id, left.id, ""),
    ]
    await ask(leaf, "c")
    assert [item.text for item in leaf.history.items()] == ["a", "one", "b", "two", "c", "three"]


@run
async def test_a_session_that_is_being_pruned_is_in_the_tree_no_more() -> None:
    with folder() as path:
        async with registry_in(path, reciting("one", "two")) as registry:
            first, left, right, leaf = await grown(registry)
            handle = right.handles.current
            await registry.close(right.id)
            number = await Forks(registry).begin_pruning(first.id, right.id)
            assert number is not None
            with pytest.raises(MemberUnknown):
                await Forks(registry).begin_pruning(left.id, right.id)
            with pytest.raises(HandleUnknown):
                await registry.resume(handle, b"me")
            assert [member.id for member in (await Forks(registry).page(left.id)).members] == [
                first.id,
                left.id,
                leaf.id,
            ]
            await Forks(registry).forget(right.id, number)
            with pytest.raises(MemberUnknown):
                await Forks(registry).begin_pruning(left.id, right.id)


@run
async def test_of_two_requests_at_once_one_prunes() -> None:
    with folder() as path:
        async with registry_in(path, reciting("one", "two")) as registry:
            first, left, right, _ = await grown(registry)
            asked = (Forks(registry).begin_pruning(one.id, right.id) for one in (first, left))
            one, other = await asyncio.gather(*asked, return_exceptions=True)
            assert isinstance(one, int) and isinstance(other, MemberUnknown)


@run
async def test_names_and_prunings_outlive_the_server() -> None:
    with folder() as path:
        async with registry_in(path, reciting("one", "two")) as registry:
            first, left, right, leaf = await grown(registry)
            await Forks(registry).name(left.id, "left")
            await Forks(registry).name(leaf.id, "leaf")
            await prune(registry, first, right.id)
            handles = {one.id: one.handles.current for one in (first, left, right, leaf)}
        async with registry_in(path, reciting("three")) as registry:
            with pytest.raises(HandleUnknown):
                await registry.resume(handles[right.id], b"me")
            again = await registry.resume(handles[leaf.id], b"me")
            assert isinstance(again, Reopened)
            members = (await Forks(registry).page(leaf.id)).members
            assert shape(members) == [
                (first.id, None, ""),
                (left.id, first.id, "left"),
                (leaf.id, left.id, "leaf"),
            ]
            assert [member.open for member in members] == [False, False, True]
            await prune(registry, again.session, left.id)
            await prune(registry, again.session, first.id)
            assert shape((await Forks(registry).page(leaf.id)).members) == [(leaf.id, left.id, "leaf")]
            await ask(again.session, "c")
            assert [item.text for item in again.session.history.items()][-2:] == ["c", "three"]
            kept, number = again.session.handles.current, again.session.log.number
        with store_in(path) as store:
            assert len(store.fork_tree(number)) == 1
        async with registry_in(path, reciting()) as registry:
            again = await registry.resume(kept, b"me")
            assert isinstance(again, Reopened)
            assert [item.text for item in again.session.history.items()][:4] == ["a", "one", "b", "two"]


@run
async def test_a_name_does_not_disturb_what_the_journal_counts() -> None:
    with folder() as path:
        async with registry_in(path, reciting("one", "two")) as registry:
            session = registry.create(owner=b"me")
            await ask(session, "a")
            await Forks(registry).name(session.id, "mine")
            await ask(session, "b")
            handle = session.handles.current
        async with registry_in(path, reciting()) as registry:
            again = await registry.resume(handle, b"me")
            assert isinstance(again, Reopened)
            assert [item.text for item in again.session.history.items()] == ["a", "one", "b", "two"]


@run
async def test_a_session_pruned_while_it_closes_leaves_nothing_behind_its_end() -> None:
    with folder() as path:
        async with registry_in(path, reciting("one", "two")) as registry:
            first, left, _, _ = await grown(registry)
            number = await Forks(registry).begin_pruning(first.id, left.id)
            opened, order = asyncio.Event(), list[str]()

            async def settle() -> None:
                await opened.wait()
                order.append("closed")

            async def forget() -> None:
                await Forks(registry).forget(left.id, number)
                order.append("forgotten")

            closing = asyncio.create_task(registry.close(left.id, leave_readers=settle))
            await asyncio.sleep(0)
            forgetting = asyncio.create_task(forget())
            for _ in range(9):
                await asyncio.sleep(0)
            opened.set()
            await asyncio.gather(closing, forgetting)
            assert order == ["closed", "forgotten"]


async def pages(registry: SessionRegistry, session: Session, limit: int) -> list[list[str]]:
    found, after = [], None
    while True:
        page = await Forks(registry).page(session.id, limit, after)
        found.append([member.id for member in page.members])
        after = page.after
        if after is None:
            return found


@pytest.mark.parametrize("kept", [False, True])
@run
async def test_a_tree_is_told_in_pages_that_cost_what_they_hold(
    kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with folder() as path:
        journal = await Journal.open(path, MODEL, SMALL) if kept else None
        registry = SessionRegistry(reciting("one", "two"), LANGUAGE, journal=journal)
        first, left, right, leaf = await grown(registry)
        forks = await Forks(registry).fork(right.id, [b""] * 46)
        for fork in forks[:20] if kept else ():
            await registry.close(fork.id)
        whole = [one.id for one in (first, left, right, leaf, *forks)]
        assert await pages(registry, leaf, 7) == [whole[at : at + 7] for at in range(0, 50, 7)]
        assert await pages(registry, first, 50) == await pages(registry, first, 99) == [whole]
        told, reads = list[Session](), list[object]()
        statistics, read = Session.statistics, Journal.read
        monkeypatch.setattr(Session, "statistics", lambda one: told.append(one) or statistics(one))
        monkeypatch.setattr(Journal, "read", lambda one, job: reads.append(job) or read(one, job))
        page = await Forks(registry).page(first.id, 5, whole[10])
        assert [member.id for member in page.members] == whole[11:16] and page.after == whole[15]
        assert len(told) <= 5 and not reads, "no work for what is not on the page"
        await registry.aclose()
        if journal is not None:
            await journal.aclose()


@run
async def test_a_page_goes_on_where_the_one_before_ended_though_that_session_is_pruned() -> None:
    registry = SessionRegistry(reciting("one", "two"), LANGUAGE)
    first, left, right, leaf = await grown(registry)
    page = await Forks(registry).page(first.id, 2)
    assert page.after == left.id
    await prune(registry, first, left.id)
    (fork,) = await Forks(registry).fork(first.id, [b""])
    rest = await Forks(registry).page(first.id, 9, page.after)
    assert [member.id for member in rest.members] == [right.id, leaf.id, fork.id] and rest.after is None
    with pytest.raises(MemberUnknown) as unknown:
        await Forks(registry).page(first.id, 9, "sess_none")
    assert unknown.value.param == "after"


@run
async def test_what_retention_forgot_leaves_the_tree_and_its_name_is_free() -> None:
    now = 0.0
    with folder() as path:
        async with registry_in(path, reciting("one", "two")) as registry:
            forks = Forks(registry, clock=lambda: now)
            first, left, right, leaf = await grown(registry)
            await forks.name(left.id, "left")
            await registry.close(left.id)
            assert len((await forks.page(first.id)).members) == 4
            with pytest.raises(NameInvalid):
                await forks.name(right.id, "left")
            assert registry.journal is not None
            registry.journal.put([drop(left.log.number)])
            now += FRESH_SECONDS + 1
            assert [member.id for member in (await forks.page(first.id)).members] == [
                first.id,
                right.id,
                leaf.id,
            ]
            await forks.name(right.id, "left")


@run
async def test_a_tree_that_grows_while_the_journal_is_asked_is_whole() -> None:
    with folder() as path:
        async with registry_in(path, reciting("one", "two")) as registry:
            first, left, right, leaf = await grown(registry)
            listing = asyncio.ensure_future(Forks(registry).page(first.id))
            await asyncio.sleep(0)
            (late,) = await Forks(registry).fork(first.id, [b""])
            await registry.close(late.id)
            await Forks(registry).begin_pruning(first.id, right.id)
            await listing
            found = [member.id for member in (await Forks(registry).page(first.id)).members]
            assert found == [first.id, left.id, leaf.id, late.id]


@run
async def test_a_fork_is_one_verb_and_sends_nothing_down_twice() -> None:
    link = reciting("one two three four five six seven", "left", "right")
    registry = SessionRegistry(link, LANGUAGE)
    session = registry.create()
    await ask(session, "count")
    link.log.clear()
    children = await Forks(registry).fork(session.id, [b""] * 3)
    assert [verb[0] for verb in link.log] == ["fork"]
    assert len(link.held) == 4
    whole = tokens(session)
    for child in children[:2]:
        link.log.clear()
        await ask(child, "and?")
        assert [verb[0] for verb in link.log] == ["extend", "generate"], "what is shared is not sent again"
        assert tokens(child)[: len(whole)] == whole
