"""Where a record lies, in 64 bits: the log's slot, its offset and length there in units of 8 bytes.

A log's slot is a small number that the process gives it. The place of a record longer than can be told so
says the most that can be.
"""

from __future__ import annotations

from typing import Any

import numpy as np

MISSING, HIT = 0, 1
"""Places of records that were never found, and of those that damage has hit."""
LENGTH_BITS, OFFSET_BITS = 21, 27
SLOT_SHIFT = LENGTH_BITS + OFFSET_BITS
GIANT = (1 << LENGTH_BITS) - 1
MOST_SLOTS = 1 << 64 - SLOT_SHIFT
_PLAIN, _EIGHT = np.uint64(GIANT), np.uint64(3)


def place_of(slot: int, offset: int, length: int) -> int:
    """Of a record."""
    return slot << SLOT_SHIFT | offset >> 3 << LENGTH_BITS | min(length >> 3, GIANT)


def places_of(slot: int, offsets: Any, lengths: Any) -> Any:
    """Of many in one log; in arrays of ``<u8``."""
    places = (offsets >> _EIGHT) << np.uint64(LENGTH_BITS) | np.minimum(lengths >> _EIGHT, _PLAIN)
    return places | np.uint64(slot << SLOT_SHIFT)


def bytes_at(place: int) -> int:
    """How many bytes the record there takes; of giants, as many as can be told."""
    return (place & GIANT) << 3


def all_bytes_at(places: Any) -> Any:
    """The same of many, in an array."""
    return (places & _PLAIN) << _EIGHT


def slot_of(place: int) -> int:
    """The slot of the log that it lies in."""
    return place >> SLOT_SHIFT


def offset_of(place: int) -> int:
    """Where in the log it lies."""
    return (place >> LENGTH_BITS & (1 << OFFSET_BITS) - 1) << 3
