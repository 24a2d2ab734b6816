"""Same output on every path: a second turn with KV that stayed, came from the host tier or from disk, was
computed again, or came up in part and was computed in part, says what the undisturbed one says. So do turns
in a fork, after a rewind to a turn's end, turns whose input streams in, turns in the company of others, and a
turn in which the engine was killed. Greedy, by the CPU's kernels in bfloat16 (SmolLM2 packed, as its file is),
and by the reference in float32. Toys shaped as Gemma 3 and as Mistral have windows that are shorter than a
prompt.

The pocket model's own conversations, and others with SmolLM2 where it was fetched; real arena, slots and
LMDB file. What is moved must be the same bytes: the device's blocks are hashed before they are lost and after
they are back. Short here; ``make paths`` runs 200 with each model.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path
from random import Random

import pytest
from xxhash import xxh3_64_intdigest

from holdfast.benchmarks.harness.replay import InlineDisk
from holdfast.benchmarks.toys import make_toy
from holdfast.kernels.backends import Needs, choose
from holdfast.kvstore.arena import DeviceArena
from holdfast.kvstore.block_mover import BlockMover
from holdfast.kvstore.disk.messages import Begin
from holdfast.kvstore.disk.store import RecordStore
from holdfast.kvstore.host.slots import SlotMemory, make_memory
from holdfast.kvstore.host.tier import HostTier
from holdfast.kvstore.keys import BlockHasher
from holdfast.kvstore.pool import BlockPool
from holdfast.kvstore.tiers import Tiers
from holdfast.runtime.engine import Engine
from holdfast.runtime.execution.runner import TorchRunner
from holdfast.runtime.model.load import LoadedModel, load_model
from holdfast.runtime.scheduler.scheduler import Scheduler
from holdfast.runtime.settings import SchedulerSettings
from holdfast.runtime.verbs import (
    AnyVerb,
    Close,
    Extend,
    Fork,
    Generate,
    KVTier,
    Locate,
    Open,
    Opening,
    Sampling,
    Settle,
    TokenLimits,
    Truncate,
    VerbReply,
    Work,
)

from .smollm2 import needed, smollm2_prompts
from .test_parity import pocket_prompts

BLOCK, SAID, BLOCKS = 16, 20, 128
SLOTS = {"smollm2": 96}
SHORT, LONG = {"smollm2": 1}, 200
TOYS = ("gemma3_text", "mistral")
SLOW = [needed, pytest.mark.timeout(600)]
MODELS = (
    ("pocket", "bfloat16", "cpu"),
    ("pocket", "float32", "reference"),
    *(
        (toy, dtype, kernels)
        for toy in TOYS
        for dtype, kernels in (("bfloat16", "cpu"), ("float32", "reference"))
    ),
    pytest.param(("smollm2", "bfloat16", "cpu"), marks=SLOW),
    pytest.param(("smollm2", "float32", "cpu"), marks=SLOW),
)
TIERS = ("resident", "host", "disk", "recomputed", "split")
WHERE = {"resident": KVTier.DEVICE, "host": KVTier.HOST, "disk": KVTier.DISK, "recomputed": KVTier.NONE}
PATHS = (*TIERS, "forked", "rewound", "streamed", "company", "killed")
BESIDE, SAID_BESIDE, SAID_BEFORE = 3, 30, 7
"""Other sequences in company, and their tokens; tokens of a turn before the engine is killed."""


@dataclass
class Stage:
    """An engine with all tiers, and hands on them."""

    arena: DeviceArena
    memory: SlotMemory
    model: LoadedModel
    store: RecordStore
    windows: tuple[int | None, ...]
    seq: int = 0

    def begin(self) -> None:
        """Begin an engine; what the one before had on the device and in its own memory is lost."""
        self.arena.poison(range(len(self.arena.kv)))
        self.tier = HostTier(self.memory)
        settings = SchedulerSettings(
            blocks=len(self.arena.kv),
            windows=self.windows,
            vocab_size=self.model.config.vocab_size,
            block_tokens=BLOCK,
            max_context=BLOCKS * BLOCK,
        )
        scheduler = Scheduler(
            settings,
            BlockPool(len(self.arena.kv), debug=True),
            BlockHasher(bytes(32), BLOCK),
            self.model.namespace(),
            Tiers(self.tier, (InlineDisk(self.memory, self.store),)),
        )
        runner = TorchRunner(self.model.decoder, self.arena, mover=BlockMover(self.arena, self.memory))
        self.engine = Engine(scheduler, runner, debug=True, clock=lambda: 0.0)

    def do(self, verb: AnyVerb) -> VerbReply:
        reply = self.engine.apply(verb)
        assert isinstance(reply, VerbReply), reply
        return reply

    def first_tier(self, seq: int) -> KVTier:
        """Where the first block is said to be; one that nothing needs is where the next is."""
        blocks = self.do(Locate(0, seq)).blocks
        assert blocks is not None
        return blocks.runs[0].tier

    def turn(self, verb: Open | Extend, said_before: int = 0, most: int = SAID) -> tuple[list[int], Work]:
        """Begin a turn, which ends after ``most`` tokens of ``SAID``."""
        self.do(verb)
        self.do(Generate(0, verb.seq, Sampling(), TokenLimits(SAID), said_before))
        said: list[int] = []
        while True:
            step = self.engine.step()
            for row in step.rows if step else ():
                assert row.error is None, row.error
                if row.seq != verb.seq:
                    continue
                said += row.tokens
                if row.work is not None:
                    self.rest()
                    return said, row.work
                if len(said) == most:
                    return said, Work(0, 0, 0, most)

    def streamed(self, seq: int, tokens: list[int], pieces: Iterator[int]) -> list[int]:
        """Tokens that come in pieces, with steps between them. Returns the last ones."""
        while len(tokens) > (size := next(pieces)):
            self.do(Extend(0, seq, tokens[:size]))
            self.engine.step()
            tokens = tokens[size:]
        return tokens

    def company(self, number: int, prompts: list[list[int]]) -> list[int]:
        """Turns of other sequences, which have begun. Returns their numbers."""
        seqs = [self.seq + 1 + at for at in range(BESIDE)]
        self.seq += BESIDE
        for at, seq in enumerate(seqs, 1):
            prompt, opening = prompts[(number + at) % len(prompts)], Opening(f"beside {seq}".encode())
            self.do(Generate(0, seq, Sampling(), TokenLimits(SAID_BESIDE), 0, prompt[at:], opening))
            self.engine.step()
        return seqs

    def rest(self) -> None:
        while self.engine.step() is not None:
            continue

    def names(self, seq: int) -> list[bytes]:
        """The keys of the records that it may have."""
        manager = self.engine.scheduler._block_manager
        return manager.residency.names(self.engine.scheduler._queues[seq])

    def hashes(self, names: Iterable[bytes]) -> dict[bytes, int]:
        """The device's bytes by key, of the full blocks that it holds of these."""
        index = self.engine.scheduler.pool.index
        blocks = {key: index.here.get(key) for key in names}
        return {
            key: xxh3_64_intdigest(self.arena.bytes_of(block).numpy())
            for key, block in blocks.items()
            if block is not None
        }

    def forget(self, seq: int) -> None:
        """Close it, and remove what the disk has of it."""
        names = self.names(seq)
        self.engine.apply(Close(0, seq, keep_kv=False))
        self.store.drop(names)

    def lose(self, seq: int, path: str) -> None:
        """So that the next turn has to go by ``path``."""
        if path == "resident":
            return
        placement, tiers, tier = self.engine.scheduler.placement, self.engine.scheduler.tiers, self.tier
        assert self.engine.apply(Settle(0, seq)) is None  # it waits
        self.rest()
        tiers.flush()
        while tiers.busy:
            placement.tick(0.0)
        names = self.names(seq)
        self.engine.scheduler.pool.distrust([*self.engine.scheduler.pool.index.here.values()])
        self.arena.poison(range(len(self.arena.kv)))
        lost = {"host": [], "disk": names, "recomputed": names, "split": names[len(names) // 2 :]}[path]
        for key in lost:
            tier.drop(key)
            if path != "disk":
                self.store.drop([key])


@pytest.fixture(scope="module", params=MODELS, ids=str)
def stage(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    name, dtype, kernels = request.param
    if kernels == "cpu":
        pytest.importorskip("numba")
    found = make_toy("tiny", tmp_path_factory.mktemp("toy"), family=name, noise=0.3) if name in TOYS else name
    model = load_model(found, "cpu", dtype, keeping="packed" if kernels == "cpu" else "dequantised")
    backend = choose(kernels, model.decoder.device, Needs(model.decoder.dtype, packed=model.packed))
    model = replace(model, decoder=model.decoder.computing_by(backend.kernels))
    groups = model.kv_groups(BLOCK)
    group = groups[0]
    arena = DeviceArena(group, BLOCKS * len(groups), "cpu")
    fd = make_memory(3 * 4096 + SLOTS.get(name, 384 * len(groups)) * (group.block_bytes + 4096 + 64))
    memory = SlotMemory(fd, bytes(16), group.block_bytes)
    os.close(fd)
    store = RecordStore(Begin(str(tmp_path_factory.mktemp("kv")), bytes(16), group.block_bytes, 256 << 20))
    stage = Stage(arena, memory, replace(model, name=name), store, tuple(group.window for group in groups))
    stage.begin()
    yield stage
    store.close()


def check(stage: Stage, count: int) -> None:
    make = {"pocket": pocket_prompts, "smollm2": smollm2_prompts}.get(stage.model.name, toy_prompts)
    prompts = make(stage.model.folder, count)
    for number, prompt in enumerate(prompts):
        more = prompts[number - 1][-24:]
        said: dict[str, list[list[int]]] = {}
        for path in PATHS:
            stage.seq += 1
            seq, salt = stage.seq, f"{number} {path}".encode()  # so that no two share blocks
            if path not in TIERS:
                said[path] = two_turns(stage, path, number, prompts, more)
                continue
            first, _ = stage.turn(Open(0, seq, salt, prompt))
            before = stage.hashes(stage.names(seq))
            stage.lose(seq, path)
            if path in WHERE:
                assert stage.first_tier(seq) is WHERE[path]
            second, work = stage.turn(Extend(0, seq, more))
            said[path] = [first, second]
            check_work(path, work, len(more) + 1, windows=stage.windows != (None,))
            if path in ("host", "disk"):
                assert before and before == stage.hashes(before), "moved bytes are the same"
            stage.forget(seq)
        assert all(one == said["resident"] for one in said.values()), (number, said)


def two_turns(
    stage: Stage, path: str, number: int, prompts: list[list[int]], more: list[int]
) -> list[list[int]]:
    """What both turns say, on one of the paths besides the tiers."""
    seq, salt, prompt = stage.seq, f"{number} {path}".encode(), prompts[number]
    pieces = cycle((1, 7, 16, 3, 40))
    beside: list[int] = []
    if path == "company":
        beside = stage.company(number, prompts)
    if path == "streamed":
        stage.do(Open(0, seq, salt, prompt[:2]))
        first, _ = stage.turn(Extend(0, seq, stage.streamed(seq, prompt[2:], pieces)))
        more = stage.streamed(seq, more, pieces)
    else:
        first, _ = stage.turn(Open(0, seq, salt, prompt))
    if path == "company":
        beside += stage.company(number, prompts)
    if path == "forked":
        stage.seq += 1
        stage.do(Fork(0, seq, [stage.seq]))
        stage.do(Close(0, seq))
        seq = stage.seq
    if path == "rewound":
        length = len(prompt) + len(first)
        for said in (prompts[number - 1][:70], more):
            stage.turn(Extend(0, seq, said))
            stage.do(Truncate(0, seq, length, stage.engine.scheduler.state(seq).epoch))
    if path == "killed":
        second, _ = stage.turn(Extend(0, seq, more), most=SAID_BEFORE)
        stage.begin()
        whole = [*prompt, *first, *more, *second]
        second += stage.turn(Open(0, seq, salt, whole), SAID_BEFORE)[0]
    else:
        second, work = stage.turn(Extend(0, seq, more))
        assert path == "company" or not work.recomputed
    for one in (seq, *beside):
        stage.forget(one)
    for key in list(stage.tier.in_order()):  # of parents and of engines before: the next path needs the room
        stage.tier.drop(key)
    return [first, second]


def toy_prompts(folder: Path, count: int) -> list[list[int]]:
    random = Random(count)
    return [[random.randrange(256) for _ in range(random.randint(5, 200))] for _ in range(count)]


def check_work(path: str, work: Work, new: int, *, windows: bool) -> None:
    """The turn went the way it was to go. Without its last blocks of a window no beginning is of use."""
    again = work.recomputed
    assert work.prefilled == new
    assert (work.resident > 0) == (path == "resident")
    assert (work.host > 0) == (path in ("host", "split")) or (windows and path == "split")
    assert (work.disk > 0) == (path == "disk")
    assert (again > 0) == (path in ("recomputed", "split"))


def test_every_path_says_the_same(stage: Stage) -> None:
    check(stage, SHORT.get(stage.model.name, 5))


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_every_path_says_the_same_in_200_conversations(stage: Stage) -> None:
    check(stage, LONG)
