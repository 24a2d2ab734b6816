"""When a server makes a full garbage collection."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from unittest.mock import patch

import pytest

from holdfast.gateway.cli import collector as module
from holdfast.gateway.cli.collector import NEVER, YOUNG, Collector


@pytest.fixture
def collector() -> Iterator[tuple[Collector, list[bool]]]:
    """A collector, and a list: its last entry says whether a turn runs."""
    thresholds, busy = gc.get_threshold(), [False]
    with patch("gc.freeze"):  # what pytest has made stays visible
        made = Collector(lambda: busy[-1])
    with patch.object(module, "SHORT", 1 << 30):
        yield made, busy
    gc.set_threshold(*thresholds)


def full_collections() -> int:
    return int(gc.get_stats()[2]["collections"])


def garbage() -> None:
    """Let the second generation be collected, with cycles that no count of references frees."""
    kept: list[object] = []
    kept.append(kept)
    gc.collect(1)


def test_python_makes_no_full_collection_by_itself(collector: tuple[Collector, list[bool]]) -> None:
    before = full_collections()
    kept = [[number] for number in range(40 * YOUNG[0])]
    assert gc.get_threshold() == (*YOUNG, NEVER)
    assert full_collections() == before and kept


def test_it_waits_until_two_looks_found_no_turn(collector: tuple[Collector, list[bool]]) -> None:
    one, busy = collector
    before = full_collections()
    garbage()
    for runs in (True, False, True, False):
        busy.append(runs)
        one.look()
    assert full_collections() == before
    one.look()
    assert full_collections() == before + 1
    for _ in range(9):
        one.look()
    assert full_collections() == before + 1, "nothing has grown since"


def test_none_is_made_beside_so_many_objects_that_it_would_be_long(
    collector: tuple[Collector, list[bool]],
) -> None:
    one, _ = collector
    before = full_collections()
    with patch.object(module, "SHORT", len(gc.get_objects(2)) + 500):
        kept = [[number] for number in range(1000)]
        garbage()
        for _ in range(9):
            one.look()
        assert full_collections() == before
        kept.clear()
        for _ in range(16):
            one.look()
        assert full_collections() == before + 1


def test_young_objects_do_not_gather_where_as_many_go_as_come(
    collector: tuple[Collector, list[bool]],
) -> None:
    one, busy = collector
    kept = [[number] for number in range(4 * YOUNG[0])]
    gc.collect()
    for at in range(len(kept)):
        kept[at] = [at]
    busy.append(True)
    one.look()
    assert len(gc.get_objects(0)) + len(gc.get_objects(1)) < YOUNG[0] // 10
