"""The one form of log lines, and a writer that nothing has to wait for."""

from __future__ import annotations

import json
import logging
import os
import re
import sys

import pytest

from holdfast.kvstore.log_lines import (
    MOST_WAITING,
    LineFormatter,
    LogSettings,
    about,
    about_session,
    logging_lines,
    logging_with,
)

log = logging.getLogger("holdfast.tests")


def test_a_line_has_time_level_process_id_and_facts(capsys: pytest.CaptureFixture[str]) -> None:
    with logging_lines("holdfast engine", LogSettings()):
        log.info("response %s", "completed", extra=about("sess_1", output=7, code=None))
        log.warning("late")
        log.debug("not shown")
    one, two = capsys.readouterr().err.splitlines()
    time = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"
    assert re.fullmatch(rf"{time} INFO holdfast engine\[sess_1\]: response completed output=7", one)
    assert re.fullmatch(rf"{time} WARNING holdfast engine: late", two)


def test_json_is_an_object_for_each_line_with_its_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    with logging_lines("holdfast", LogSettings(level="debug", form="json")):
        log.debug("two\nlines", extra=about("sess_1", output=7))
        try:
            raise ZeroDivisionError("by chance")
        except ZeroDivisionError:
            log.exception("it failed")
    one, two = map(json.loads, capsys.readouterr().err.splitlines())
    assert one.pop("time").endswith("Z")
    assert one == {
        "level": "debug",
        "process": "holdfast",
        "id": "sess_1",
        "message": "two\nlines",
        "output": 7,
    }
    assert (two["level"], two["id"]) == ("error", None) and "ZeroDivisionError: by chance" in two["traceback"]


def test_lines_in_a_block_have_its_facts_and_their_own_go_before(capsys: pytest.CaptureFixture[str]) -> None:
    with logging_lines("holdfast", LogSettings()), logging_with(tenant="acme", route="/a"):
        with logging_with(session="sess_1", route="/b"):
            log.info("one", extra=about_session("sess_1", tenant=None))
            log.info("two", extra=about("req_1"))
        log.info("three")
    told = [line.split(" ", 2)[2] for line in capsys.readouterr().err.splitlines()]
    assert told == [
        "holdfast[sess_1]: one route=/b",
        "holdfast[req_1]: two tenant=acme route=/b session=sess_1",
        "holdfast: three tenant=acme route=/a",
    ]


def test_a_message_cannot_look_like_another_line_or_move_the_cursor() -> None:
    record = logging.LogRecord("x", logging.INFO, "", 0, "a\n2026-01-01T00:00:00.000Z \x1b[2J", (), None)
    first, second = LineFormatter("holdfast", "text").format(record).split("\n")
    assert first.endswith(" INFO holdfast: a") and second == "    2026-01-01T00:00:00.000Z \\x1b[2J"


def test_other_packages_log_their_warnings_alone(capsys: pytest.CaptureFixture[str]) -> None:
    with logging_lines("holdfast", LogSettings(level="debug")):
        logging.getLogger("other").info("chatter")
        logging.getLogger("other").warning("short of memory")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("WARNING holdfast: short of memory")


def test_a_pipe_that_is_not_read_holds_up_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its thread this test would wait for ever: a pipe holds 64 KiB."""
    read, write = os.pipe()
    with open(write, "w") as full:
        monkeypatch.setattr(sys, "stderr", full)
        with logging_lines("holdfast", LogSettings()) as lines:
            for _ in range(2 * MOST_WAITING):
                log.info("%s", "x" * 100)
        assert lines not in logging.getLogger().handlers
        os.set_blocking(read, False)
        while True:  # lets the thread end
            try:
                if not os.read(read, 1 << 20):
                    break
            except BlockingIOError:
                if not any(thread.name == "holdfast-log" for thread in __import__("threading").enumerate()):
                    break
    os.close(read)
