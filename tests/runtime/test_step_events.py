"""A step is over when its event is: the real runner and mover on a device that works beside the host."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from xxhash import xxh3_64_intdigest

from holdfast.benchmarks.toys import make_toy
from holdfast.kernels.device import CpuDevice
from holdfast.kernels.reference import backend
from holdfast.kvstore.arena import DeviceArena
from holdfast.kvstore.block_mover import BlockMover, Moving
from holdfast.kvstore.host.slots import SlotMemory
from holdfast.runtime.execution.runner import TorchHandle, TorchRunner
from holdfast.runtime.grammar.llguidance import Matchers
from holdfast.runtime.kv_placement.costs import measure
from holdfast.runtime.model.load import load_model
from holdfast.runtime.plan import BlockCopy, BlockLoad, BlockSave, Plan, PlanRow, RowAsks, plan_of
from holdfast.runtime.verbs import Sampling
from holdfast.tests.runtime.fake_device import DigestDecoder, FakeDevice, FakeHasher, digest_arena, place_of
from holdfast.tests.runtime.fake_grammars import FakeMatcher
from holdfast.tests.runtime.fakes import GREEDY, Shadow, fake_memory

BLOCKS, BLOCK, SLOTS, VOCAB = 8, 4, 6, 200


class Parts:
    """A device on which nothing runs before it is waited for, and a runner over it. ``registered``: so are the
    slots; else copies from and to them hold up the host."""

    def __init__(self, *, registered: bool = True) -> None:
        self.arena = digest_arena(BLOCKS, BLOCK)
        self.memory: SlotMemory = fake_memory(SLOTS, BLOCK)
        self.device = FakeDevice(late=True, host=place_of(self.memory))
        self.mover = BlockMover(self.arena, self.memory, device=self.device, hasher=FakeHasher(self.device))
        decoder = DigestDecoder(self.device, VOCAB, frozenset())
        self.runner = TorchRunner(decoder, self.arena, mover=self.mover, device=self.device)  # type: ignore[arg-type]
        if registered:
            self.mover.registration.begin()
        self.step = 0

    def launch(self, *rows: PlanRow, **moves: object) -> TorchHandle:
        self.step += 1
        return self.runner.launch(replace(plan_of(self.step, rows), **moves))  # type: ignore[arg-type]

    def run(self, *rows: PlanRow, **moves: object) -> list:
        return list(self.launch(*rows, **moves).tokens())

    def move(
        self, saves: list[tuple[int, int, int]] | None = None, loads: list[tuple[int, int]] | None = None
    ) -> Moving:
        with self.device.active():
            moving = self.mover.move(saves or [], loads or [])
        assert moving is not None
        return moving

    def mark(self, slot: int) -> bytes:
        """Fill a slot with bytes of its own; returns them."""
        payload = bytes([slot + 1]) * self.memory.block_bytes
        self.memory.payload(slot)[:] = payload
        return payload

    def block(self, block: int) -> bytes:
        return bytes(self.arena.bytes_of(block).numpy())


def row(first: int, tokens: list[int], sampling: Sampling = GREEDY) -> PlanRow:
    table = np.arange(-(-(first + len(tokens)) // BLOCK), dtype=np.int32)
    return PlanRow(0, 0, first, len(tokens), np.array(tokens, dtype=np.int64), table, sampling)


@pytest.fixture
def parts() -> Parts:
    return Parts()


def test_moves_that_are_done_are_made(parts: Parts) -> None:
    """Then slots are free: filling one again must not reach what is copied."""
    payload = parts.mark(3)
    parts.arena.bytes_of(2).fill_(7)
    handle = parts.launch(loads=(BlockLoad(3, 5),), saves=(BlockSave(2, 1, BLOCK),))
    assert list(handle.tokens()) == [] and not handle.moved()
    assert handle.moved(wait=True) and handle.moved()
    assert bytes(parts.memory.payload(1)) == bytes([7]) * parts.memory.block_bytes
    assert parts.memory.record(1).digest == xxh3_64_intdigest(parts.memory.payload(1))
    parts.memory.payload(3)[:] = bytes(len(payload))
    parts.device.synchronize()
    assert parts.block(5) == payload


def test_moves_are_told_done_when_the_device_has_made_them(parts: Parts) -> None:
    parts.mark(3)
    handle = parts.launch(loads=(BlockLoad(3, 5),), saves=(BlockSave(2, 1, 2),))
    looks = 0
    while not handle.moved():
        looks += 1
        assert parts.device.advance(), "told late"
    assert looks == 3 and parts.block(5) == bytes(parts.memory.payload(3))
    assert parts.memory.record(1).digest == xxh3_64_intdigest(parts.memory.payload(1))


def test_tokens_wait_for_no_save_and_for_loads_of_others_neither(parts: Parts) -> None:
    parts.mark(3)
    prompt = [5, 9, 13]
    handle = parts.launch(row(0, prompt), loads=(BlockLoad(3, 5),), saves=(BlockSave(6, 1, BLOCK),))
    assert list(handle.tokens()) == [[Shadow(prompt, VOCAB).next()]]
    assert parts.block(5) != bytes(parts.memory.payload(3)) and not handle.moved()
    handle = parts.launch(row(0, prompt))
    assert list(handle.tokens()) == [[Shadow(prompt, VOCAB).next()]]
    assert parts.block(5) != bytes(parts.memory.payload(3)), "nor does a later step"


def test_a_step_of_copies_alone_is_over_when_they_are(parts: Parts) -> None:
    parts.arena.bytes_of(2).fill_(7)
    parts.run(copies=(BlockCopy(2, 4),))
    assert parts.block(4) == parts.block(2) == bytes([7] * parts.memory.block_bytes)


def test_a_save_comes_after_a_load_of_an_earlier_step_in_flight(parts: Parts) -> None:
    payload = parts.mark(0)
    parts.move(loads=[(0, 3)])
    parts.move([(3, 1, BLOCK)]).done(wait=True)
    assert bytes(parts.memory.payload(1)) == payload


def test_a_save_comes_after_a_copy_of_an_earlier_step_in_flight(parts: Parts) -> None:
    """A fork's own block may be saved while the step that copies it is in flight."""
    parts.arena.bytes_of(2).fill_(7)
    parts.launch(copies=(BlockCopy(2, 4),))
    parts.move([(4, 1, BLOCK)]).done(wait=True)
    assert bytes(parts.memory.payload(1)) == bytes([7] * parts.memory.block_bytes)


