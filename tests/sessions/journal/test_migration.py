"""Stores of earlier formats, an LMDB file each: they are moved into logs, whether they are whole or damaged."""

from __future__ import annotations

import json
import lzma
import os
import shutil
from pathlib import Path
from random import Random

import pytest

from holdfast.sessions.errors import RecordDamaged, StoreForeign, StoreNewer
from holdfast.sessions.journal import legacy
from holdfast.sessions.journal.legacy import KEPT, UNREADABLE, migrate
from holdfast.sessions.journal.model_store import open_for
from holdfast.sessions.journal.store import JournalStore

from .bad_disks import PAGE
from .journal_stage import MODEL, SMALL, folder, store_in

STORES = Path(__file__).parents[1] / "stores"
COUNT = 200
OPERATIONS = 6


def laid_out(path: Path, name: str = "format_2_many") -> Path:
    """The store ``name``, as the server of its day has left it."""
    file = path / "data.mdb"
    file.write_bytes(lzma.decompress((STORES / f"{name}.mdb.xz").read_bytes()))
    return file


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


def test_a_whole_store_is_moved_and_kept_aside(caplog: pytest.LogCaptureFixture) -> None:
    with folder() as path:
        laid_out(path)
        with_times = open_for(path, MODEL, SMALL)
        for number in kept():
            assert said(with_times, number) == wanted(number)
            found = with_times.handle(number.to_bytes(32, "big"))
            assert found == (number, b"me")
        assert sorted(state.number for state in with_times.sessions.states.values() if state.kept) == kept()
        assert not with_times.damaged()
        used = [state.used for _, state in sorted(with_times.sessions.states.items())]
        assert used == sorted(used) and len(set(used)) == len(used), "in the order of their last use"
        assert used[-1] < COUNT, "their age counts from the move on"
        assert {state.salt for state in with_times.sessions.states.values()} == {b"acme", b"zenith"}
        with_times.close()
        assert (path / KEPT).exists() and not (path / "data.mdb").exists()
        assert any(KEPT in line and str(len(kept())) in line for line in caplog.messages)
        caplog.clear()
        with store_in(path) as store:
            assert said(store, 1) == wanted(1)
        assert not caplog.messages


def test_a_move_that_was_cut_off_is_made_again() -> None:
    with folder() as path:
        laid_out(path)
        (path / "journal.new").mkdir()
        (path / "journal.new" / "00000001.log").write_bytes(b"half of it")
        assert migrate(path, MODEL, SMALL)
        with store_in(path) as store:
            assert said(store, 1) == wanted(1)
        laid_out(path)  # and one that was done, but for the old file's new name
        assert not migrate(path, MODEL, SMALL)
        assert not (path / "data.mdb").exists()


def test_a_move_that_was_cut_off_beside_the_identity_of_a_journal_of_before_says_nothing_false(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with folder() as path:
        open_for(path, MODEL, SMALL).close()
        shutil.rmtree(path / "journal")
        old = laid_out(path)

        rename = os.rename

        def die(old: Path, new: Path) -> None:
            if new.name == KEPT:
                raise KeyboardInterrupt
            rename(old, new)

        with monkeypatch.context() as dying:
            dying.setattr(os, "rename", die)
            with pytest.raises(KeyboardInterrupt):
                open_for(path, MODEL, SMALL)
        assert old.exists() and (path / "journal").exists()
        store = open_for(path, MODEL, SMALL)
        assert said(store, 1) == wanted(1) and not old.exists()
        assert not any("earlier version" in line for line in store.mismatches)
        store.close()


def test_another_models_and_a_later_ones_file_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    with folder() as path:
        before = laid_out(path).read_bytes()
        with pytest.raises(StoreForeign):
            migrate(path, b"another", SMALL)
        monkeypatch.setattr(legacy, "FORMATS", (1,))
        with pytest.raises(StoreNewer, match="format 2"):
            migrate(path, MODEL, SMALL)
        assert (path / "data.mdb").read_bytes() == before and not (path / "journal").exists()


@pytest.mark.parametrize("seed", range(6))
def test_a_zeroed_page_costs_what_stood_there_and_the_server_starts(
    seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The file of a server of before: LMDB ends whatever process meets the page."""
    rng = Random(seed)
    with folder() as path:
        file = laid_out(path)
        data = bytearray(file.read_bytes())
        hit = leaf_with_words(data, rng)
        lost = {number for number in range(1, COUNT + 1) if f"<{number}-".encode() in data[hit : hit + PAGE]}
        data[hit : hit + PAGE] = bytes(PAGE)
        file.write_bytes(data)
        store = open_for(path, MODEL, SMALL)
        lost |= {number for number in kept() if number % 10 == 0 and number - 1 in lost}
        for number in kept():
            try:
                assert said(store, number) == wanted(number)
            except RecordDamaged:
                assert number in lost
        damaged = set(store.damaged())
        assert damaged <= lost and damaged, "and they are named"
        assert any("sess_" in line and "is damaged" in line for line in caplog.messages)
        store.close()
        with store_in(path) as again:
            assert set(again.damaged()) == damaged, "also after a restart"


def leaf_with_words(data: bytes, rng: Random) -> int:
    """A page with operations that the tree leads to: LMDB keeps old copies of others."""
    pages: dict[int, set[str]] = {}
    for number in kept():
        for at in range(OPERATIONS):
            text = word(number, at)
            copies = [
                found for found in range(0, len(data), PAGE) if text.encode() in data[found : found + PAGE]
            ]
            if len(copies) == 1:
                pages.setdefault(copies[0], set()).add(text)
    return rng.choice(sorted(pages))


def test_a_file_that_was_cut_short_gives_what_it_has(caplog: pytest.LogCaptureFixture) -> None:
    with folder() as path:
        file = laid_out(path)
        data = file.read_bytes()
        file.write_bytes(data[: len(data) // 2])
        store = open_for(path, MODEL, SMALL)
        right = 0
        for number in kept():
            try:
                right += said(store, number) == wanted(number)
            except RecordDamaged:
                continue
        whole = {state.number for state in store.sessions.states.values() if state.kept} - set(
            store.damaged()
        )
        assert right == len(whole)
        store.write([])
        store.close()
        assert any("damaged" in line or "cannot be read" in line for line in caplog.messages)


def test_a_file_of_which_nothing_can_be_read_is_put_aside_and_the_server_starts(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with folder() as path:
        (path / "data.mdb").write_bytes(b"\xff" * 20_000)
        store = open_for(path, MODEL, SMALL)
        assert not store.sessions.states
        store.close()
        assert (path / UNREADABLE).exists() and "cannot be read" in caplog.text


def test_the_stores_that_are_kept_are_those_of_their_days() -> None:
    told = json.loads((STORES / "format_2.json").read_text())
    assert {"text", "tools", "fork", "rewind", "cut", "condensed", "other_tenant"} <= set(told)
    with folder() as path:
        shutil.copy(STORES / "format_1" / "data.mdb", path)
        assert migrate(path, MODEL, SMALL)
