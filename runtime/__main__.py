"""The engine's process: ``python -m holdfast.runtime --fd N --crash-report M``, started by ``link.process``.

It imports while it waits for its settings. First come descriptors (`link.child.DESCRIPTORS`), then the
settings as a frame. Then the engine loads, sends ``Hello`` and serves until the socket ends. Exit codes: 0 the
gateway closed, 1 an internal fault (traceback on stderr), 2 a fault that the operator can fix (sent as
``Fatal``), 3 the gateway closed while a step hung.
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
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from importlib import import_module
from types import ModuleType

from ..kvstore.log_lines import logging_lines
from ..kvstore.system_limits import NAMED, errno_of, explained
from .errors import EngineStarved, LinkClosed, RuntimeFault
from .link.crash_report import CrashReport
from .link.engine_end import LoadedEngine, LoadProgress, receive_settings, serve
from .link.heartbeat import Liveness
from .link.messages import Fatal, frame
from .settings import EngineSettings

EXIT_FAULT = 1
EXIT_UNSERVABLE = 2
EXIT_ORPHANED = 3
GRACE = 5.0  # seconds for the step in flight after the gateway closed

log = logging.getLogger(f"{__package__}.process")  # `__name__` is `__main__` here


def main() -> int:
    """Run an engine for the gateway at the other end of the socket ``--fd``. Returns the exit code."""
    gc.disable()  # importing leaves next to no garbage, and looking for it takes a sixth of the time
    parser = argparse.ArgumentParser(description="The engine's process; started by holdfast itself.")
    parser.add_argument("--fd", type=int, required=True, help="a connected stream socket")
    parser.add_argument("--crash-report", type=int, required=True, help="the crash report's descriptor")
    given = parser.parse_args()
    sock = socket.socket(fileno=given.fd)
    sock.set_inheritable(False)  # a child process must not keep it open
    # Terminals send these to the whole process group; the parent decides when to end.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    report = CrashReport(given.crash_report)
    report.take_stacks()
    return _serve(sock, Liveness(record=report.record))


def _serve(sock: socket.socket, liveness: Liveness) -> int:
    importing = ThreadPoolExecutor(1).submit(import_module, f"{__package__}.build")  # and torch with it
    try:
        settings, descriptors = receive_settings(sock)
    except LinkClosed:
        os._exit(0)  # nothing is open yet, and modules may be half imported
    except RuntimeFault as fault:
        with contextlib.suppress(OSError):
            sock.sendall(frame(Fatal(fault.code, fault.message)))
        return EXIT_UNSERVABLE
    load = partial(_load, importing, settings, descriptors)
    with logging_lines("holdfast engine", settings.logs):
        try:
            serve(sock, load, _leave_soon, liveness)
        except RuntimeFault:  # the parent reports it: `Fatal` has been sent
            return EXIT_UNSERVABLE
        except Exception:
            log.exception("the engine ended by a fault")
            return EXIT_FAULT
    return 0


def _load(
    importing: Future[ModuleType],
    settings: EngineSettings,
    descriptors: Sequence[int],
    progress: LoadProgress,
    liveness: Liveness,
) -> LoadedEngine:
    try:
        build = importing.result()  # the link sends heartbeats meanwhile
        gc.freeze()  # what was imported stays
        gc.enable()
        loaded: LoadedEngine = build.load_engine(settings, progress, liveness, *descriptors)
    except (MemoryError, OSError, RuntimeError, ImportError) as error:
        if errno_of(error) in NAMED:
            raise EngineStarved(explained(error, "the engine's process")) from error
        raise
    if loaded.hello.kernels == "cpu":
        from ..kernels.cpu.cores import bind  # here, as this process is the engine's own

        bind()
    gc.collect()
    gc.freeze()  # objects made while loading stay: no need to scan them during a step
    return loaded


def _leave_soon() -> None:
    """Start a timer that ends this process after ``GRACE`` seconds, even if the device thread hangs. Called
    when the gateway is gone."""
    leaving = threading.Timer(GRACE, os._exit, [EXIT_ORPHANED])
    leaving.daemon = True
    leaving.start()


if __name__ == "__main__":
    raise SystemExit(main())
