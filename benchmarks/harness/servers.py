"""A real ``holdfast serve`` as a child process, and the CPU time and memory of its processes, from /proc."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.request import Request, urlopen

from .options import CannotMeasure
from .workers import environment

PROGRAM = "from holdfast.gateway.cli.main import main; main()"
FEW = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({0}, {0})); "
_TICK = os.sysconf("SC_CLK_TCK")
LEAVE_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class Server:
    """A server that is ready: its address, and the process ids of its gateway, its engine, and the process of
    its disk tier, if it has one."""

    url: str
    gateway: int
    engine: int
    disk: int | None = None


@contextmanager
def server(
    model: str,
    threads: int,
    *words: str,
    files: int | None = None,
    program: Sequence[str] = ("-c", PROGRAM),
) -> Iterator[Server]:
    """Run ``holdfast serve`` with these options until the end of the block. ``files``: the most descriptors it
    may have; None: as many as this process. ``program``: the interpreter's arguments by which it runs
    ``holdfast``. Raises ``CannotMeasure``, with the server's last line, if it does not start."""
    if files is not None:
        program = ("-c", FEW.format(files) + PROGRAM)
    with started((*program, "serve", model, "--port", "0", *words), threads) as (url, pid):
        engine, *others = sorted(children_of(pid)) or [0]
        if not engine:
            raise CannotMeasure("the server has no engine process")
        yield Server(url, pid, engine, *others[:1])


@contextmanager
def started(words: Sequence[str], threads: int) -> Iterator[tuple[str, int]]:
    """Run a Python program that serves, until the end of the block. Yields its address, which it prints on
    stderr in a line that ends with ``at URL``, and its process id. ``words``: its arguments behind the
    interpreter's name. Raises ``CannotMeasure``, with its last line, if it does not start."""
    environ = environment(threads, ours=True)
    with (
        tempfile.TemporaryFile("w+") as complaints,
        subprocess.Popen(
            (sys.executable, *words), stderr=subprocess.PIPE, stdout=complaints, env=environ, text=True
        ) as process,
    ):
        try:
            yield _address(process), process.pid
        finally:
            _end(process)


def cpu_seconds(pid: int) -> float:
    """The user and system time of a process so far, of all its threads, in seconds, to the kernel's tick (10
    ms)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICK


def run_seconds(pid: int) -> float:
    """The CPU time of a process so far, of all its threads, ended ones too, in seconds to the nanosecond:
    ``clock_getcpuclockid(3)``."""
    return time.clock_gettime(~pid << 3 | 2)


def engine_statistics(url: str, key: str = "") -> dict[str, float]:
    """The statistics of the engine behind the server at ``url``, by name, read from ``/metrics``.

    ``key``: an operator's key, if the server has keys.
    """
    told = _metrics(url, key)
    found = re.findall(r"^holdfast_engine_(\w+?)(?:_total)? (\S+)$", told, re.MULTILINE)
    found += re.findall(r'^holdfast_tokens_total\{class="(\w+)"\} (\S+)$', told, re.MULTILINE)
    return {name: float(value) for name, value in found}


def statistics(url: str) -> dict[str, float]:
    """The statistics of a server's gateway and engine, by name, the engine's with ``engine_`` before it."""
    found = re.findall(r"^holdfast_(\w+?)(?:_total)? (\S+)$", _metrics(url), re.MULTILINE)
    return {name: float(value) for name, value in found}


def _metrics(url: str, key: str = "") -> str:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    with urlopen(Request(f"{url}/metrics", headers=headers)) as answer:
        told: str = answer.read().decode()
        return told


def memory_bytes(pid: int) -> dict[str, int]:
    """The resident memory of a process in bytes: ``now``, and its ``peak`` so far."""
    found = dict(
        re.findall(r"^(VmRSS|VmHWM):\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    )
    return {"now": int(found["VmRSS"]) * 1024, "peak": int(found["VmHWM"]) * 1024}


def share_bytes(pid: int) -> int:
    """A process's part of the memory, in bytes: pages that several processes have count by their parts."""
    told = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return int(re.findall(r"^Pss:\s+(\d+) kB", told, re.MULTILINE)[0]) * 1024


def descriptors(pid: int) -> int:
    """How many descriptors a process has open."""
    return len(os.listdir(f"/proc/{pid}/fd"))


def _address(process: subprocess.Popen[str]) -> str:
    assert process.stderr is not None
    said = ""
    for line in process.stderr:
        found = re.search(r" at (http://\S+)$", line.strip())
        if found:
            return found[1]
        said = line.strip() or said
    raise CannotMeasure(f"the server did not start: {said}")


def children_of(pid: int) -> list[int]:
    """The ids of the processes that the process ``pid`` has started, by any of its threads."""
    listed = (file.read_text() for file in Path(f"/proc/{pid}/task").glob("*/children"))
    return [int(child) for children in listed for child in children.split()]


def _end(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.communicate(timeout=LEAVE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
