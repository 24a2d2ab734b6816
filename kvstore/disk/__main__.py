"""The disk process: ``python -m holdfast.kvstore.disk --fd N --memory M``, started by `process.DiskProcess`.

Exit codes: 0 the engine closed its end; 1 a fault of ours (traceback on stderr); 2 the store cannot be
opened, or was thrown away (one line on stderr).
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import socket

from ..errors import FolderHeld
from ..log_lines import LogSettings, logging_lines
from .index import StoreFailed, StoreTorn
from .server import serve

NICENESS = 10
"""What this process adds to its niceness: where the cores are few, its writes must not delay a step."""

log = logging.getLogger(f"{__package__}.main")  # `__name__` is `__main__` here


def main() -> int:
    """Serve the disk tier on the socket that ``--fd`` names, until the engine closes its end. Returns the
    exit code."""
    parser = argparse.ArgumentParser(description="The disk tier's process; started by holdfast itself.")
    parser.add_argument("--fd", type=int, required=True, help="a connected SEQPACKET socket")
    parser.add_argument("--memory", type=int, required=True, help="the host tier's memory, a memfd")
    parser.add_argument("--anew", action="store_true", help="without the records there are")
    parser.add_argument("--log-level", default="info")
    parser.add_argument("--log-format", default="text")
    given = parser.parse_args()
    # A terminal sends these to the whole group, also when it hangs up: the engine decides when to end.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError):  # a sandbox may forbid it
        os.nice(NICENESS)
    with logging_lines("holdfast disk", LogSettings(level=given.log_level, form=given.log_format)):
        try:
            with socket.socket(fileno=given.fd) as sock:
                serve(sock, given.memory, anew=given.anew)
        except (StoreFailed, FolderHeld, StoreTorn) as error:
            log.error("%s", error)
            return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
