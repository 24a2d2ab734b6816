"""``holdfast bench overload``: many bad clients, and three times as many requests as can be answered.

*Slow readers*: two hundred sockets of one tenant with a reply each that is read at some bytes per second, and
two thousand connections that send half of a request's head, and connect again when they are dropped
(`harness/flood.py`). Four sessions of another tenant generate all the time; the report compares their token
gaps beside the bad clients, when the engine has computed the replies that are read slowly, with those while
the same clients are connected to another server. So the cores that the clients take count on both sides: any
further process on them, even an idle server, makes gaps longer.

*Overload*: Chat Completions requests arrive at random times (Poisson), whether those before were answered or
not (`harness/arrivals.py`). Goodput is the number of replies per second with a TTFT within `SLO_SECONDS`, of
those that began in the time of the load. In each round it is measured with clients that send one request
after the other, which gives the capacity, then at shares of that capacity, then at three times the rate that
had the best goodput of the round. A machine that others use is faster in one minute than in the next, so only
figures of the same round are compared. A refusal must say when to try again, and must not have cost the
engine anything. The client runs on the server's cores, so each figure has the CPU time of both beside it.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

from holdfast.sdk import Client, connect

from .harness.options import CannotMeasure, Options, options_of, parser_of, run
from .harness.rounds import ratio
from .harness.servers import Server, cpu_seconds, engine_statistics, memory_bytes, server
from .harness.workers import environment
from .report import Goal, percentile, show, table

TALKERS, TALK_TOKENS, QUICK_TOKENS = 4, 200, 40
READERS, HALF_OPEN = 200, 2000
GAP = 1.2
WINDOWS = 3
"""Windows of token gaps of each kind, alternating. Bad clients that are stopped in between keep their
connections, as far as the server lets them."""
SLO_SECONDS = 2.0
QUEUE_SECONDS = 1.0
"""The server's `--max-queue-seconds` under overload."""
SHARES = (1.0, 1.2, 1.4)
OVERLOAD = 3.0
KEPT = 0.9
START_SECONDS = 120.0
COMPUTED_SECONDS = 300.0
OPERATOR = "operator-key"
KEYS = f"""\
[operators]
keys = ["{OPERATOR}"]

[tenants.attacker]
keys = ["attacker-key"]

[tenants.victim]
keys = ["victim-key"]
"""


def main(words: Sequence[str] | None = None) -> int:
    parser = parser_of("overload", __doc__, ("pocket",), rounds=5)
    parser.add_argument(
        "--seconds", type=float, default=15.0, help="of each window of token gaps; a load has half"
    )
    parser.add_argument("--json", action="store_true", help="print the JSON, without the tables")
    chosen = parser.parse_args(words)
    options = options_of(chosen)
    seconds = 0.6 if chosen.quick else chosen.seconds
    return run("overload", lambda: measure(options, seconds, quiet=chosen.json))


def measure(options: Options, seconds: float, *, quiet: bool) -> None:
    many = {"slow-readers": READERS, "half-open": HALF_OPEN}
    few = dict.fromkeys(many, 5)
    bad = asyncio.run(_bad_clients(options, seconds, few if options.quick else many))
    rounds = asyncio.run(_overload(options, seconds / 2))
    best, over = [_best(loads[:-1]) for loads in rounds], [loads[-1] for loads in rounds]

    def kept(figure: str) -> float:
        return ratio([load[figure] for load in over], [load[figure] for load in best])

    goals = [
        Goal("others' p90 gap beside bad clients", bad["gap_ratio"], "x", GAP, "lower"),
        Goal("goodput kept at overload", kept("goodput"), "x", KEPT, "higher"),
        Goal("refusals without Retry-After", _sum(over, "refused_silently"), "", 0.0, "lower"),
        Goal(
            "refused turns that reached the engine",
            _sum(over, "engine_turns") - _sum(over, "replies"),
            "",
            0.0,
            "lower",
        ),
        Goal("answers lost", _sum(over, "failed"), "", 0.0, "lower"),
    ]
    told = {
        "bad_clients": bad,
        "rounds": rounds,
        "goodput_kept": [late["goodput"] / early["goodput"] for early, late in zip(best, over, strict=True)],
        "goodput_per_server_cpu_second_kept": kept("goodput_per_server_cpu_second"),
    }
    if not quiet:
        _table(bad, rounds)
    settings = {"model": "pocket", "threads": options.threads, "quick": options.quick, "seconds": seconds}
    show(
        "overload",
        options.seed,
        {**settings, **told},
        goals,
        options.out,
        quiet=quiet,
    )


@contextmanager
def _served(options: Options, folder: str, *words: str) -> Iterator[Server]:
    """Run a server with two tenants, for the block. ``folder``: for its keys file. ``words``: further
    options."""
    keys = Path(folder, "keys.toml")
    keys.write_text(KEYS)
    with server(
        "pocket", options.threads, "--device", "cpu", "--keys", str(keys), "--no-store", *words
    ) as one:
        yield one


