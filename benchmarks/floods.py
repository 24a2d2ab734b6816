"""``holdfast bench floods``: what one tenant's floods cost another tenant.

Each flood is sent to a new server. Its attacker has no limits (`harness/flood.py`, a process at the lowest
priority); the victim is promised 50 sessions, opens them one by one with a turn each, and goes on taking turns.
The report compares the victim's TTFT, token gaps and refusals alone and under the flood, and the growth of the
gateway's memory. The 90th percentile of the victim's gaps during the flood counts as the length of an engine
step.

Beside connections that are held without a key, the server has few descriptors, and the victim connects anew for
each turn. Beside those and beside long bodies, its TTFT at the 99th percentile may be 50 ms longer.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from holdfast.sdk import Chat, SDKError, connect

from .harness.flood import FLOODS
from .harness.options import CannotMeasure, Options, options_of, parser_of, run
from .harness.servers import Server, cpu_seconds, memory_bytes, server
from .harness.workers import environment
from .report import Goal, percentile, show, summary, table

PROMISED = 50
STEPS = 3.0
GROWTH_MIB = 64.0
LONGER_MS = 50.0
FILES = 256
LOOK_SECONDS = 0.05
WARM_TURNS = 10
OUT_TOKENS = 12
LENGTH: dict[str, Any] = {"temperature": 0, "min_output_tokens": OUT_TOKENS, "max_output_tokens": OUT_TOKENS}
LATE_SECONDS = 30.0
KEYS = f"""\
[tenants.attacker]
keys = ["attacker-key"]

