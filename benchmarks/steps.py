"""``holdfast bench steps``: a million steps of scheduler, block manager and tiers on a device without tensors.

64 sessions on a pool of 1.05 times what one of them needs: random turns, truncations, forks, leases,
preemption, deaths of the engine. ``tests/runtime/worlds`` predicts every answer, token, ending and bound, so a
checkout is needed. Exits 1 at the first difference, with its seed; another run may pass, as prefill beside
turns depends on step times.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from random import Random
from traceback import extract_tb
from typing import Any

from ..runtime.settings import SchedulerSettings
from .harness.options import run as run_measured
from .host import measure as measure_host
from .report import Goal, show, table

SESSIONS = 64
LONGEST = 80  # tokens of a session
BLOCK_TOKENS = 4
BLOCKS = LONGEST // BLOCK_TOKENS * 105 // 100
CHUNK = 10_000  # steps of one world: then another, with the next seed
REST_EVERY = 200  # steps: the engine is audited when nothing is left to do
SLOTS = 40  # about twice the pool
FIGURES = ("steps", "turns", "moves", "preempted", "deaths")


@dataclass(frozen=True)
class Course:
    """The settings of one run. ``depth``: steps in flight at once. ``slots``: of the host tier, for each KV
    group; None: there is none. ``disk``: there is a disk tier. ``liar``: and one before it that answers late,
    twice, never or wrongly. ``windows``: of the KV groups, in tokens."""

    depth: int
    slots: int | None = None
    disk: bool = False
    liar: bool = False
    windows: tuple[int | None, ...] = (None,)

    @property
    def name(self) -> str:
        tiers = "device" if self.slots is None else "host and disk" if self.disk else "host"
        kind = " with a liar, two groups" if self.liar else ""
        kind += "" if None in self.windows else " with windows"
        return f"{tiers}{kind}, {'overlapped' if self.depth > 1 else 'lock step'}"


TIERS: dict[str, dict[str, Any]] = {
    "device": {},
    "host": {"slots": SLOTS},
    "disk": {"slots": SLOTS, "disk": True},
    "groups": {"slots": SLOTS, "disk": True, "liar": True, "windows": (10, None)},
    "windows": {"slots": SLOTS, "disk": True, "liar": True, "windows": (6, 10)},
}
COURSES = {f"{name}-{depth}": Course(depth, **tiers) for depth in (1, 2) for name, tiers in TIERS.items()}


@dataclass
class Passed:
    """What came of one run: counts, seconds, and as ``mismatch`` the first difference, empty if there was
    none."""

    course: str
    steps: int = 0
    turns: int = 0
    moves: int = 0
    preempted: int = 0
    deaths: int = 0
    seconds: float = 0.0
    mismatch: str = ""

    @property
    def pace(self) -> int:
        return round(self.steps / max(self.seconds, 1e-9))


class Storm:
    """Random clients, by a seed, of one engine and its prediction (``world``)."""

    def __init__(self, course: Course, seed: int) -> None:
        worlds = import_module("holdfast.tests.runtime.worlds")
        fakes = import_module("holdfast.tests.runtime.fakes")
        groups = len(course.windows)
        settings = SchedulerSettings(
            blocks=BLOCKS * groups,
            windows=course.windows,
            vocab_size=worlds.VOCAB,
            max_context=LONGEST,
            block_tokens=BLOCK_TOKENS,
            max_step_tokens=24,
            max_sequences=16,
            depth=course.depth,
            watermark_blocks=seed % 3,
        )
        memory = None if course.slots is None else fakes.fake_memory(course.slots * groups, BLOCK_TOKENS)
        liar = Random(seed + 2) if course.liar else None
        near = seed % 2 == 1 and liar is None
        disk = fakes.FakeDisk(Random(seed + 1), near=near, liar=liar) if course.disk else None
        self.world: Any = worlds.World(settings, Random(seed), memory=memory, disk=disk)
        self.random = Random(seed)

    def rage(self, steps: int, passed: Passed) -> None:
        """Run at least so many steps, and count them in ``passed``. Raises on a difference from the prediction,
        or if the engine's audit fails."""
        while steps > 0:
            stint = min(steps, REST_EVERY)
            began = self.world.steps
            while self.world.steps - began < stint:
                self._trouble()
                self.world.run(self.random.randint(1, 9))
            self.world.run()
            steps -= self.world.steps - began
            passed.steps += self.world.steps - began
            if self.random.random() < 0.1:
                self._count(passed)
                passed.deaths += 1
                self.world.restart()
        self._count(passed)

    def _count(self, passed: Passed) -> None:
        counters = self.world.scheduler.counters
        passed.turns += counters.turns
        passed.preempted += counters.preempted
        passed.moves += self.world.device.moves

    def _trouble(self) -> None:
        world, random = self.world, self.random
        for _ in range(random.randint(0, 3)):
            seq = random.randrange(SESSIONS)
            if seq not in world.beings:
                world.open(seq, self._prompt(), b"tenant" if seq % 5 == 0 else b"")
            elif random.random() < 0.02:
                world.close(seq, keep_kv=random.random() < 0.7)
            elif random.random() < 0.03:
                world.fork(seq, [SESSIONS + random.randrange(4)])
            elif random.random() < 0.02:
                world.evict(seq)
            elif random.random() < 0.1:
                ttl, returns_in = random.choice((None, 0.0, 0.0, 0.5, 5.0)), random.uniform(0.0, 5.0)
                world.lease(seq, random.choice((None, 0, 1)), ttl, random.choice((None, returns_in)))
            elif world.beings[seq].turn is None:
                self._turn(seq)
            elif random.random() < 0.1:
                world.stop(seq)
        for seq in range(SESSIONS, SESSIONS + 4):
            if seq in world.beings and random.random() < 0.1:
                world.close(seq)

    def _turn(self, seq: int) -> None:
        world, random = self.world, self.random
        length = len(world.beings[seq].shadow.tokens)
        if length > LONGEST - 30:
            world.truncate(seq, random.randint(1, length))
        elif random.random() < 0.5:
            world.extend(seq, self._prompt()[: random.randint(1, 12)])
        stop_ids = tuple(random.sample(range(200), random.choice((0, 0, 8))))
        world.generate(seq, random.randint(1, 25), stop_ids=stop_ids)

    def _prompt(self) -> list[int]:
        """The first tokens of one of eight fixed texts, so that prompts share prefixes."""
        story = Random(self.random.randrange(8))
        return [story.randrange(200) for _ in range(self.random.randint(1, 40))]


