"""Stores of format 3: read as they are, gone on with, and rewritten by merges."""

from __future__ import annotations

import tarfile
from dataclasses import replace
from pathlib import Path

import pytest

from holdfast.sessions.conversation.items import Message
from holdfast.sessions.errors import RecordDamaged
from holdfast.sessions.journal import admin
from holdfast.sessions.journal.model_store import open_for
from holdfast.sessions.journal.records import Inserted, append
from holdfast.sessions.journal.segment import FORMAT, HEADER_BYTES, LOG_MAGIC, LOG_START, decoded_header
from holdfast.sessions.journal.store import JournalStore

from .bad_disks import PAGE
from .journal_stage import MODEL, SMALL, birth, folder

STORES = Path(__file__).parents[1] / "stores"
NUMBERS = replace(SMALL, segment_bytes=32 << 10)
COUNT = 200
OPERATIONS = 6


def word(number: int, at: int) -> str:
    """What the store's maker has put in."""
    return f"<{number}-{at}>" + "word" * (1 + (number * 7 + at * 3) % 20)


def kept() -> list[int]:
    """Sessions of that store that were not forgotten."""
    return [number for number in range(1, COUNT + 1) if number not in range(7, COUNT, 20)]


def wanted(number: int) -> list[str]:
    past = [word(number - 1, at) for at in range(4)] if number % 10 == 0 else []
    return [*past, *(word(number, at) for at in range(OPERATIONS))]


def said(store: JournalStore, number: int) -> list[str]:
    return [operation.item.text for operation in store.session(number).operations]


def laid_out(path: Path) -> None:
    """The store that a server of format 3 has left when it was killed: 200 sessions in ten logs, one of them
    made by a merge; each tenth is a fork, and each twentieth was forgotten."""
    with tarfile.open(STORES / "format_3_many.tar.xz") as tar:
        tar.extractall(path, filter="data")


def holds_all(store: JournalStore) -> None:
    assert not store.damaged() and not store.mismatches and not store.logs.findings.lines
    assert sorted(state.number for state in store.sessions.states.values() if state.kept) == kept()
    for number in kept():
        assert said(store, number) == wanted(number)
        assert store.handle(number.to_bytes(32, "big")) == (number, b"me")
    assert store.handle(b"u" * 32) == (199, b"me")


def formats(path: Path) -> set[int]:
    headers = [
        decoded_header(log.read_bytes()[:HEADER_BYTES], LOG_MAGIC) for log in path.glob("journal/*.log")
    ]
    return {header.format for header in headers if header is not None}


def test_a_store_of_format_3_is_read_gone_on_with_and_rewritten() -> None:
    with folder() as path:
        laid_out(path)
        damage: list[str] = []
        list(admin.verify(path, damage))
        assert not damage and formats(path) == {3}
        store = open_for(path, MODEL, NUMBERS)
        holds_all(store)
        assert {state.salt for state in store.sessions.states.values()} == {b"acme", b"zenith"}
        fresh = store.logs.next_session
        store.write([*birth(fresh), append(1, 6, Inserted(item=Message(id="i", role="user", text="new")))])
        for _ in range(2):
            holds = [*wanted(1), "new"]
            assert said(store, 1) == holds and store.session(fresh)
            while store.wants_merge:
                store.merge()
            assert said(store, 1) == holds and store.session(fresh)
            assert formats(path) == {FORMAT}
            store.close()
            store = open_for(path, MODEL, NUMBERS)
        for number in set(kept()) - {1}:
            assert said(store, number) == wanted(number)
        store.close()


def test_retention_counts_from_the_move_to_format_4_on() -> None:
    """The times of format 3 are those of a clock that can be wrong."""
    with folder() as path:
        laid_out(path)
        store = open_for(path, MODEL, replace(NUMBERS, max_age_seconds=3600.0))
        assert store.sweep(frozenset()) == 0
        holds_all(store)
        store.close()
        store = open_for(path, MODEL, replace(NUMBERS, max_sessions=3))
        assert store.sweep(frozenset()) == len(kept()) - 3
        left = {number for number, state in store.sessions.states.items() if state.kept}
        assert left == {196, 198, 199}, "the latest of each tenant that is no unopened fork"
        store.close()


@pytest.mark.parametrize("index", [True, False])
def test_damage_to_a_log_of_format_3_costs_the_sessions_that_have_records_there(index: bool) -> None:
    with folder() as path:
        laid_out(path)
        log = path / "journal" / "00000008.log"
        data = bytearray(log.read_bytes())
        hit = data[LOG_START + PAGE : LOG_START + 2 * PAGE]
        data[LOG_START + PAGE : LOG_START + 2 * PAGE] = bytes(PAGE)
        log.write_bytes(data)
        if not index:
            log.with_suffix(".index").unlink()
        store = open_for(path, MODEL, NUMBERS)
        lost = set()
        for number in kept():
            try:
                words = said(store, number)
                assert words == wanted(number) or (not index and words == wanted(number)[: len(words)])
            except RecordDamaged:
                lost.add(number)
        named = {number for number in range(1, COUNT + 1) if f"<{number}-".encode() in hit}
        assert lost if index else store.logs.findings.lost
        assert not index or named & set(kept()) <= lost == set(store.damaged())
        store.close()