@pytest.mark.parametrize("later", [False, True], ids=["by this step", "by a later one"])
def test_a_save_comes_before_a_load_that_writes_its_block(parts: Parts, *, later: bool) -> None:
    parts.arena.bytes_of(2).fill_(7)
    payload = parts.mark(0)
    moves = [parts.move([(2, 1, BLOCK)])] if later else []
    moves.append(parts.move([] if later else [(2, 1, BLOCK)], [(0, 2)]))
    assert all(moving.done(wait=True) for moving in reversed(moves))
    assert parts.block(2) == payload
    assert bytes(parts.memory.payload(1)) == bytes([7] * parts.memory.block_bytes)


@pytest.mark.parametrize("later", [False, True], ids=["by this step", "by a later one"])
@pytest.mark.parametrize("writes", ["a row", "a copy"])
def test_a_save_comes_before_a_step_that_writes_its_block(parts: Parts, writes: str, *, later: bool) -> None:
    parts.arena.bytes_of(0).fill_(7)
    moves = {"saves": (BlockSave(0, 1, BLOCK),)}
    handles = [parts.launch(**moves)] if later else []
    rows, copies = ((row(0, [5]),), ()) if writes == "a row" else ((), (BlockCopy(2, 0),))
    handles.append(parts.launch(*rows, copies=copies, **({} if later else moves)))
    handles[-1].tokens()
    assert parts.block(0) != bytes([7] * parts.memory.block_bytes)
    assert all(handle.moved(wait=True) for handle in handles)
    assert bytes(parts.memory.payload(1)) == bytes([7] * parts.memory.block_bytes)


