"""Clients cannot fill the log: the first lines of a kind are written, then the number of the others."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from holdfast.gateway.net.repeated_lines import MOST_KINDS, MOST_OF_TENANTS, RepeatFilter
from holdfast.kvstore.log_lines import about, facts_of, logging_with


class Kept(logging.Handler):
    """Keeps what passes its filter; its clock and timer are the test's."""

    def __init__(self, most: int = 3) -> None:
        super().__init__()
        self.now = 0.0
        self.due: list[tuple[float, Callable[[], None]]] = []
        self.lines: list[str] = []
        self.facts: list[dict[str, object]] = []
        later = lambda seconds, act: self.due.append((self.now + seconds, act))
        self.addFilter(RepeatFilter(most, 60.0, lambda: self.now, later))

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
        self.facts.append(facts_of(record))

    def wait_until(self, now: float) -> None:
        self.now = now
        due, self.due = [one for one in self.due if one[0] <= now], [one for one in self.due if one[0] > now]
        for _, act in due:
            act()


@pytest.fixture
def kept() -> Kept:
    return Kept()


@pytest.fixture
def log(kept: Kept) -> logging.Logger:
    logger = logging.getLogger("tests.knocks")
    logger.propagate = False
    logger.handlers = [kept]
    return logger


def test_the_first_lines_are_written_and_the_rest_is_counted_once(log: logging.Logger, kept: Kept) -> None:
    for number in range(8000):
        kept.now = number / 1000
        log.warning("Invalid HTTP request of %s", number)
    assert kept.lines == [f"Invalid HTTP request of {number}" for number in range(3)]
    kept.wait_until(60.0)
    assert kept.lines[3:] == ["7997 more lines like this within 60 s: Invalid HTTP request of %s"]


def test_at_the_end_of_the_process_the_number_is_written_once(log: logging.Logger, kept: Kept) -> None:
    for _ in range(5):
        log.warning("knock")
    kept.filters[0].finish()
    kept.wait_until(60.0)
    assert kept.lines == ["knock"] * 3 + ["2 more lines like this within 60 s: knock"]


def test_other_lines_are_not_held_back(log: logging.Logger, kept: Kept) -> None:
    for _ in range(10):
        log.warning("knock")
    log.error("knock")
    log.warning("the engine died: %s", "killed")
    assert kept.lines == ["knock"] * 4 + ["the engine died: killed"]


def test_after_its_time_a_kind_is_written_again(log: logging.Logger, kept: Kept) -> None:
    for _ in range(4):
        log.warning("knock")
    kept.wait_until(60.0)
    log.warning("knock")
    assert kept.lines == ["knock"] * 3 + ["1 more lines like this within 60 s: knock", "knock"]
    for at in range(61, 400, 30):  # seldom enough to be written each time
        kept.wait_until(float(at))
        log.warning("knock")
    assert kept.lines[5:] == ["knock"] * 12


def test_a_line_that_is_different_each_time_is_not_remembered_for_ever(
    log: logging.Logger, kept: Kept
) -> None:
    for number in range(10 * MOST_KINDS):
        log.warning(f"kind {number}")
    for _ in range(10):
        log.warning("one more kind")
    assert len(kept.lines) == 10 * MOST_KINDS + 10, "those beyond are not counted"


def test_a_tenant_does_not_use_up_the_lines_of_another(log: logging.Logger, kept: Kept) -> None:
    for tenant in ("loud", "quiet"):
        with logging_with(tenant=tenant):
            for number in range(50 if tenant == "loud" else 2):
                log.warning("%s refused %d", tenant, number)
    assert kept.lines == [
        *(f"loud refused {number}" for number in range(3)),
        "quiet refused 0",
        "quiet refused 1",
    ]
    kept.wait_until(60.0)
    assert kept.lines[5:] == ["47 more lines like this within 60 s: %s refused %d"]
    assert kept.facts[-1] == {"tenant": "loud"}


def test_more_tenants_than_are_counted_apart_share_their_lines(log: logging.Logger, kept: Kept) -> None:
    for number in range(10 * MOST_KINDS):
        log.warning("refused", extra=about("", tenant=f"tenant {number}"))
    assert len(kept.lines) == MOST_OF_TENANTS + 3
    log.warning("the engine died")
    assert kept.lines[-1] == "the engine died"


def test_lines_below_a_warning_have_a_limit_of_their_own(log: logging.Logger) -> None:
    writer = logging.getLogger("tests.usual")
    writer.setLevel(logging.INFO)
    kept = Kept(most=2)
    kept.filters = [RepeatFilter(2, 60.0, lambda: 0.0, lambda seconds, act: None, usual=5)]
    writer.addHandler(kept)
    try:
        for number in range(9):
            writer.info("response %d", number)
            writer.warning("refused %d", number)
    finally:
        writer.removeHandler(kept)
    assert sum("response" in line for line in kept.lines) == 5
    assert sum("refused" in line for line in kept.lines) == 2
