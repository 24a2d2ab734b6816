"""``holdfast bench soak``: ordinary traffic until every tier is full, and long after that.

Nine clients (`harness/mix.py`) talk to one server, with default sizes and then with small tiers: for each
minute the turns per second, TTFT, the CPU time of a turn, the memory and the descriptors of the server's
processes, how full the tiers are, and the longest stop of the gateway's event loop. The stops are measured
inside the server, between two looks of the loop at its sockets (`harness/watched_server.py`).

The gateway's memory at the end is compared with that after a tenth of the conversations, but not with one
before `EARLY_SECONDS`: until then more sessions are open from minute to minute, as those of clients that have
left are closed after 120 s. The goal allows a kilobyte for each session that is stored.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from typing import Any, TypeAlias

from .harness.options import CannotMeasure, Options, options_of, parser_of, run
from .harness.plots import Axes, Curve, Picture, draw
from .harness.servers import Server, cpu_seconds, descriptors, server, share_bytes, statistics
from .harness.watched_server import MODULE as WATCHED
from .harness.workers import environment
from .report import Goal, percentile, show, table

CONVERSATIONS = 20_000
EARLY, EARLY_SECONDS = 10, 240.0
"""``EARLY``: one part in so many of the conversations."""
MOST_MINUTES = 60.0
MINUTE = 60.0
REST_SECONDS = 200.0
"""The server is looked at once more when no session is open, or after this time."""
LOOK_SECONDS, LATE_SECONDS = 0.2, 60.0
"""``LATE_SECONDS``: the clients' first turn ends within this time, or they are broken."""
SMALL = ("--kv-bytes", "64MiB", "--host-bytes", "128MiB", "--disk-bytes", "256MiB")
TINY = ("--kv-bytes", "8MiB", "--host-bytes", "1MiB", "--disk-bytes", "1MiB")
Sizes: TypeAlias = Mapping[str, tuple[str, ...]]
"""Options of the server, by a name."""
SIZES: Sizes = {"default": (), "small": SMALL}
FULL = 0.85
"""A tier is full from here on: KV on disk has heads and gaps besides, and not every free block can be used."""
PROCESSES = ("gateway", "engine", "disk")
ROWS = 12
"""About so many rows of a table."""
KEPT, SLOWER = 0.95, 1.2
STORED_BYTES = 1024
STOP_MS = 100.0


@dataclass(frozen=True, slots=True)
class SoakLength:
    """How long the traffic lasts: at least so many ``conversations`` and until all tiers are full, at most so
    many ``minutes`` of so many ``seconds``. ``rest``: seconds that the server may take to rest at the end."""

    conversations: int = CONVERSATIONS
    minutes: float = MOST_MINUTES
    seconds: float = MINUTE
    rest: float = REST_SECONDS


@dataclass(slots=True)
class TurnsHeard:
    """What the clients have told: when each turn ended and its TTFT in seconds, when each conversation ended,
    and the failures."""

    turns: list[tuple[float, float]] = field(default_factory=list)
    ended: list[float] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    def take(self, line: str) -> None:
        first, *more = json.loads(line)
        if isinstance(first, str):
            self.failed.append(first)
        elif more:
            self.turns.append((first, more[0]))
        else:
            self.ended.append(first)

    def listen(self, lines: Iterable[str]) -> None:
        """Take all lines."""
        for line in lines:
            self.take(line)


def main(words: Sequence[str] | None = None) -> int:
    parser = parser_of("soak", __doc__, ("pocket",), rounds=1)
    parser.add_argument("--conversations", type=int, default=CONVERSATIONS, help="at least so many")
    parser.add_argument("--minutes", type=float, default=MOST_MINUTES, help="of each size, at most")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=tuple(SIZES), help="of the tiers")
    parser.add_argument("--small", action="store_true", help="small tiers alone")
    parser.add_argument("--json", action="store_true", help="print the JSON, without the tables")
    chosen = parser.parse_args(words)
    options = options_of(chosen)
    if options.quick:
        course = SoakLength(minutes=4, seconds=1.0, rest=0.0)
        sizes: Sizes = {"small": TINY}
    else:
        course = SoakLength(chosen.conversations, chosen.minutes)
        sizes = {name: SIZES[name] for name in (("small",) if chosen.small else chosen.sizes)}
    return run("soak", lambda: measure(options, course, sizes, quiet=chosen.json))


def measure(options: Options, course: SoakLength, sizes: Sizes, *, quiet: bool = False) -> None:
    found: dict[str, Any] = {}
    goals: list[Goal] = []
    for name, words in sizes.items():
        found[name] = one = _soak(options, course, words)
        goals += _goals(name, one)
        if not quiet:
            _table(name, one["minutes"])
    drawn = draw(options.out / "soak.png", _pictures(found))
    if not quiet:
        print(drawn, end="\n\n")
    settings = {"model": "pocket", "threads": options.threads, "quick": options.quick}
    show("soak", options.seed, {**settings, "sizes": found}, goals, options.out, quiet=quiet)