# --- slow readers and half-open connections ------------------------------------------------------------


async def _bad_clients(options: Options, seconds: float, bad: dict[str, int]) -> dict[str, Any]:
    """Measure other sessions' token gaps while no bad client runs, while those of another server on these cores
    do, and while those of the same server do, alternating. ``bad``: how many of each kind, by its name."""
    tokens = QUICK_TOKENS if options.quick else TALK_TOKENS
    with (
        tempfile.TemporaryDirectory() as folder,
        tempfile.TemporaryDirectory() as apart,
        _served(options, folder) as running,
        _served(options, apart) as other,
    ):
        await _gaps(running, seconds / 3, tokens)
        before = memory_bytes(running.gateway)["now"]
        attackers = {
            name: {kind: await _attack(target, kind, count) for kind, count in bad.items()}
            for name, target in (("elsewhere", other), ("beside", running))
        }
        gaps: dict[str, list[float]] = {name: [] for name in ("alone", *attackers)}
        spent = 0.0
        try:
            await _computed(other)
            await _computed(running)
            for _ in range(WINDOWS):
                for name, found in gaps.items():
                    _only(attackers, name)
                    since = cpu_seconds(running.gateway)
                    found += await _gaps(running, seconds / WINDOWS, tokens)
                    spent += cpu_seconds(running.gateway) - since if name == "beside" else 0.0
            growth = memory_bytes(running.gateway)["now"] - before
            gone = [kind for kind, attacker in attackers["beside"].items() if attacker.returncode is not None]
            if gone:
                raise CannotMeasure(f"the bad clients ({gone[0]}) ended early")
        finally:
            _only(attackers, None)
            sent = {
                name: {kind: await _stopped(attacker) for kind, attacker in kinds.items()}
                for name, kinds in attackers.items()
            }
    if not all(gaps.values()):
        raise CannotMeasure("the talking sessions had no tokens")
    p90 = {name: 1000 * percentile(one, 0.9) for name, one in gaps.items()}
    return {
        "gap_p90_ms": p90,
        "gap_p50_ms": {name: 1000 * percentile(one, 0.5) for name, one in gaps.items()},
        "gap_ratio": p90["beside"] / p90["elsewhere"],
        "gap_ratio_to_alone": p90["beside"] / p90["alone"],
        "gaps": {name: len(one) for name, one in gaps.items()},
        "memory_growth_mib": growth / (1 << 20),
        "gateway_cores": spent / seconds,
        "bad_clients": sent["beside"],
    }


def _only(attackers: dict[str, dict[str, asyncio.subprocess.Process]], name: str | None) -> None:
    """Let only the bad clients under ``name`` run, and stop the others; None: let all run."""
    for of, kinds in attackers.items():
        for attacker in kinds.values():
            with suppress(ProcessLookupError):
                attacker.send_signal(signal.SIGCONT if name in (of, None) else signal.SIGSTOP)


async def _gaps(running: Server, seconds: float, tokens: int) -> list[float]:
    """The token gaps, in seconds, of `TALKERS` clients that generate replies of ``tokens`` for ``seconds``."""
    gaps: list[float] = []
    end = time.perf_counter() + seconds

    async def talk(client: Client) -> None:
        while time.perf_counter() < end:
            async with client.session(
                temperature=0, min_output_tokens=tokens, max_output_tokens=tokens
            ) as chat:
                said = [time.perf_counter() async for _ in chat.say("Tell me a long story.")]
            gaps.extend(later - earlier for earlier, later in pairwise(said))

    async with connect(running.url, api_key="victim-key") as client:
        await asyncio.gather(*(talk(client) for _ in range(TALKERS)))
    return gaps


async def _attack(running: Server, kind: str, count: int) -> asyncio.subprocess.Process:
    """Start ``count`` bad clients of one kind, and wait until all are connected. Raises ``CannotMeasure``."""
    command = (
        sys.executable,
        "-m",
        "holdfast.benchmarks.harness.bad_clients",
        kind,
        running.url,
        "attacker-key",
    )
    attacker = await asyncio.create_subprocess_exec(
        *(*command, "--count", str(count)), stdout=asyncio.subprocess.PIPE, env=environment(1, ours=True)
    )
    assert attacker.stdout is not None
    try:
        async with asyncio.timeout(START_SECONDS):
            if await attacker.stdout.readline():
                return attacker
    except TimeoutError:
        attacker.kill()
    await attacker.wait()
    raise CannotMeasure(f"the bad clients ({kind}) did not connect")


async def _stopped(attacker: asyncio.subprocess.Process) -> dict[str, int]:
    """End the process of the bad clients. Returns the counts that it prints."""
    with suppress(ProcessLookupError):
        attacker.terminate()
    said, _ = await attacker.communicate()
    return dict(json.loads(said)) if said else {}


