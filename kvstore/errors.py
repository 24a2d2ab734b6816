"""Errors of the kvstore room.

::

    KVStoreError
    ├── PoolExhausted         more blocks asked for than can be had now: wait, preempt or refuse
    ├── FolderHeld            another process has the folder
    ├── BookkeepingError      our own mistake, never the user's
    │   ├── BlockMisused      a block is not in the state that an operation needs; names both
    │   ├── SlotMisused       a host slot cannot go from the state it is in to the one asked for
    │   ├── StepOutOfOrder    steps must be launched and finished in rising order
    │   └── LeakFound         an audit found blocks or slots that do not add up
    └── RecordUnavailable     a tier has no usable record under this key
        ├── RecordMissing     it holds none
        └── RecordCorrupt     it held one that failed its checks, and has dropped it
"""

from __future__ import annotations


class KVStoreError(Exception):
    """Anything the kvstore room raises."""


class PoolExhausted(KVStoreError):
    """The pool was asked for more blocks than it has now; nothing was taken."""


class FolderHeld(KVStoreError):
    """Another process has locked the folder, or a file in it."""


class BookkeepingError(KVStoreError):
    """Our own mistake, never the user's: the caller and the pool or tier disagree."""


class BlockMisused(BookkeepingError):
    """``block`` is in state ``state``, in which what the caller wants is not possible; ``act`` is that, as
    text: ``shared``, ``released``, ``sealed``."""

    def __init__(self, block: int, state: str, act: str) -> None:
        super().__init__(f"block {block} is {state}: it cannot be {act}")


class SlotMisused(BookkeepingError):
    """A host slot, number ``slot``, is in state ``state`` and cannot go from there to ``wanted``."""

    def __init__(self, slot: int, state: str, wanted: str) -> None:
        super().__init__(f"slot {slot} is {state}: it cannot become {wanted}")


class StepOutOfOrder(BookkeepingError):
    """Steps must be launched, and then finished, in rising order of their numbers; a call was not."""


class LeakFound(BookkeepingError):
    """An audit found blocks or slots that do not add up; the text lists them."""


class RecordUnavailable(KVStoreError):
    """A tier has no usable record under ``key``."""

    def __init__(self, key: bytes, reason: str) -> None:
        super().__init__(f"record {key.hex()}: {reason}")


class RecordMissing(RecordUnavailable):
    """The tier holds no record under this key."""


class RecordCorrupt(RecordUnavailable):
    """The tier held a record that failed its checks; it has dropped it."""