def _soak(options: Options, course: SoakLength, words: Sequence[str]) -> dict[str, Any]:
    """Run the traffic on a new server with these options. Returns the figures."""
    with tempfile.TemporaryDirectory() as folder:
        stops = Path(folder, "stops")
        told = ("--device", "cpu", "--store", str(Path(folder, "store")), *words)
        program = ("-m", WATCHED, str(stops))
        with server("pocket", options.threads, *told, program=program) as running:
            soak = Soak(running, course)
            soak.talk(str(options.seed))
            soak.rest()
        return soak.told([LoopStop(*map(float, line.split())) for line in stops.read_text().splitlines()])


@dataclass(frozen=True, slots=True)
class LoopStop:
    """A stop of the event loop: when it ended, how long it was, and for how much of it the loop computed, and
    waited for a core, in seconds."""

    at: float
    seconds: float
    computed: float
    queued: float


class Soak:
    """The traffic on one server, and what is seen of the server meanwhile."""

    def __init__(self, running: Server, course: SoakLength) -> None:
        self._running = running
        self._course = course
        self._processes = {"gateway": running.gateway, "engine": running.engine}
        if running.disk is not None:
            self._processes["disk"] = running.disk
        self._heard = TurnsHeard()
        self._spans: list[tuple[float, float]] = []  # when each minute began and ended
        self._minutes: list[dict[str, Any]] = []
        self._rested: dict[str, Any] = {}
        self._left = float("inf")

    def talk(self, seed: str) -> None:
        """Run the clients for whole minutes, from the first turn on."""
        with _clients(self._running.url, seed, self._heard):
            late = time.monotonic() + LATE_SECONDS
            while not self._heard.turns and time.monotonic() < late:
                time.sleep(LOOK_SECONDS)
            while self._goes_on():
                began, spent = time.monotonic(), self._spent()
                time.sleep(self._course.seconds)
                self._spans.append((began, time.monotonic()))
                used = {name: seconds - spent[name] for name, seconds in self._spent().items()}
                self._minutes.append({"cpu_seconds": used, **self._seen()})

    def rest(self) -> None:
        """Wait until no session is open, but not too long."""
        end = time.monotonic() + self._course.rest
        while statistics(self._running.url)["sessions"] and time.monotonic() < end:
            time.sleep(1.0)
        self._rested, self._left = self._seen(), time.monotonic()

    def told(self, stops: Sequence[LoopStop]) -> dict[str, Any]:
        """All figures. ``stops``: of the event loop, since the server began to load; those after the rest, when
        it ends, do not count."""
        heard = self._heard
        if not heard.turns or not self._spans:
            raise CannotMeasure(f"no turn was completed: {heard.failed[:1]}")
        for (began, ended), minute in zip(self._spans, self._minutes, strict=True):
            ttft = [1000 * first for at, first in heard.turns if began <= at < ended]
            spent = minute.pop("cpu_seconds")
            minute |= {
                "turns_per_second": len(ttft) / (ended - began),
                "ttft_p50_ms": percentile(ttft, 0.5),
                "ttft_p99_ms": percentile(ttft, 0.99),
                "cpu_ms_per_turn": {name: 1000 * one / max(1, len(ttft)) for name, one in spent.items()},
                "longest_stop_ms": _longest(stops, began, ended),
            }
        return {
            "seconds": self._course.seconds,
            "conversations": len(heard.ended),
            "turns": len(heard.turns),
            "failed": len(heard.failed),
            "failures": heard.failed[:20],
            "longest_stop_ms": _longest(stops, self._spans[0][0], self._left),
            "minutes": self._minutes,
            "at_rest": {**self._rested, "longest_stop_ms": _longest(stops, self._spans[-1][1], self._left)},
        }

    def _goes_on(self) -> bool:
        if len(self._minutes) >= self._course.minutes:
            return False
        filled = bool(self._minutes) and min(self._minutes[-1]["filled"].values()) >= FULL
        return len(self._heard.ended) < self._course.conversations or not filled

    def _spent(self) -> dict[str, float]:
        return {name: cpu_seconds(pid) for name, pid in self._processes.items()}

    def _seen(self) -> dict[str, Any]:
        """What can be seen of the server now."""
        told = statistics(self._running.url)
        record = told["engine_host_bytes"] / max(1.0, told["engine_host_records"])
        return {
            "conversations": len(self._heard.ended),
            "open_sessions": told["sessions"],
            "stored_sessions": told["journal_sessions"],
            "memory_bytes": {name: share_bytes(pid) for name, pid in self._processes.items()},
            "descriptors": {name: descriptors(pid) for name, pid in self._processes.items()},
            "filled": {
                "device": 1 - told["engine_pool_free"] / told["engine_pool_blocks"],
                "host": told["engine_host_bytes"] / told["engine_host_capacity"],
                "disk": told["engine_disk_records"] * record / max(1.0, told["engine_disk_budget"]),
            },
        }