@pytest.mark.parametrize("later", [False, True], ids=["by this step", "by a later one"])
def test_a_row_or_a_copy_comes_behind_the_loads_of_its_blocks(parts: Parts, *, later: bool) -> None:
    prompt = [5, 9, 13, 2, 7, 8, 1, 3]
    parts.run(row(0, prompt))
    parts.launch(saves=(BlockSave(0, 3, BLOCK), BlockSave(1, 4, BLOCK))).moved(wait=True)
    parts.arena.kv.view(torch.uint8).fill_(7)
    moves = {"loads": (BlockLoad(3, 0), BlockLoad(4, 1))}
    if later:
        parts.launch(**moves)
    handle = parts.launch(row(8, [11]), copies=(BlockCopy(0, 6),), **({} if later else moves))
    assert list(handle.tokens()) == [[Shadow([*prompt, 11], VOCAB).next()]]
    assert parts.block(6) == parts.block(0) == bytes(parts.memory.payload(3))


def test_a_row_comes_behind_a_load_to_a_block_that_it_writes(parts: Parts) -> None:
    """As where a turn that was to have the block is gone: the load must not come over the row."""
    parts.mark(3)
    parts.launch(loads=(BlockLoad(3, 0),))
    parts.run(row(0, [5, 9]))
    parts.device.synchronize()
    assert parts.run(row(2, [7])) == [[Shadow([5, 9, 7], VOCAB).next()]]


def test_blocks_that_follow_each_other_on_both_sides_are_one_copy(parts: Parts) -> None:
    for block in range(BLOCKS):
        parts.arena.bytes_of(block).fill_(block + 1)
    before = parts.device.calls
    moving = parts.move([(3, 1, BLOCK), (6, 5, BLOCK), (2, 0, BLOCK), (4, 2, BLOCK)])
    assert parts.device.calls - before == 2 + 1, "an event behind two copies"
    assert moving.done(wait=True)
    for block, slot in ((3, 1), (6, 5), (2, 0), (4, 2)):
        assert (
            bytes(parts.memory.payload(slot))
            == parts.block(block)
            == bytes([block + 1]) * len(parts.block(0))
        )
    parts.move(loads=[(0, 5), (1, 6), (2, 6), (5, 7)]).done(wait=True)
    assert [parts.block(block) for block in (5, 6, 7)] == [
        bytes(parts.memory.payload(slot)) for slot in (0, 2, 5)
    ]


def test_ids_are_read_behind_their_step(parts: Parts) -> None:
    prompt = [5, 9, 13, 2, 7]
    shadow = Shadow(prompt, VOCAB)
    assert parts.run(row(0, prompt)) == [[shadow.next()]]
    assert parts.run(row(5, [11], Sampling(temperature=1.0, seed=3))) == [
        [Shadow([*prompt, 11], VOCAB).next(Sampling(temperature=1.0, seed=3))]
    ]


