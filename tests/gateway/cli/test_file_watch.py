"""Files that change on disk are noticed once, when they are whole."""

from __future__ import annotations

import os
from pathlib import Path

from holdfast.gateway.cli.serve import FileWatch


def test_a_change_counts_once_it_has_settled(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("one")
    watch = FileWatch([path])
    assert not watch.changed() and not watch.changed()
    path.write_text("half of")
    assert not watch.changed(), "it may still be written"
    path.write_text("half of it, and the rest")
    assert not watch.changed()
    assert watch.changed() and not watch.changed()


def test_a_file_that_was_read_meanwhile_is_known(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("one")
    watch = FileWatch([path])
    path.write_text("another")
    watch.note()
    assert not watch.changed() and not watch.changed()


def test_links_that_are_exchanged_files_that_come_and_go(tmp_path: Path) -> None:
    """A mounted secret is a link into a folder behind a link, which is replaced."""
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "keys").write_text("same length")
    (tmp_path / "now").symlink_to("first")
    path = tmp_path / "keys"
    path.symlink_to("now/keys")
    watch = FileWatch([path, tmp_path / "none"])
    (tmp_path / "next").symlink_to("second")
    os.replace(tmp_path / "next", tmp_path / "now")
    assert [watch.changed() for _ in range(3)] == [False, True, False]
    path.unlink()
    assert [watch.changed() for _ in range(3)] == [False, True, False]
    (tmp_path / "none").write_text("here")
    assert [watch.changed() for _ in range(3)] == [False, True, False]


def test_without_files_nothing_changes() -> None:
    assert not FileWatch([]).changed()