async def _computed(running: Server) -> None:
    """Wait until no turn runs or waits in the engine."""
    end = time.perf_counter() + COMPUTED_SECONDS
    while time.perf_counter() < end:
        told = await asyncio.to_thread(engine_statistics, running.url, OPERATOR)
        if not told["running"] and not told["waiting"]:
            return
        await asyncio.sleep(0.2)
    raise CannotMeasure(f"the slow readers' replies were not computed within {COMPUTED_SECONDS:g} s")


# --- overload ------------------------------------------------------------------------------------------


async def _overload(options: Options, seconds: float) -> list[list[dict[str, Any]]]:
    """The loads of each round, the overload last."""
    with (
        tempfile.TemporaryDirectory() as folder,
        _served(options, folder, "--max-queue-seconds", str(QUEUE_SECONDS)) as running,
    ):
        await _load(options, running, seconds)
        return [await _round(options, running, seconds) for _ in range(options.rounds)]


async def _round(options: Options, running: Server, seconds: float) -> list[dict[str, Any]]:
    loads = [await _load(options, running, seconds)]
    capacity = loads[0]["replies_per_second"]
    if not loads[0]["goodput"]:
        raise CannotMeasure("no reply was completed in time")
    loads += [await _load(options, running, seconds, share * capacity) for share in SHARES]
    best = _best(loads)
    rate = best["offered_per_second"] or best["replies_per_second"]
    return [*loads, await _load(options, running, seconds, OVERLOAD * rate)]


def _best(loads: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return max(loads, key=lambda load: load["goodput"])


def _sum(loads: Sequence[dict[str, Any]], figure: str) -> float:
    return float(sum(load[figure] for load in loads))


async def _load(
    options: Options, running: Server, seconds: float, rate: float | None = None
) -> dict[str, Any]:
    """Send requests for so many seconds, at ``rate`` per second; None: as many as are answered. Returns the
    figures."""
    words = ("--seconds", str(seconds), "--seed", str(options.seed), *(("--rate", str(rate)) if rate else ()))
    before = engine_statistics(running.url, OPERATOR)
    processes = (running.gateway, running.engine)
    spent = [cpu_seconds(one) for one in processes]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "holdfast.benchmarks.harness.arrivals", running.url, "victim-key", *words),
        stdout=asyncio.subprocess.PIPE,
        env=environment(1, ours=True),
    )
    said, _ = await process.communicate()
    if process.returncode:
        raise CannotMeasure("the clients failed")
    told = json.loads(said)
    after = engine_statistics(running.url, OPERATOR)
    replies, refused = len(told["ttft"]), told["refused"]
    begun = [ttft for ttft, at in zip(told["ttft"], told["at"], strict=True) if at <= seconds]
    good = sum(ttft <= SLO_SECONDS for ttft in begun)
    gateway, engine = (cpu_seconds(one) - since for one, since in zip(processes, spent, strict=True))
    return {
        "offered_per_second": rate,
        "replies_per_second": len(begun) / seconds,
        "goodput": good / seconds,
        "replies": replies,
        "ttft_p50_ms": 1000 * percentile(told["ttft"], 0.5),
        "ttft_p90_ms": 1000 * percentile(told["ttft"], 0.9),
        "refused": len(refused),
        "refused_silently": told["silent"],
        "refusal_p50_ms": 1000 * percentile(refused, 0.5) if refused else None,
        "refusal_p99_ms": 1000 * percentile(refused, 0.99) if refused else None,
        "failed": len(told["failed"]),
        "failures": told["failed"][:5],
        "engine_turns": after["turns"] - before["turns"],
        "client_late_p90_ms": 1000 * percentile(told["late"], 0.9),
        "gateway_cpu_seconds": gateway,
        "engine_cpu_seconds": engine,
        "client_cpu_seconds": told["cpu_seconds"],
        "goodput_per_server_cpu_second": good / max(gateway + engine, 0.01),
    }


def _table(bad: dict[str, Any], rounds: list[list[dict[str, Any]]]) -> None:
    gaps = [[rank, *bad[f"gap_{rank}_ms"].values()] for rank in ("p50", "p90")]
    table(
        f"Token gaps of {TALKERS} sessions, alone, with bad clients elsewhere and beside them; ms",
        ["gap", "alone", "elsewhere", "beside"],
        gaps,
    )
    keys = (
        "replies_per_second",
        "goodput",
        "ttft_p50_ms",
        "ttft_p90_ms",
        "refused",
        "refusal_p50_ms",
        "failed",
        "gateway_cpu_seconds",
        "engine_cpu_seconds",
        "client_cpu_seconds",
    )
    rows = [
        [f"{load['offered_per_second']:.1f}" if load["offered_per_second"] else "-"]
        + [load[key] or 0.0 for key in keys]
        for loads in rounds
        for load in loads
    ]
    heads = ["offered /s", "replies /s", "goodput /s", "TTFT p50", "p90", "refused", "refusal ms", "failed"]
    heads += [f"{one} CPU s" for one in ("gateway", "engine", "client")]
    table("Chat Completions that arrive at random", heads, rows)


if __name__ == "__main__":
    raise SystemExit(main())
