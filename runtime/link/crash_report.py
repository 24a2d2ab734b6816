"""The crash report of an engine process: the sequences of the steps it died in, and its Python stacks.

It is one file in memory that the parent makes and the child inherits, so that a dying process need not send
anything::

    [0, STACKS)   "<n>Q": how many, then the ids of the sequences in the steps in flight
    [STACKS, ..)  text that faulthandler writes: at a fatal signal, or when asked by ASK

The count is 0 while the ids behind it change: a process that dies in between was not in a step yet.
"""

from __future__ import annotations

import faulthandler
import mmap
import os
import signal
import struct
from collections.abc import Collection
from dataclasses import dataclass

STACKS = 64 * 1024
MOST = STACKS // 8 - 1  # ids that fit; those of a wider step are cut
MOST_TEXT = 256 * 1024  # bytes of stacks that are read
ASK = signal.SIGUSR1


@dataclass(frozen=True, slots=True)
class EngineDeath:
    """How an engine process ended. ``engine_number``: its number, counted by the link. ``cause``: a text.

    ``outside``: another process killed or stopped it, so no sequence is to blame. ``step``: ids of the
    sequences in the steps in flight, empty between steps. ``lost_at``: when it was last known to work, by
    ``time.monotonic()``. ``stacks``: its Python stacks, or empty.
    """

    engine_number: int
    cause: str
    outside: bool
    step: frozenset[int]
    lost_at: float
    stacks: str = ""


class CrashReport:
    """The crash report in the memory file ``fd``. The parent makes it with ``new``; the child opens the
    descriptor that it inherited."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._record = mmap.mmap(fd, STACKS)

    @classmethod
    def new(cls) -> CrashReport:
        """An empty report. Its descriptor is closed at exec unless it is passed on."""
        fd = os.memfd_create("holdfast-crash-report")
        try:
            os.ftruncate(fd, STACKS)
        except OSError as error:
            os.close(fd)
            raise OSError(error.errno, error.strerror, "the engine's crash report in memory") from error
        os.lseek(fd, 0, os.SEEK_END)  # where faulthandler begins to write: the position is shared
        return cls(fd)

    def close(self) -> None:
        """Unmap the report and close its descriptor."""
        self._record.close()
        os.close(self.fd)

    # --- the child --------------------------------------------------------------------------------------

    def record(self, sequences: Collection[int]) -> None:
        """Store the ids of the sequences that are on the device from now on; copies 8 bytes for each."""
        ids = list(sequences)[:MOST]
        struct.pack_into("<Q", self._record, 0, 0)
        struct.pack_into(f"<{len(ids)}Q", self._record, 8, *ids)
        struct.pack_into("<Q", self._record, 0, len(ids))

    def take_stacks(self) -> None:
        """Let faulthandler write all threads' stacks at a fatal signal, and at ``ASK``."""
        faulthandler.enable(self.fd, all_threads=True)
        faulthandler.register(ASK, self.fd, all_threads=True)

    # --- the parent -------------------------------------------------------------------------------------

    def sequences(self) -> frozenset[int]:
        """The ids of the sequences in the steps in flight, as `record` stored them last; of a dead process,
        those that it died with."""
        (count,) = struct.unpack_from("<Q", self._record)
        return frozenset(struct.unpack_from(f"<{min(count, MOST)}Q", self._record, 8))

    def stacks(self) -> str:
        """The stacks that faulthandler has written so far."""
        return os.pread(self.fd, MOST_TEXT, STACKS).decode(errors="replace")
