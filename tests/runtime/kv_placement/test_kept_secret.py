"""The store's secret: made once, whole or not at all, and only read from then on."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.runtime.errors import SettingsInvalid
from holdfast.runtime.kv_placement.tier_setup import with_secret
from holdfast.runtime.settings import SECRET_BYTES, EngineSettings


def secret_in(store: Path) -> bytes:
    return with_secret(EngineSettings(model="pocket", store=str(store))).secret


def test_each_start_finds_the_first_ones(tmp_path: Path) -> None:
    first = secret_in(tmp_path)
    assert len(first) == SECRET_BYTES and secret_in(tmp_path) == first
    assert [path.name for path in (tmp_path / "kv").iterdir()] == ["secret"]


def test_a_full_disk_does_not_keep_it_from_being_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = secret_in(tmp_path)

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "open", full)
    assert secret_in(tmp_path) == first
    with pytest.raises(SettingsInvalid, match=r"secret.* no space is left on its disk"):
        secret_in(tmp_path / "another")


def spoil_short(path: Path) -> None:
    path.write_bytes(b"abc")


def spoil_long(path: Path) -> None:
    path.write_bytes(bytes(4096))


def spoil_by_folder(path: Path) -> None:
    path.unlink()
    (path / "inside").mkdir(parents=True)


def spoil_by_link(path: Path) -> None:
    path.unlink()
    path.symlink_to(path)


SPOILS = [spoil_short, spoil_long, spoil_by_folder, spoil_by_link]


@pytest.mark.parametrize("spoil", SPOILS)
def test_a_damaged_secret_costs_the_kv_and_not_the_start(
    tmp_path: Path, spoil: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    first = secret_in(tmp_path)
    path = tmp_path / "kv" / "secret"
    named = tmp_path / "kv" / "0123"
    named.mkdir()
    (named / "data.mdb").write_bytes(b"what nothing finds any more")
    spoil(path)
    fresh = secret_in(tmp_path)
    assert len(fresh) == SECRET_BYTES and fresh != first
    assert secret_in(tmp_path) == fresh, "and it stays"
    (said,) = [record.message for record in caplog.records]
    assert str(path) in said and "KV begins anew" in said
    assert not named.exists()


def test_a_damaged_secret_on_a_full_disk_is_replaced_until_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    secret_in(tmp_path)
    (tmp_path / "kv" / "secret").write_bytes(b"")

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "link", full)
    assert len(secret_in(tmp_path)) == SECRET_BYTES
    assert "no space is left" in caplog.text and "holds 0 bytes" in caplog.text