@contextmanager
def _clients(url: str, seed: str, heard: TurnsHeard) -> Iterator[None]:
    """Run the clients during the block; at its end they go to the ends of their conversations."""
    command = (sys.executable, "-m", "holdfast.benchmarks.harness.mix", url, seed)
    environ = environment(1, ours=True)
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ, text=True
    ) as clients:
        assert clients.stdin is not None and clients.stdout is not None
        listening = Thread(target=heard.listen, args=(clients.stdout,))
        listening.start()
        try:
            yield
            clients.stdin.close()
            listening.join()
        finally:
            clients.kill()
            listening.join()


def _longest(stops: Sequence[LoopStop], began: float, ended: float) -> dict[str, float]:
    """The longest stop in a time, and its parts, in milliseconds; zeros if there was none."""
    found = [stop for stop in stops if began <= stop.at < ended]
    longest = max(found, key=lambda stop: stop.seconds, default=LoopStop(0.0, 0.0, 0.0, 0.0))
    parts = {"whole": longest.seconds, "computed": longest.computed, "queued": longest.queued}
    return {name: round(1000 * seconds, 3) for name, seconds in parts.items()}


def _goals(name: str, found: dict[str, Any]) -> list[Goal]:
    minutes = found["minutes"]
    second, last = minutes[min(1, len(minutes) - 1)], minutes[-1]
    tenth, seconds = found["conversations"] // EARLY, found["seconds"]
    settled = (
        minute
        for number, minute in enumerate(minutes, 1)
        if minute["conversations"] >= tenth and number * seconds >= EARLY_SECONDS
    )
    early = next(settled, last)
    stored = max(1.0, last["stored_sessions"] - early["stored_sessions"])
    left = (last["memory_bytes"]["gateway"] - early["memory_bytes"]["gateway"]) / stored

    def kept(figure: str) -> float:
        return float(last[figure] / max(second[figure], 1e-9))

    return [
        Goal(f"{name}: the least full tier", min(last["filled"].values()), "", FULL, "higher"),
        Goal(f"{name}: turns/s, last minute ÷ second", kept("turns_per_second"), "x", KEPT, "higher"),
        Goal(f"{name}: p99 TTFT, last minute ÷ second", kept("ttft_p99_ms"), "x", SLOWER, "lower"),
        Goal(f"{name}: gateway, by stored session", left, "B", STORED_BYTES, "lower"),
        Goal(f"{name}: longest stop of the loop", found["longest_stop_ms"]["whole"], "ms", STOP_MS, "lower"),
        Goal(f"{name}: failed turns", found["failed"], "", 0.0, "lower"),
    ]


def _table(name: str, minutes: Sequence[dict[str, Any]]) -> None:
    step = -(-len(minutes) // ROWS)
    shown = [*range(0, len(minutes) - 1, step), len(minutes) - 1]
    rows = [
        [
            str(number + 1),
            minute["turns_per_second"],
            minute["ttft_p50_ms"],
            minute["ttft_p99_ms"],
            minute["cpu_ms_per_turn"]["engine"],
            minute["cpu_ms_per_turn"]["gateway"],
            *(round(minute["memory_bytes"].get(process, 0) / (1 << 20)) for process in PROCESSES),
            minute["descriptors"]["gateway"],
            minute["longest_stop_ms"]["whole"],
            int(minute["open_sessions"]),
            int(minute["stored_sessions"]),
            *(f"{100 * share:.0f}" for share in minute["filled"].values()),
        ]
        for number, minute in ((number, minutes[number]) for number in shown)
    ]
    columns = ["minute", "turns/s", "TTFT p50", "p99", "engine ms", "gateway ms"]
    columns += [
        "gateway MiB",
        "engine",
        "disk",
        "fds",
        "stop ms",
        "open",
        "stored",
        "device %",
        "host",
        "disk",
    ]
    table(f"{name} sizes: TTFT and stops in ms, CPU time by turn", columns, rows)


def _pictures(found: dict[str, Any]) -> list[Picture]:
    def curves(figure: Callable[[dict[str, Any]], float]) -> dict[str, Curve]:
        return {
            name: ([float(at + 1) for at in range(len(one["minutes"]))], list(map(figure, one["minutes"])))
            for name, one in found.items()
        }

    return [
        (Axes("Turns", "minute", "per second"), curves(lambda minute: minute["turns_per_second"])),
        (
            Axes("TTFT, 99th percentile", "minute", "ms", log=True),
            curves(lambda minute: minute["ttft_p99_ms"]),
        ),
        (
            Axes("Memory of the gateway", "minute", "MiB"),
            curves(lambda minute: minute["memory_bytes"]["gateway"] / (1 << 20)),
        ),
    ]
