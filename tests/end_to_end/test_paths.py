"""Same output on every path: a second turn with KV that stayed, came from the host tier or from disk, was
computed again, or came up in part and was computed in part, says what the undisturbed one says. Greedy, by the
CPU's kernels in bfloat16 (SmolLM2 packed, as its file is), and by the reference in float32.

The pocket model's own conversations, and others with SmolLM2 where it was fetched; real arena, slots and
LMDB file. What is moved must be the same bytes: the device's blocks are hashed before they are lost and after
they are back. Short here; ``make paths`` runs 200 with each model.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
from xxhash import xxh3_64_intdigest

from holdfast.benchmarks.harness.replay import InlineDisk
from holdfast.kernels.backends import Needs, choose
from holdfast.kvstore.arena import DeviceArena
from holdfast.kvstore.block_mover import BlockMover
from holdfast.kvstore.disk.store import RecordStore
from holdfast.kvstore.host.slots import SlotMemory, make_memory
from holdfast.kvstore.host.tier import HostTier
from holdfast.kvstore.keys import BlockHasher
from holdfast.kvstore.pool import BlockPool
from holdfast.runtime.engine import Engine
from holdfast.runtime.execution.runner import TorchRunner
from holdfast.runtime.model.load import LoadedModel, load_model
from holdfast.runtime.scheduler.scheduler import Scheduler
from holdfast.runtime.settings import SchedulerSettings
from holdfast.runtime.verbs import Close, Extend, Generate, Open, Refusal, Sampling, Settle, TokenLimits, Work

from .smollm2 import needed, smollm2_prompts
from .test_parity import pocket_prompts

BLOCK, SAID, BLOCKS = 16, 20, 128
SLOTS = {"pocket": 384, "smollm2": 96}
SHORT, LONG = {"pocket": 5, "smollm2": 1}, 200
SLOW = [needed, pytest.mark.timeout(600)]
MODELS = (
    ("pocket", "bfloat16", "cpu"),
    ("pocket", "float32", "reference"),
    pytest.param(("smollm2", "bfloat16", "cpu"), marks=SLOW),
    pytest.param(("smollm2", "float32", "cpu"), marks=SLOW),
)
PATHS = ("resident", "host", "disk", "recomputed", "split")


@dataclass
class Stage:
    """An engine with all tiers, and hands on them."""

    engine: Engine
    arena: DeviceArena
    tier: HostTier
    model: LoadedModel
    store: RecordStore
    seq: int = 0

    def turn(self, verb: Open | Extend) -> tuple[list[int], Work]:
        for one in (verb, Generate(0, verb.seq, Sampling(), TokenLimits(SAID))):
            reply = self.engine.apply(one)
            assert not isinstance(reply, Refusal), reply
        said: list[int] = []
        while True:
            step = self.engine.step()
            for row in step.rows if step else ():
                assert row.error is None, row.error
                said += row.tokens
                if row.work is not None:
                    self.rest()
                    return said, row.work

    def rest(self) -> None:
        while self.engine.step() is not None:
            continue

    def hashes(self, seq: int) -> dict[bytes, int]:
        """The device's bytes by key, of the full blocks that it holds of a sequence."""
        index = self.engine.scheduler.pool.index
        blocks = {key: index.block_of(key) for key in self.engine.scheduler._queues[seq].keys}
        return {
            key: xxh3_64_intdigest(self.arena.bytes_of(block).numpy())
            for key, block in blocks.items()
            if block is not None
        }

    def forget(self, seq: int) -> None:
        """Close it, and remove what the disk has of it."""
        names = self.engine.scheduler._queues[seq].names()
        self.engine.apply(Close(0, seq, keep_kv=False))
        self.store.drop(names)

    def lose(self, seq: int, path: str) -> None:
        """So that the next turn has to go by ``path``."""
        if path == "resident":
            return
        offload, tier = self.engine.scheduler.offload, self.tier
        assert not isinstance(self.engine.apply(Settle(0, seq)), Refusal)
        self.rest()
        offload.flush()
        while offload.busy:
            offload.poll(0.0)
            offload.tick(0.0)
        sequence = self.engine.scheduler._queues[seq]
        names = sequence.names()
        self.engine.scheduler.pool.distrust(self.engine.scheduler.pool.index.blocks())
        self.arena.poison(range(BLOCKS))
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
    model = load_model(name, "cpu", dtype, keeping="packed" if kernels == "cpu" else "dequantised")
    backend = choose(kernels, model.decoder.device, Needs(model.decoder.dtype, packed=model.packed))
    model = replace(model, decoder=model.decoder.computing_by(backend.kernels))
    (group,) = model.kv_groups(BLOCK)
    arena = DeviceArena(group, BLOCKS, "cpu")
    arena.poison(range(BLOCKS))
    fd = make_memory(3 * 4096 + SLOTS[model.name] * (group.block_bytes + 4096 + 64))
    tier = HostTier(SlotMemory(fd, bytes(16), group.block_bytes))
    os.close(fd)
    store = RecordStore(tmp_path_factory.mktemp("kv"), bytes(16), group.block_bytes, 256 << 20)
    settings = SchedulerSettings(
        blocks=BLOCKS, vocab_size=model.config.vocab_size, block_tokens=BLOCK, max_context=BLOCKS * BLOCK
    )
    scheduler = Scheduler(
        settings,
        BlockPool(BLOCKS, debug=True),
        BlockHasher(bytes(32), BLOCK),
        model.namespace((group,)),
        tier,
        InlineDisk(tier, store),  # type: ignore[arg-type]
    )
    runner = TorchRunner(model.decoder, arena, mover=BlockMover([arena], tier.memory))
    yield Stage(Engine(scheduler, runner, debug=True, clock=lambda: 0.0), arena, tier, model, store)
    store.close()


def check(stage: Stage, count: int) -> None:
    make = pocket_prompts if stage.model.name == "pocket" else smollm2_prompts
    prompts = make(stage.model.folder, count)
    for number, prompt in enumerate(prompts):
        more = prompts[number - 1][-24:]
        said: dict[str, list[list[int]]] = {}
        for path in PATHS:
            stage.seq += 1
            seq, salt = stage.seq, f"{number} {path}".encode()  # so that no two share blocks
            first, _ = stage.turn(Open(0, seq, salt, prompt))
            before = stage.hashes(seq)
            stage.lose(seq, path)
            second, work = stage.turn(Extend(0, seq, more))
            said[path] = [first, second]
            check_work(path, work, len(more) + 1)
            if path in ("host", "disk"):
                assert before and before.items() <= stage.hashes(seq).items(), "moved bytes are the same"
            stage.forget(seq)
        assert all(one == said["resident"] for one in said.values()), (number, said)


def check_work(path: str, work: Work, new: int) -> None:
    """The turn went the way it was to go."""
    again = work.recomputed
    assert work.prefilled == new
    assert (work.resident > 0) == (path == "resident")
    assert (work.host > 0) == (path in ("host", "split"))
    assert (work.disk > 0) == (path == "disk")
    assert (again > 0) == (path in ("recomputed", "split"))


def test_every_path_says_the_same(stage: Stage) -> None:
    check(stage, SHORT[stage.model.name])


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_every_path_says_the_same_in_200_conversations(stage: Stage) -> None:
    check(stage, LONG)