def test_a_real_model_says_the_same_on_a_device_that_is_late(tmp_path: Path) -> None:
    """And makes the host wait for nothing but its outcomes, by any of its operations but the reference's
    draw."""
    model = load_model(make_toy("tiny", tmp_path), "cpu", "float32")
    device = FakeDevice(late=True)

    def sample(logits: torch.Tensor, *limits: torch.Tensor, **more: torch.Tensor) -> torch.Tensor:
        drawn = torch.zeros(len(logits), dtype=torch.int64)
        act = lambda: drawn.copy_(backend.sample(logits, *limits, **more))
        device.main.enqueue(act) if device.is_active else act()
        return drawn

    kernels = SimpleNamespace(**{**vars(backend), "sample": sample})
    decoder = model.decoder.computing_by(kernels)  # type: ignore[arg-type]
    said: list[list[object]] = []
    for runs_on in (CpuDevice(), device):
        arena = DeviceArena(model.kv_groups(16)[0], BLOCKS)
        runner = TorchRunner(decoder, arena, device=runs_on)
        ask = Sampling(temperature=1.0, top_k=20, seed=2, repetition_penalty=1.2, logprobs=2)
        table, past = np.arange(3, dtype=np.int32), np.arange(40, dtype=np.int32)
        prompt = PlanRow(0, 0, 0, 20, np.arange(20), table, GREEDY)
        other = PlanRow(1, 0, 0, 33, np.arange(33), table + 3, ask, past=past[:32])
        first = runner.launch(plan_of(1, (prompt, other)))
        fed = PlanRow(0, 0, 20, 1, np.zeros(0, dtype=np.int64), table, GREEDY, fed=True)
        second = runner.launch(plan_of(2, (fed,), copies=(BlockCopy(0, 7),)))
        said.append([*first.tokens(), *second.tokens()])
        assert torch.equal(arena.kv[7], arena.kv[0]) and arena.kv[7].any()
    assert said[0] == said[1] and len({str(one) for one in said[0]}) == 3


def test_a_calibration_times_the_copies_and_not_their_enqueueing(parts: Parts) -> None:
    """By a clock that goes on by a second with each thing that the device does."""
    measured = measure(
        parts.runner,
        slots=SLOTS,
        blocks=BLOCKS,
        block_tokens=BLOCK,
        block_bytes=parts.memory.block_bytes,
        clock=lambda: float(sum(stream.done for stream in parts.device.streams)),
    )
    assert measured.copy == parts.memory.block_bytes, "a block a second"
    assert measured.token > 0.1


def test_memory_is_given_back_when_no_copy_is_in_flight(parts: Parts) -> None:
    payload = parts.mark(0)
    assert parts.device.registered
    parts.runner.launch(replace(plan_of(1, (), loads=(BlockLoad(0, 1),)), saves=(BlockSave(3, 4, BLOCK),)))
    parts.mover.close()
    assert not parts.device.registered
    assert parts.block(1) == payload


# --- draws that wait for masks --------------------------------------------------------------------------------


@pytest.mark.parametrize("refused", [False, True])
def test_a_row_with_a_grammar_is_drawn_when_the_step_before_is_known(refused: bool) -> None:
    """It is computed before that. Where its draw is refused, its step has failed, and no other."""
    parts = Parts()
    grammars = Matchers()
    decoder = DigestDecoder(parts.device, VOCAB, frozenset())
    runner = TorchRunner(decoder, parts.arena, device=parts.device, grammars=grammars)  # type: ignore[arg-type]
    matcher = FakeMatcher((), 5)
    asks = RowAsks(grammar=grammars.add(matcher))
    table = np.arange(BLOCKS, dtype=np.int32)
    start = PlanRow(0, 0, 0, 2, np.array([7, 9]), table, GREEDY, asks=asks)
    fed = PlanRow(0, 0, 2, 1, np.zeros(0, np.int64), table, GREEDY, fed=True, asks=asks)
    first, second = runner.launch(plan_of(1, (start,))), runner.launch(plan_of(2, (fed,)))
    (token,) = first.tokens()[0]
    matcher.take(token)
    matcher.take(1)
    matcher.take(2)  # forced: what comes next leaves 3
    parts.device.refuse(0 if refused else None)
    second.draw()
    parts.device.refuse(None)
    if refused:
        with pytest.raises(torch.OutOfMemoryError):
            second.tokens()
    else:
        assert [token % 5 for token in second.tokens()[0]] == [3]
    again = runner.launch(plan_of(3, (PlanRow(1, 0, 0, 2, np.array([5, 6]), table + 0, GREEDY),)))
    assert list(again.tokens()) == [[Shadow([5, 6], VOCAB).next()]]


# --- launches that fail half way ------------------------------------------------------------------------------


