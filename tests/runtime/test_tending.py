"""``holdfast store`` on a store that is not what it was: one line, and nothing is dropped by guesswork."""

from __future__ import annotations

from pathlib import Path

import pytest
from xxhash import xxh3_64_intdigest

from holdfast.kvstore.shelf.places import FILE
from holdfast.kvstore.shelf.store import Given, RecordStore
from holdfast.kvstore.shelf.upkeep import write_about
from holdfast.runtime.errors import SettingsInvalid
from holdfast.runtime.tending import tend

SPACE = bytes(range(16))
SIZE = 5000


def records(store: Path) -> Path:
    """A folder with one record."""
    folder = store / "kv" / SPACE.hex()
    kept = RecordStore(folder, SPACE, SIZE, 1 << 20)
    payload = bytes(SIZE)
    kept.put([Given(bytes(16), 4, xxh3_64_intdigest(payload), memoryview(payload))])
    kept.close()
    write_about(folder, SIZE)
    return folder


@pytest.mark.parametrize("act", ["stat", "verify", "gc"])
@pytest.mark.parametrize(
    "about", ["", "[]", "{}", '{"block_bytes": null}', '{"block_bytes": "x"}', "[" * 9999]
)
def test_what_cannot_be_known_is_said_and_nothing_dropped(tmp_path: Path, act: str, about: str) -> None:
    folder = records(tmp_path)
    (folder / "about.json").write_text(about)
    with pytest.raises(SettingsInvalid, match=r"about.json cannot be read: .* clear"):
        list(tend(act, tmp_path))
    write_about(folder, SIZE)
    first, *_ = tend(act, tmp_path)
    assert " 1 records" in first
    (folder / "about.json").write_text(about)
    assert list(tend("clear", tmp_path)) == ["1 kinds of records removed"]


def test_a_folder_of_nothing_but_damage_is_tidied_away(tmp_path: Path) -> None:
    folder = records(tmp_path)
    file = folder / FILE
    whole = bytearray(file.read_bytes())
    at = whole.index(bytes(SIZE))
    whole[at + 7] ^= 1
    file.write_bytes(whole)
    first, *_ = tend("gc", tmp_path)
    assert " 0 records" in first and "1 damaged and dropped" in first
    assert not folder.exists()
