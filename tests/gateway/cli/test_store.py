"""``holdfast store`` on a journal: what it prints, and with which exit code."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from holdfast.gateway.access.auth import salt_of
from holdfast.gateway.cli.main import app
from holdfast.sessions.journal.model_store import open_for
from holdfast.sessions.journal.records import EventReceived, Keyring, SessionRecord, append, put
from holdfast.sessions.journal.segment import Kind, offset_of, slot_of
from holdfast.sessions.settings import JournalSettings
from holdfast.tests.stored_files import bytes_below

NUMBERS = JournalSettings(reserve_bytes=0)


def invoke(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["store", *words])
    return result.exit_code, result.output


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A store with a session of each of two tenants."""
    store = open_for(tmp_path / "s", b"model", NUMBERS)
    for number, name in ((1, "acme"), (2, "zenith")):
        record = SessionRecord(id=f"sess_{number}", owner=b"", salt=salt_of(name), clock="2025-03-01")
        store.write(
            [
                put(number, record),
                put(number, Keyring(fresh=(bytes([number]) * 32,))),
                append(number, 0, EventReceived(event=f"<{name}>" * 20)),
            ]
        )
    store.close()
    return tmp_path / "s"


def strike(root: Path) -> Path:
    """Damage an operation of the first session."""
    store = open_for(root, b"model", NUMBERS)
    location = store.sessions.location(1, Kind.OPERATION, 0)
    log = store.logs.logs[slot_of(location)].path
    store.close()
    data = bytearray(log.read_bytes())
    data[offset_of(location) + 60] ^= 8
    log.write_bytes(data)
    return log


def test_verify_names_what_is_damaged_and_fails_until_it_is_repaired(root: Path) -> None:
    assert invoke("verify", str(root))[0] == 0
    log = strike(root)
    code, told = invoke("verify", str(root))
    assert code == 1 and "session sess_1" in told and str(log) in told and "sess_2" not in told
    code, told = invoke("repair", str(root))
    assert code == 0 and "lost: session sess_1" in told and "journal.damaged" in told
    code, told = invoke("verify", str(root))
    assert code == 0 and "1 sessions" in told


def test_a_copy_is_made_and_can_be_verified(root: Path, tmp_path: Path) -> None:
    code, told = invoke("backup", str(root), str(tmp_path / "copy"))
    assert code == 0 and "2 sessions" in told
    assert invoke("verify", str(tmp_path / "copy"))[0] == 0
    code, told = invoke("backup", str(root), str(tmp_path / "copy"))
    assert code == 0 and "2 sessions" in told
    code, told = invoke("backup", str(root), str(tmp_path))
    assert code == 2 and "holds no store" in told
    strike(root)
    code, told = invoke("backup", str(root), str(tmp_path / "another"))
    assert code == 1 and "damaged: session sess_1" in told


def test_a_tenant_is_erased_by_the_name_in_the_keys_file(root: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("one acme\ntwo zenith\n")
    code, told = invoke("erase", str(root), "--tenant", "nobody", "--keys", str(keys))
    assert code == 2 and "no tenant 'nobody'" in told
    (root / "kv" / "abc").mkdir(parents=True)
    code, told = invoke("erase", str(root), "--tenant", "acme", "--keys", str(keys))
    assert code == 0 and "1 sessions erased, 1 are left" in told and not (root / "kv").exists()
    data = bytes_below(root)
    assert b"<acme>" not in data and b"<zenith>" in data


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        (("backup",), "backup DIR TARGET"),
        (("erase",), "--tenant NAME"),
        (("stat", "--tenant", "acme"), "--tenant NAME"),
        (("verify", "elsewhere"), "backup DIR TARGET"),
    ],
)
def test_wrong_arguments_are_refused_in_a_line(root: Path, words: tuple[str, ...], cause: str) -> None:
    code, told = invoke(words[0], str(root), *words[1:])
    assert code == 2 and cause in told and len(told.splitlines()) == 1


def test_gc_and_stat_tell_of_sessions(root: Path) -> None:
    for act in ("stat", "gc"):
        code, told = invoke(act, str(root))
        assert code == 0 and "2 sessions" in told
