"""``holdfast bench gateway``: the gateway's CPU time per token, and its memory of an idle session.

An engine that recites feeds a real gateway process with its journal, so that the engine is not measured. The
CPU time of that process, all threads, is compared with that of a bare sender: uvicorn and websockets alone,
which send the same frames, one frame per token. Both go on when their clients have read the last token, so that
no two tokens are handled at once however busy the machine is. The SDK's process is compared with a receiver
that decodes the same frames. Rounds are interleaved, and ratios are taken within a round.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from websockets.asyncio.client import ClientConnection
from websockets.asyncio.client import connect as dial
from websockets.exceptions import WebSocketException

from .harness.lockstep import Lockstep
from .harness.options import CannotMeasure, Options, options_of, parser_of, run
from .harness.receivers import asked, opened, reply
from .harness.rounds import ratio
from .harness.servers import memory_bytes, run_seconds, started
from .harness.workers import environment
from .report import Goal, show, summary, table

ALONE = 5.0
"""The goal for one session: the gateway's CPU time per token ÷ the bare sender's."""
TOGETHER = 3.0
"""The goal for many sessions: the gateway's CPU time per token ÷ the bare sender's."""
RECEIVED = 3.0
TURN_BEFORE = 11.0
"""The CPU time of a turn of `SHORT` tokens ÷ that of `SHORT` bare frames, as this benchmark first measured it;
the goal is half."""
SHORT = 16
IDLE_KIB = 32.0


@dataclass(frozen=True, slots=True)
class TokenLoad:
    """What is measured. ``tokens``: of a long reply. ``replies``: how many sessions generate at once, one
    number for each measurement. ``talkers``, ``turns``: so many sessions take so many short turns each.
    ``idle``: sessions that only stay open."""

    tokens: int = 400
    replies: tuple[int, ...] = (1, 32, 64)
    talkers: int = 8
    turns: int = 8
    idle: int = 5000


QUICK = TokenLoad(tokens=20, replies=(1, 2), talkers=2, turns=2, idle=20)


def main(words: Sequence[str] | None = None) -> int:
    parser = parser_of("gateway", __doc__, ("pocket",), rounds=3)
    for name in ("tokens", "talkers", "turns", "idle"):
        usual = getattr(TokenLoad(), name)
        parser.add_argument(f"--{name}", type=type(usual), default=usual)
    parser.add_argument("--replies", type=int, nargs="+", default=TokenLoad().replies)
    parser.add_argument("--json", action="store_true", help="print the JSON, without the tables")
    chosen = parser.parse_args(words)
    load = TokenLoad(chosen.tokens, tuple(chosen.replies), chosen.talkers, chosen.turns, chosen.idle)
    options = options_of(chosen)
    return run("gateway", lambda: measure(options, QUICK if chosen.quick else load, quiet=chosen.json))


def measure(options: Options, load: TokenLoad, *, quiet: bool) -> None:
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        bare_words = ("-m", f"{__package__}.harness.bare", "--pace", f"{folder}/bare")
        try:
            with _gateway(folder, "resting") as resting:  # its own: the end of its sessions costs time, too
                idle = asyncio.run(_idle(resting, load))
            gateway = stack.enter_context(_gateway(folder, "talking"))
            bare = Process(Path(folder, "bare"), *stack.enter_context(started(bare_words, 1)))
            found = {**asyncio.run(_rounds(gateway, bare, load, options.rounds)), "idle": idle}
        except (WebSocketException, TimeoutError) as failed:
            raise CannotMeasure(f"a connection failed: {failed}") from failed
    goals = _goals(found, load)
    if not quiet:
        _table(found)
    settings = {"quick": options.quick, "rounds": options.rounds, **asdict(load)}
    show("gateway", options.seed, {**settings, **found}, goals, options.out, quiet=quiet)


@dataclass(frozen=True, slots=True)
class Process:
    """A serving process: the socket at which its steps are asked for (``pace``), its address, and its process
    id."""

    pace: Path
    url: str
    pid: int


@contextmanager
def _gateway(folder: str, name: str) -> Iterator[Process]:
    """A gateway with an engine that recites, and a journal of its own, until the end of the block."""
    pace = Path(folder, f"{name}.engine")
    program = f"{__package__}.harness.scripted_server"
    words = ("-m", program, "--store", f"{folder}/{name}.store", "--pace", str(pace))
    with started(words, 1) as (url, pid):
        yield Process(pace, url, pid)


async def _rounds(gateway: Process, bare: Process, load: TokenLoad, rounds: int) -> dict[str, Any]:
    micros: dict[str, dict[str, list[float]]] = {}

    def take(figure: str, side: str, seconds: float, count: int) -> None:
        micros.setdefault(figure, {}).setdefault(side, []).append(1e6 * seconds / count)

    deltas = await _warmed(gateway, load)
    for _ in range(rounds):
        for sessions in load.replies:
            name, count = _reply_name(sessions), sessions * load.tokens
            take(name, "ours", await _ours(gateway, sessions, load.tokens, 1), count)
            take(name, "bare", await _bare(bare, deltas, sessions, load.tokens, 1), count)
        turns = load.talkers * load.turns
        take(TURN, "ours", await _ours(gateway, load.talkers, SHORT, load.turns), turns)
        take(TURN, "bare", await _bare(bare, deltas, load.talkers, SHORT, load.turns), turns)
        for sessions in load.replies[:2]:
            name = _read_name(sessions)
            for side, kind in (("ours", "sdk"), ("bare", "bare")):
                read = await _received(kind, gateway, sessions, load.tokens)
                take(name, side, read["cpu_seconds"], int(read["pieces"]))
    figures = {
        name: {
            "ours_us": summary(sides["ours"], 1),
            "bare_us": summary(sides["bare"], 1),
            "ratio": ratio(sides["ours"], sides["bare"]),
        }
        for name, sides in micros.items()
    }
    return {"figures": figures, "frame_bytes": len(deltas[-1])}


TURN = f"a turn of {SHORT} tokens"


def _reply_name(sessions: int) -> str:
    return f"a token of {sessions} long replies" if sessions > 1 else "a token of one long reply"


def _read_name(sessions: int) -> str:
    return f"the SDK: a token of {sessions} replies" if sessions > 1 else "the SDK: a token of one reply"


async def _warmed(gateway: Process, load: TokenLoad) -> list[bytes]:
    """Take a first turn. Returns its text deltas as encoded frames. Raises ``CannotMeasure`` unless each token
    had a frame of its own."""
    connection = await opened(gateway.url)
    deltas = await reply(connection, asked(load.tokens), Lockstep(gateway.pace, 1, load.tokens))
    await connection.close()
    if len(deltas) != load.tokens:
        raise CannotMeasure(f"{load.tokens} tokens came as {len(deltas)} frames")
    return deltas


async def _ours(gateway: Process, sessions: int, tokens: int, turns: int) -> float:
    """The gateway's CPU seconds while so many ``sessions`` take ``turns`` turns of ``tokens`` tokens each."""
    async with AsyncExitStack() as stack:
        connections = [await stack.enter_async_context(await opened(gateway.url)) for _ in range(sessions)]

        async def talk(connection: ClientConnection) -> None:
            for _ in range(turns):
                if len(await reply(connection, asked(tokens), step)) != tokens:
                    raise CannotMeasure("a reply did not have a frame for each of its tokens")

        began, step = run_seconds(gateway.pid), Lockstep(gateway.pace, sessions, tokens * turns)
        await asyncio.gather(*map(talk, connections))
        return run_seconds(gateway.pid) - began


