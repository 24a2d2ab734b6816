"""The disk process: ``python -m holdfast.kvstore.disk FD MEMORY LOGS ANEW``, started by `process.DiskProcess`.

Exit codes: 0 the engine closed its end; 1 a fault of ours (traceback on stderr); 2 the store cannot be
opened, or was thrown away (one line on stderr).
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys

import msgspec

from ..errors import FolderHeld
from ..log_lines import LogSettings, logging_lines
from .index import StoreFailed, StoreTorn
from .server import serve

NICENESS = 10
"""What this process adds to its niceness: where the cores are few, its writes must not delay a step."""

log = logging.getLogger(f"{__package__}.main")  # `__name__` is `__main__` here


def main() -> int:
    """Serve the disk tier until the engine closes its end. Returns the exit code. The arguments: descriptors of
    a connected SEQPACKET socket and of the host tier's memory, the `LogSettings` as JSON, and whether to throw
    away the records there are, ``true`` or ``false``."""
    fd, memory, logs, anew = map(msgspec.json.decode, sys.argv[1:])
    # A terminal sends these to the whole group, also when it hangs up: the engine decides when to end.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError):  # a sandbox may forbid it
        os.nice(NICENESS)
    with logging_lines("holdfast disk", msgspec.convert(logs, LogSettings)):
        try:
            with socket.socket(fileno=fd) as sock:
                serve(sock, memory, anew=anew)
        except (StoreFailed, FolderHeld, StoreTorn) as error:
            log.error("%s", error)
            return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
