"""``holdfast bench fork``: the time of a fork in the engine, by length and number of children.

Runs the real scheduler, pool and block manager on a device that computes nothing. A fork touches no tensor; it
is timed as the verb alone, for parents that are idle and for parents that generate. So is the verb that appends
a child's first own tokens, which copies the token ids that it shares. Block copies and blocks are counted, not
timed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import count
from typing import Any

from ..kvstore.keys import BlockHasher
from ..kvstore.pool import BlockPool
from ..runtime.scheduler.scheduler import Scheduler
from ..runtime.settings import SchedulerSettings
from ..runtime.verbs import Close, Extend, Fork, Generate, Open, Sampling, SequenceVerb, TokenLimits
from .harness.options import Options, options_of, parser_of, run
from .harness.replay import VOCABULARY, ReplayedStep
from .report import Goal, show, summary, table

LENGTHS = (64, 1024, 4096, 32768, 131072)
CHILDREN = (1, 8, 64)
BLOCK = 16
PART = 9  # tokens in the parent's last block, so that there is a tail to copy
MOST_US = 200.0
BRANCHES, PREFIX, OWN = 16, 4096, 64
MOST_MEMORY = 1.2


class ForkStage:
    """A scheduler with one parent sequence of ``length`` tokens, all computed but the last, and with room for
    ``children`` forks of it."""

    def __init__(self, length: int, *, children: int) -> None:
        blocks = -(-length // BLOCK) + 8 * (children + 1)
        context = blocks * BLOCK
        settings = SchedulerSettings(
            blocks=blocks,
            vocab_size=VOCABULARY,
            max_context=context,
            block_tokens=BLOCK,
            max_step_tokens=max(8192, 2 * children),
            max_sequences=max(64, children + 1),
        )
        pool = BlockPool(blocks)
        self.scheduler = Scheduler(settings, pool, BlockHasher(bytes(16), BLOCK))
        self._numbers = count(1)
        self.parent = next(self._numbers)
        self.apply(Open(0, self.parent, b"", [at % VOCABULARY for at in range(length)]))
        self.rest()

    def apply(self, verb: SequenceVerb) -> float:
        began = time.perf_counter()
        self.scheduler.apply(verb, 0.0)
        return time.perf_counter() - began

    def step(self) -> bool:
        """Run one step. Returns False if there was nothing to do."""
        plan = self.scheduler.plan(0.0)
        if plan is not None:
            self.scheduler.commit(plan, ReplayedStep(plan).tokens(), 0.0)
        return plan is not None

    def rest(self) -> None:
        while self.step():
            continue

    def generate(self, seq: int, tokens: int) -> None:
        self.apply(Generate(0, seq, Sampling(), TokenLimits(tokens)))

    def fork(self, children: int) -> tuple[list[int], float]:
        made = [next(self._numbers) for _ in range(children)]
        return made, self.apply(Fork(0, self.parent, made))

    def close(self, seqs: Sequence[int]) -> None:
        for seq in seqs:
            self.apply(Close(0, seq, keep_kv=False))

    @property
    def held(self) -> int:
        return self.scheduler.pool.statistics()["held"]

    @property
    def copies(self) -> int:
        return self.scheduler.counters.copies


def main(words: Sequence[str] | None = None) -> int:
    options = options_of(parser_of("fork", __doc__, (), rounds=30).parse_args(words))
    return run("fork", lambda: measure(options))


def measure(options: Options) -> None:
    lengths = LENGTHS[:2] if options.quick else LENGTHS
    figures: dict[str, Any] = {}
    rows: list[list[object]] = []
    for length in lengths:
        on = {str(children): _timed(length, children, options) for children in CHILDREN}
        rows += [_line(length, children, one) for children, one in on.items()]
        figures[str(length)] = on
    heads = [
        "tokens, children",
        "idle parent",
        "p90",
        "generating",
        "p90",
        "first own tokens",
        "copied blocks",
    ]
    table("engine time of a fork, median µs", heads, rows)
    memory = _memory()
    goals = []
    for tokens, on in figures.items():
        for parent in ("idle", "generating"):
            name = f"fork of {tokens} tokens, {parent} parent"
            goals.append(Goal(name, on["1"][parent]["median"], "µs", MOST_US, "lower"))
    goals += [
        Goal("blocks copied per child", _most_copies(figures), "blocks", 1, "lower"),
        Goal("16 branches ÷ one and their own tokens", memory["ratio"], "x", MOST_MEMORY, "lower"),
    ]
    show("fork", options.seed, {**options.told(), "fork_us": figures, "memory": memory}, goals, options.out)


def _timed(length: int, children: int, options: Options) -> dict[str, Any]:
    """The microseconds of each fork of ``length`` tokens into ``children``: first from an idle, then from a
    generating parent; also of the children's first own tokens, and the most blocks copied per child."""
    stage = ForkStage(length - length % BLOCK + PART, children=children)
    seconds: dict[str, list[float]] = {"idle": [], "generating": [], "first_own_tokens": []}
    copied = 0.0
    for _ in range(options.rounds):
        made, took = stage.fork(children)
        seconds["idle"].append(took)
        before = stage.copies
        seconds["first_own_tokens"] += _begin(stage, made)
        copied = max(copied, (stage.copies - before) / children)
        stage.close(made)
    stage.generate(stage.parent, 4 * options.rounds)
    for _ in range(options.rounds):
        stage.step()
        made, took = stage.fork(children)
        seconds["generating"].append(took)
        stage.close(made)
    list(stage.scheduler.audit_in_slices())
    told = {name: summary(1e6 * took for took in runs) for name, runs in seconds.items()}
    return {**told, "copied_blocks_per_child": copied}


def _begin(stage: ForkStage, children: Sequence[int]) -> list[float]:
    """Append a first own token to each child and let it generate one. Returns the seconds of each verb that
    appended."""
    took = [stage.apply(Extend(0, seq, [2])) for seq in children]
    for seq in children:
        stage.generate(seq, 1)
    stage.rest()
    return took


def _memory() -> dict[str, float]:
    """Blocks held by one prefix, by 16 branches of it with own tokens, and by these own tokens alone; and the
    ratio of the branches to the sum of the other two."""
    stage = ForkStage(PREFIX + PART, children=BRANCHES)
    one = stage.held
    made, _ = stage.fork(BRANCHES)
    for seq in made:
        stage.generate(seq, OWN)
    stage.rest()
    list(stage.scheduler.audit_in_slices())
    own = BRANCHES * OWN / BLOCK
    return {"one": one, "branches": stage.held, "own": own, "ratio": stage.held / (one + own)}


def _line(length: int, children: str, on: dict[str, Any]) -> list[object]:
    idle, generating, first = on["idle"], on["generating"], on["first_own_tokens"]
    times = [idle["median"], idle["p90"], generating["median"], generating["p90"], first["median"]]
    return [f"{length}, {children}", *(round(one, 1) for one in times), on["copied_blocks_per_child"]]


def _most_copies(figures: dict[str, Any]) -> float:
    most: float = max(one["copied_blocks_per_child"] for on in figures.values() for one in on.values())
    return most