[tenants.victim]
keys = ["victim-key"]
sessions = {PROMISED}
"""


@dataclass(slots=True)
class Window:
    """What was measured of the victim in one interval. ``ttft``, ``gaps``: in seconds. ``failed``: texts of its
    refused or lost requests. ``opened``: its number of sessions at the end. ``growth``: of the gateway's
    memory, in bytes. ``gateway_cpu``: in seconds, during the ``seconds`` of the interval."""

    ttft: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    opened: int = 0
    growth: int = 0
    gateway_cpu: float = 0.0
    seconds: float = 0.0

    def told(self) -> dict[str, Any]:
        return {
            "turns": len(self.ttft),
            "ttft_ms": summary(1000 * value for value in self.ttft) if self.ttft else None,
            "gap_p50_ms": 1000 * percentile(self.gaps, 0.5),
            "gap_p90_ms": 1000 * percentile(self.gaps, 0.9),
            "sessions": self.opened,
            "failed": self.failed[:20],
            "failures": len(self.failed),
            "memory_growth_mib": self.growth / (1 << 20),
            "gateway_cores": self.gateway_cpu / self.seconds,
        }


def main(words: Sequence[str] | None = None) -> int:
    parser = parser_of("floods", __doc__, ("pocket",), rounds=1)
    parser.add_argument("--seconds", type=float, default=15.0, help="alone, and again under each flood")
    parser.add_argument("--only", nargs="+", choices=FLOODS, default=tuple(FLOODS), help="these floods")
    parser.add_argument("--json", action="store_true", help="print the JSON, without the tables")
    chosen = parser.parse_args(words)
    seconds = 0.6 if chosen.quick else chosen.seconds
    options = options_of(chosen)
    return run("floods", lambda: measure(options, seconds, chosen.only, quiet=chosen.json))


def measure(options: Options, seconds: float, names: Sequence[str], *, quiet: bool) -> None:
    found: dict[str, dict[str, Any]] = {}
    goals: list[Goal] = []
    for name in names:
        alone, flooded, sent = asyncio.run(_flood(options, name, seconds))
        found[name] = {"alone": alone.told(), "flooded": flooded.told(), "attacker": sent}
        if not alone.ttft:
            raise CannotMeasure(f"before {name} no turn was completed: {alone.failed[:1]}")
        limit = percentile(alone.ttft, 0.9) + STEPS * percentile(flooded.gaps, 0.9)
        late, most = "p90 TTFT", 1000 * limit
        ttft = percentile(flooded.ttft, 0.9)
        if not FLOODS[name].opens:
            late, most = "p99 TTFT", 1000 * percentile(alone.ttft, 0.99) + LONGER_MS
            ttft = percentile(flooded.ttft, 0.99)
        goals += [
            Goal(f"{name}: {late}", 1000 * ttft, "ms", most, "lower"),
            Goal(f"{name}: memory growth", flooded.growth / (1 << 20), "MiB", GROWTH_MIB, "lower"),
            Goal(f"{name}: turns lost or refused", float(len(flooded.failed)), "", 0.0, "lower"),
        ]
        if FLOODS[name].opens:
            most = float(alone.opened)
            goals.append(Goal(f"{name}: sessions of {PROMISED}", float(flooded.opened), "", most, "higher"))
    if not quiet:
        _table(found)
    settings = {"model": "pocket", "threads": options.threads, "quick": options.quick, "seconds": seconds}
    show("floods", options.seed, {**settings, "floods": found}, goals, options.out, quiet=quiet)


async def _flood(options: Options, name: str, seconds: float) -> tuple[Window, Window, dict[str, int]]:
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys.toml"
        keys.write_text(KEYS)
        words = ("--device", "cpu", "--keys", str(keys), "--store", str(Path(folder) / "store"))
        held = FLOODS[name].held
        with server("pocket", options.threads, *words, files=FILES if held else None) as running:
            await victim(running, seconds, turns=WARM_TURNS)
            alone = await victim(running, seconds, anew=held)
            command = (sys.executable, "-m", "holdfast.benchmarks.harness.flood", name, running.url)
            attacker = await asyncio.create_subprocess_exec(
                *(*command, "attacker-key", str(seconds)),
                stdout=asyncio.subprocess.PIPE,
                env=environment(1, ours=True),
            )
            try:
                flooded = await victim(running, seconds, anew=held)
                said, _ = await asyncio.wait_for(attacker.communicate(), LATE_SECONDS)
            finally:
                with suppress(ProcessLookupError):
                    attacker.kill()
            if attacker.returncode:
                raise CannotMeasure(f"the attacker of {name} failed")
            return alone, flooded, json.loads(said)


async def victim(running: Server, seconds: float, *, turns: int | None = None, anew: bool = False) -> Window:
    """Take turns as the victim, for so many seconds; or, if ``turns`` is set, so many turns. ``anew``: each on
    a connection of its own, which its TTFT includes. Returns what was measured."""
    window = Window()
    before, spent = memory_bytes(running.gateway)["now"], cpu_seconds(running.gateway)
    began = time.perf_counter()
    watching = asyncio.create_task(_watch(running, before, window))
    try:
        async with AsyncExitStack() as stack:
            client = await stack.enter_async_context(connect(running.url, api_key="victim-key"))
            chats: list[Chat] = []
            while len(window.ttft) < (turns or 0) or (
                turns is None and time.perf_counter() < began + seconds
            ):
                try:
                    async with asyncio.timeout(LATE_SECONDS):
                        if anew:
                            await _anew(running, window)
                            continue
                        if len(chats) < PROMISED:
                            chats.append(await stack.enter_async_context(client.session(**LENGTH)))
                        await _turn(chats[len(window.ttft) % len(chats)], window)
                except (SDKError, TimeoutError) as fault:
                    window.failed.append(f"{type(fault).__name__}: {fault}")
                    await asyncio.sleep(LOOK_SECONDS)
            window.opened = len(chats)
    finally:
        watching.cancel()
    window.seconds = time.perf_counter() - began
    window.gateway_cpu = cpu_seconds(running.gateway) - spent
    return window


async def _anew(running: Server, window: Window) -> None:
    began = time.perf_counter()
    async with connect(running.url, api_key="victim-key") as client, client.session(**LENGTH) as chat:
        await _turn(chat, window, began)


async def _turn(chat: Chat, window: Window, began: float | None = None) -> None:
    began = time.perf_counter() if began is None else began
    said = [time.perf_counter() async for _ in chat.say("My name is Marisol. What is my name?")]
    window.ttft.append(said[0] - began)
    window.gaps += [later - earlier for earlier, later in pairwise(said)]


async def _watch(running: Server, before: int, window: Window) -> None:
    while True:
        window.growth = max(window.growth, memory_bytes(running.gateway)["now"] - before)
        await asyncio.sleep(LOOK_SECONDS)


def _table(found: dict[str, dict[str, Any]]) -> None:
    rows = []
    for name, one in found.items():
        sides = (one["alone"], one["flooded"])
        ttft = [side["ttft_ms"]["p90"] if side["ttft_ms"] else float("nan") for side in sides]
        others = [side[key] for key in ("gap_p90_ms", "sessions") for side in sides]
        costs = [one["flooded"][key] for key in ("failures", "memory_growth_mib", "gateway_cores")]
        rows.append([name, *ttft, *others, *costs])
    pairs = [head for name in ("TTFT p90", "gap p90", "sessions") for head in (name, "flooded")]
    title = "A victim beside one attacker of another tenant; ms; memory and CPU are the gateway's"
    table(title, ["flood", *pairs, "lost", "MiB", "cores"], rows)