def everything(step: int) -> Plan:
    """A step with all that a step may have: moves, a copy, rows of each kind, log probabilities, edits."""
    asks = Sampling(temperature=1.0, seed=2, logprobs=1, logit_bias=((3, 1.0),))
    rows = (row(0, [5, 9, 13]), replace(row(2, [7], asks), past=np.zeros(2, np.int32)))
    saves = (BlockSave(2, 1, BLOCK), BlockSave(3, 4, 2))
    loads = (BlockLoad(0, 5), BlockLoad(3, 7))
    return replace(plan_of(step, rows, (BlockCopy(5, 6),), loads), saves=saves)


def calls_of_a_launch(registered: bool) -> int:
    """How many calls of the device's `everything` takes, when it is not the first."""
    parts = Parts(registered=registered)
    parts.runner.launch(everything(1)).tokens()
    before = parts.device.calls
    parts.runner.launch(everything(2))
    return parts.device.calls - before


@pytest.mark.parametrize("registered", [True, False])
def test_a_launch_that_fails_half_way_at_any_call_leaves_nothing_running(registered: bool) -> None:
    """What it was to write may be written by others as soon as it has raised: no late copy comes over it. And
    the memory that it took is free."""
    calls = calls_of_a_launch(registered)
    assert calls > 40
    for call in range(calls):
        parts = Parts(registered=registered)
        parts.runner.launch(everything(1)).tokens()  # leaves ids and sampling parameters on the device
        held = parts.device.holds
        parts.device.refuse(call)
        with pytest.raises(torch.OutOfMemoryError) as refused:
            parts.runner.launch(everything(2))
        assert parts.device.holds == held, f"call {call}, {refused.value}"
        marks = {slot: bytes([slot + 1]) * parts.memory.block_bytes for slot in range(SLOTS)}
        for slot, mark in marks.items():
            parts.memory.payload(slot)[:] = mark
        parts.arena.kv.view(torch.uint8).fill_(7)
        while parts.device.advance():
            pass
        assert {slot: bytes(parts.memory.payload(slot)) for slot in marks} == marks, f"call {call}"
        assert parts.arena.kv.view(torch.uint8).eq(7).all(), f"call {call}"
        assert parts.run(row(0, [5, 9])) == [[Shadow([5, 9], VOCAB).next()]]


@pytest.mark.parametrize("behind", [0, 1], ids=["the step", "the step before it"])
def test_a_step_that_fails_when_it_is_waited_for_leaves_nothing_running(behind: int) -> None:
    """Waiting for its event may be refused, too."""
    parts = Parts()
    handles = [parts.runner.launch(everything(step)) for step in range(1, 2 + behind)]
    parts.device.refuse(0)
    with pytest.raises(torch.OutOfMemoryError):
        handles[0].tokens()
    assert not any(stream.queue for stream in parts.device.streams)


def test_memory_that_is_freed_belongs_to_later_work() -> None:
    """On the fake device as by torch on CUDA: another stream reads garbage, the main stream what was there."""
    device = FakeDevice(late=True)
    side, found = device.stream(), [torch.zeros(3, dtype=torch.int64) for _ in range(2)]
    with device.active():
        (numbers,) = device.upload([np.array([1, 2, 3])])
        device.main.copy([(found[0], numbers)])
        side.follow(device.main.record())
        side.copy([(found[1], numbers)])
        kept = numbers + 0
        del numbers
        fetched = device.fetch(kept)
    while device.main.advance():
        pass
    device.synchronize()
    assert found[0].tolist() == fetched.tolist() == [1, 2, 3] and found[1].tolist() != [1, 2, 3]


def test_copies_of_host_memory_that_is_not_registered_hold_up_the_host() -> None:
    for registered in (True, False):
        parts = Parts(registered=registered)
        parts.arena.bytes_of(2).fill_(7)
        parts.move([(2, 1, BLOCK)])
        assert (bytes(parts.memory.payload(1)) == bytes(parts.arena.bytes_of(2).numpy())) is not registered
