"""The store's secret: made once, whole or not at all, and only read from then on."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from holdfast.runtime.errors import SettingsInvalid
from holdfast.runtime.hosting import with_secret
from holdfast.runtime.settings import SECRET_BYTES, EngineSettings


def secret_in(store: Path) -> bytes:
    return with_secret(EngineSettings(model="pocket", store=str(store))).secret


def test_each_start_finds_the_first_ones(tmp_path: Path) -> None:
    first = secret_in(tmp_path)
    assert len(first) == SECRET_BYTES and secret_in(tmp_path) == first
    assert [path.name for path in (tmp_path / "kv").iterdir()] == ["secret"]


def test_a_full_disk_keeps_nobody_from_reading_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = secret_in(tmp_path)

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "open", full)
    assert secret_in(tmp_path) == first
    with pytest.raises(SettingsInvalid, match="No space left"):
        secret_in(tmp_path / "another")


def test_one_that_was_cut_short_is_said(tmp_path: Path) -> None:
    secret_in(tmp_path)
    (tmp_path / "kv" / "secret").write_bytes(b"")
    with pytest.raises(SettingsInvalid, match="holds 0 bytes"):
        secret_in(tmp_path)
