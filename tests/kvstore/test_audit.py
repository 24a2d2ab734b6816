"""The audit finds every way in which a pool's state can be wrong."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from holdfast.kvstore.errors import LeakFound
from holdfast.kvstore.pool import BlockPool


def sound() -> BlockPool:
    """Block 0 is free, 1 held twice, 2 held once and sealed, 3 fenced, 4 cached."""
    pool = BlockPool(5)
    _, one, two, three, four = pool.allocate(5).blocks
    pool.share([one], None)
    pool.seal([two, four], [b"two", b"four"])
    pool.release([0, four])
    pool.launched(1)
    pool.release([three])
    return pool


def test_a_sound_pool_passes() -> None:
    pool = sound()
    assert not any(pool.audit_in_slices(None))
    assert not any(pool.audit_in_slices([[1, 2], [1]]))


@pytest.mark.parametrize(
    ("harm", "complaint"),
    [
        (lambda pool: pool._free.append(1), "in two states: 1"),
        (lambda pool: pool._free.append(0), "in two states: 0"),
        (lambda pool: pool._free.clear(), "in no state: 0"),
        (lambda pool: pool._free.append(5), "not of this pool: 5"),
        (lambda pool: pool.references._counts.__setitem__(1, -1), "held without a reference: 1"),
        (lambda pool: pool.index.drop([4]), "cached without a key: 4"),
        (lambda pool: pool.index.add(b"free", 0), "free with a key: 0"),
        (lambda pool: pool._in_flight.clear(), "fenced with no step in flight: 3"),
        (lambda pool: setattr(pool, "blocks", 40), "in no state: 5, 6, 7, 8, 9, 10, 11, 12 and 27 more"),
    ],
)
def test_a_wrong_one_does_not(harm: Callable[[BlockPool], object], complaint: str) -> None:
    pool = sound()
    harm(pool)
    with pytest.raises(LeakFound) as found:
        any(pool.audit_in_slices(None))
    assert str(found.value) == complaint


def test_all_complaints_are_listed() -> None:
    with pytest.raises(LeakFound, match=r"block 1 is held 2 times, 1 .*; block 3 is held 0 times, 1 "):
        any(sound().audit_in_slices([[1, 2, 3]]))
