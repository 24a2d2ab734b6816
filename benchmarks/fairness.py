"""``holdfast bench fairness``: a tenant's TTFT beside another tenant that keeps the engine full.

Each attack is run under each policy of the scheduler, against a new server with two tenants. The attacker
(`harness/flood.py`) sends what any client may, and more than runs at once: 64 talkers, 32 sessions with 8
replies out of band each, or 16 prompts of about 3,000 tokens, again and again. There are three windows of the
same length: the victim takes turns alone; the attacker runs and the victim is idle; both run. The 90th
percentile of the victim's token gaps beside the attack counts as the length of a step. The attacker's
throughput is what the engine computes while the victim is idle, in tokens per second; the goal compares it with
that under first come, first served.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from .floods import LATE_SECONDS, LOOK_SECONDS, STEPS, WARM_TURNS, victim
from .harness.flood import CROWDS
from .harness.options import CannotMeasure, Options, options_of, parser_of, run
from .harness.servers import engine_statistics, server
from .harness.workers import environment
from .report import Goal, percentile, show, table

POLICIES = ("fair_shares", "first_come_first_served")
KEPT = 0.9
QUICK_TOKENS = "32"
"""Of an attacker's reply: under first come, first served the victim waits for the replies of all talkers."""
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
    parser = parser_of("fairness", __doc__, ("pocket",), rounds=1)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each of the three windows")
    parser.add_argument("--warm", type=float, default=5.0, help="seconds of the attack before it is measured")
    parser.add_argument("--only", nargs="+", choices=CROWDS, default=tuple(CROWDS), help="these attacks")
    parser.add_argument("--policy", nargs="+", default=POLICIES, help="these policies, as `serve --policy`")
    parser.add_argument("--json", action="store_true", help="print the JSON, without the tables")
    chosen = parser.parse_args(words)
    options = options_of(chosen)
    seconds, warm = (0.6, 0.3) if chosen.quick else (chosen.seconds, chosen.warm)
    return run(
        "fairness",
        lambda: measure(options, seconds, warm, chosen.only, chosen.policy, quiet=chosen.json),
    )


def measure(
    options: Options,
    seconds: float,
    warm: float,
    names: Sequence[str],
    policies: Sequence[str],
    *,
    quiet: bool,
) -> None:
    found: dict[str, dict[str, dict[str, Any]]] = {}
    goals: list[Goal] = []
    for name in names:
        found[name] = {}
        for policy in policies:
            found[name][policy] = one = asyncio.run(_meet(options, name, policy, seconds, warm))
            if policy == POLICIES[0]:
                ttft, limit = one["beside"]["ttft_p90_ms"], one["limit_ms"]
                goals.append(Goal(f"{name}: p90 TTFT", ttft, "ms", limit, "lower"))
        if set(POLICIES) <= set(policies):
            fair, other = (found[name][policy]["attacker_tokens_per_second"] for policy in POLICIES)
            goals.append(Goal(f"{name}: attacker keeps", fair / max(other, 1e-9), "x", KEPT, "higher"))
    if not quiet:
        _table(found)
    settings = {"model": "pocket", "threads": options.threads, "quick": options.quick, "seconds": seconds}
    show("fairness", options.seed, {**settings, "attacks": found}, goals, options.out, quiet=quiet)


async def _meet(options: Options, name: str, policy: str, seconds: float, warm: float) -> dict[str, Any]:
    """Run the attack ``name`` under one policy. ``seconds``: of each window; ``warm``: of the attack before it
    is measured. Returns the figures."""
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys.toml"
        keys.write_text(KEYS)
        words = ("--device", "cpu", "--keys", str(keys), "--no-store", "--policy", policy)
        with server("pocket", options.threads, *words) as running:
            await victim(running, seconds, turns=WARM_TURNS)
            alone = await victim(running, seconds)
            if not alone.ttft:
                raise CannotMeasure(f"before {name} no turn was completed: {alone.failed[:1]}")
            command = (sys.executable, "-m", "holdfast.benchmarks.harness.flood", name, running.url)
            short = ("--tokens", QUICK_TOKENS) if options.quick else ()
            attacker = await asyncio.create_subprocess_exec(
                *(*command, "attacker-key", str(warm + 2 * seconds + 2 * LATE_SECONDS), *short),
                stdout=asyncio.subprocess.PIPE,
                env=environment(1, ours=True),
            )
            try:
                await _computing(running.url)
                await asyncio.sleep(warm)
                before, began = _statistics(running.url), time.perf_counter()
                await asyncio.sleep(seconds)
                after, took = _statistics(running.url), time.perf_counter() - began
                beside = await victim(running, seconds)
                if attacker.returncode is not None:
                    raise CannotMeasure(f"the attacker of {name} ended early")
            finally:
                with suppress(ProcessLookupError):
                    attacker.kill()
                await attacker.wait()
    sides = {
        side: {
            "ttft_p50_ms": 1000 * percentile(window.ttft, 0.5),
            "ttft_p90_ms": 1000 * percentile(window.ttft, 0.9),
            "ttft_ms": [round(1000 * value, 3) for value in window.ttft],
            "gap_p90_ms": 1000 * percentile(window.gaps, 0.9),
            "turns": len(window.ttft),
            "failed": window.failed[:20],
        }
        for side, window in (("alone", alone), ("beside", beside))
    }
    limit = percentile(alone.ttft, 0.9) + STEPS * percentile(beside.gaps, 0.9)
    gained = {key: after[key] - before[key] for key in ("computed", "steps", "preempted", "displaced")}
    return {
        **sides,
        "limit_ms": 1000 * limit,
        "attacker_tokens_per_second": gained["computed"] / took,
        "attack": {**gained, "running": after["running"], "waiting": after["waiting"]},
    }


async def _computing(url: str) -> None:
    """Wait until the attacker, alone, has the engine compute."""
    before = _statistics(url)["computed"]
    async with asyncio.timeout(LATE_SECONDS):
        while True:
            if _statistics(url)["computed"] > before:
                return
            await asyncio.sleep(LOOK_SECONDS)


def _statistics(url: str) -> dict[str, float]:
    return engine_statistics(url, OPERATOR)


def _table(found: dict[str, dict[str, dict[str, Any]]]) -> None:
    rows = [
        [
            f"{name}, {policy}",
            *(one[side][key] for key in ("ttft_p90_ms", "gap_p90_ms") for side in ("alone", "beside")),
            one["limit_ms"],
            one["attacker_tokens_per_second"],
            one["attack"]["displaced"],
        ]
        for name, policies in found.items()
        for policy, one in policies.items()
    ]
    pairs = [head for name in ("TTFT p90", "gap p90") for head in (name, "beside")]
    title = "A victim beside a tenant that keeps the engine full; ms; tokens/s of the other one alone"
    table(title, ["attack", *pairs, "goal", "tokens/s", "displaced"], rows)
