"""The engine's process: ``python -m holdfast.runtime --fd N --box M``, started by ``link.process``.

The first frame on the socket is the settings; then the engine loads, says ``Hello`` and serves until the
socket ends. The box takes what is to outlive a death: who was in the step, and the stacks. Exit codes: 0 the
other end closed, 1 a fault of ours (its traceback stands on stderr), 2 a fault the operator can mend (``Fatal``
names it), 3 the other end closed while a step hung.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import logging
import os
import signal
import socket
import threading

from ..kvstore.system_limits import NAMED, errno_of, explained
from .errors import EngineStarved, LinkClosed, RuntimeFault
from .link.codec import frame, receive_one
from .link.crash_report import CrashReport
from .link.engine_loop import LoadedEngine, Progress, serve
from .link.heartbeat import Liveness
from .link.messages import Fatal
from .settings import EngineSettings

EXIT_UNSERVABLE = 2
EXIT_ORPHANED = 3
GRACE = 5.0  # seconds the step in flight has to end once the other end closed


def main() -> int:
    """Serve on the socket that ``--fd`` names, with the host tier in ``--memory``."""
    parser = argparse.ArgumentParser(description="The engine's process; started by holdfast itself.")
    parser.add_argument("--fd", type=int, required=True, help="a connected stream socket")
    parser.add_argument("--box", type=int, help="a black box's descriptor")
    parser.add_argument("--memory", type=int, help="the host tier's memory, a memfd")
    parser.add_argument("--shelf", type=int, help="the control socket of the shelf's keeper")
    given = parser.parse_args()
    sock = socket.socket(fileno=given.fd)
    sock.set_inheritable(False)  # its end must be ours alone, or nobody would see it
    # Often sent to the whole group, by a terminal that hangs up too: the parent decides.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    box = None if given.box is None else CrashReport(given.box)
    if box is not None:
        box.take_stacks()
    logging.basicConfig(format="holdfast engine: %(levelname)s: %(message)s")
    try:
        liveness = Liveness(record=box.record) if box is not None else Liveness()
        return _serve(sock, liveness, given.memory, given.shelf)
    except RuntimeFault:  # `Fatal` has told it: the parent says it, once
        return EXIT_UNSERVABLE


def _serve(sock: socket.socket, liveness: Liveness, memory: int | None, shelf: int | None) -> int:
    try:
        settings = receive_one(sock, EngineSettings)
    except LinkClosed:
        return 0
    except RuntimeFault as fault:
        with contextlib.suppress(OSError):
            sock.sendall(frame(Fatal(fault.code, fault.message)))
        raise

    def load(progress: Progress, liveness: Liveness) -> LoadedEngine:
        try:
            from .build import load_engine  # torch comes with it: heartbeats go out meanwhile

            loaded = load_engine(settings, progress, liveness, memory, shelf)
        except (MemoryError, OSError, RuntimeError, ImportError) as error:
            if errno_of(error) in NAMED:
                raise EngineStarved(explained(error, "the engine's process")) from error
            raise
        if loaded.hello.kernels == "cpu":
            from ..kernels.cpu.cores import bind  # here, where this process is the engine's own

            bind()
        gc.collect()
        gc.freeze()  # what loading made stays: no step waits until the collector has walked it again
        return loaded

    serve(sock, load, _leave_soon, liveness)
    return 0


def _leave_soon() -> None:
    """Nobody is there any more: leave within ``GRACE`` seconds even if the device thread hangs."""
    leaving = threading.Timer(GRACE, os._exit, [EXIT_ORPHANED])
    leaving.daemon = True
    leaving.start()


if __name__ == "__main__":
    raise SystemExit(main())