def run(course: Course, steps: int, seed: int) -> Passed:
    """Run with the settings of ``course`` for so many steps, or to the first mismatch."""
    passed, began = Passed(course.name), time.perf_counter()
    while passed.steps < steps and not passed.mismatch:
        try:
            Storm(course, seed).rage(min(CHUNK, steps - passed.steps), passed)
        except Exception as fault:  # an assertion of the world, a leak, an illegal move of a state
            frame = extract_tb(fault.__traceback__)[-1]
            where = f"{Path(frame.filename).name}:{frame.lineno}"
            passed.mismatch = f"seed {seed}: {type(fault).__name__} at {where}: {fault}"
        seed += 1
    passed.seconds = time.perf_counter() - began
    return passed


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="holdfast bench steps", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=list(COURSES), default=list(COURSES))
    parser.add_argument("--steps", type=int, default=1_000_000, help="of all courses together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--host", action="store_true", help="measure what a step costs the host instead")
    parser.add_argument("--before", type=Path, help="with --host: a checkout of older code to compare with")
    parser.add_argument("--rounds", type=int, default=3, help="with --host: each is a process of its own")
    asked = parser.parse_args(words)
    if asked.host:
        return run_measured("steps_host", lambda: measure_host(asked.before, asked.rounds, asked.seed))
    each = -(-asked.steps // len(asked.only))
    courses = [run(COURSES[name], each, asked.seed) for name in asked.only]
    columns = ("course", *FIGURES, "mismatches", "steps/s")
    rows = [
        (one.course, *(getattr(one, name) for name in FIGURES), int(bool(one.mismatch)), one.pace)
        for one in courses
    ]
    table("Steps under pressure", columns, rows)
    wrong = [one.mismatch for one in courses if one.mismatch]
    goal = Goal("mismatches", len(wrong), "steps", 0, "lower")
    show("steps", asked.seed, {"courses": [vars(one) for one in courses]}, [goal])
    return 1 if wrong else 0