async def _bare(bare: Process, deltas: list[bytes], sessions: int, tokens: int, turns: int) -> float:
    """The bare sender's CPU seconds while it sends as many frames, of the same content, to as many
    connections."""
    message = json.dumps({"frames": tokens, "frame": deltas[-1].decode()})
    async with AsyncExitStack() as stack:
        dialled = [
            dial(bare.url.replace("http", "ws", 1), compression=None, max_queue=None, proxy=None)
            for _ in range(sessions)
        ]
        connections = [await stack.enter_async_context(one) for one in dialled]

        async def talk(connection: ClientConnection) -> None:
            for _ in range(turns):
                await connection.send(message)
                for _ in range(tokens):
                    await connection.recv(decode=False)
                    step.took()

        began, step = run_seconds(bare.pid), Lockstep(bare.pace, sessions, tokens * turns)
        await asyncio.gather(*map(talk, connections))
        return run_seconds(bare.pid) - began


async def _received(kind: str, gateway: Process, sessions: int, tokens: int) -> dict[str, float]:
    """The CPU seconds and text pieces of a client process of this kind, ``sdk`` or ``bare``
    (`harness.receivers`)."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", f"{__package__}.harness.receivers"),
        *(kind, gateway.url, str(gateway.pace), str(sessions), str(tokens)),
        stdout=asyncio.subprocess.PIPE,
        env=environment(1, ours=True),
    )
    said, _ = await process.communicate()
    if process.returncode:
        raise CannotMeasure(f"the client {kind} failed")
    told: dict[str, float] = json.loads(said)
    if told["pieces"] != sessions * tokens:
        raise CannotMeasure(f"the client {kind} read {told['pieces']} pieces, not {sessions * tokens}")
    return told


async def _idle(gateway: Process, load: TokenLoad) -> dict[str, float]:
    """The growth of the gateway's resident memory while so many sockets, with a session each, are opened: KiB
    for each."""
    await _warmed(gateway, load)
    before = memory_bytes(gateway.pid)["now"]
    async with AsyncExitStack() as stack:
        for _ in range(load.idle):
            await stack.enter_async_context(await opened(gateway.url))
        grown = memory_bytes(gateway.pid)["now"] - before
    return {"sessions": load.idle, "kib_each": grown / load.idle / 1024}


def _goals(found: dict[str, Any], load: TokenLoad) -> list[Goal]:
    figures = found["figures"]
    goals = []
    for sessions in load.replies:
        limit = TOGETHER if sessions > 1 else ALONE
        name = _reply_name(sessions)
        goals.append(Goal(name, figures[name]["ratio"], "x", limit, "lower"))
    goals.append(Goal(TURN, figures[TURN]["ratio"], "x", TURN_BEFORE / 2, "lower"))
    for sessions in load.replies[:2]:
        name = _read_name(sessions)
        goals.append(Goal(name, figures[name]["ratio"], "x", RECEIVED, "lower"))
    goals.append(Goal("memory of an idle session", found["idle"]["kib_each"], "KiB", IDLE_KIB, "lower"))
    return goals


def _table(found: dict[str, Any]) -> None:
    rows = [
        [name, median(one["ours_us"]["runs"]), median(one["bare_us"]["runs"]), one["ratio"]]
        for name, one in found["figures"].items()
    ]
    table("CPU time in µs, and the median ratio", ["", "ours", "bare", "ratio"], rows)


if __name__ == "__main__":
    raise SystemExit(main())
