"""The torch runner on hand-made plans: what it computes, feeds on, copies and reports; no scheduler."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3ForCausalLM

from holdfast.benchmarks.toys import make_toy
from holdfast.kernels.device import device_of
from holdfast.kvstore.arena import DeviceArena
from holdfast.kvstore.block_mover import BlockMover
from holdfast.kvstore.groups import HeadLayout, KVGroup
from holdfast.kvstore.host.slots import SlotMemory, make_memory
from holdfast.runtime.execution import sampler
from holdfast.runtime.execution.runner import TorchRunner
from holdfast.runtime.model.decoder import Decoder
from holdfast.runtime.model.load import LoadedModel, load_model
from holdfast.runtime.plan import (
    BlockCopy,
    BlockSave,
    Changes,
    Handle,
    PlanRow,
    RowAsks,
    RowFault,
    Scored,
    plan_of,
)
from holdfast.runtime.verbs import Sampling, TokenLogprob
from holdfast.tests.runtime.fakes import in_slots

BLOCKS, BLOCK = 128, 16
GREEDY = Sampling()
WARM = Sampling(temperature=1.0, top_k=20, top_p=0.95, seed=7)
CUDA = pytest.param(
    "cuda",
    marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")],
)
DEVICES = ["cpu", CUDA]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_toy("tiny", tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def model(folder: Path) -> LoadedModel:
    return load_model(folder, "cpu", "float32")


def ids_of(handle: Handle) -> list[Any]:
    """Of each row the one token that was drawn, None where none was, or its fault."""
    outcomes = handle.tokens()
    assert all(len(one) <= 1 for one in outcomes if isinstance(one, list))
    return [(one[0] if one else None) if isinstance(one, list) else one for one in outcomes]


class Bench:
    """A runner over a poisoned arena, and plans for it by hand."""

    def __init__(self, model: LoadedModel) -> None:
        device = model.decoder.device
        groups = model.kv_groups(BLOCK)
        blocks = BLOCKS * len(groups)
        self.arena = DeviceArena(groups[0], blocks, device)
        self.arena.poison(range(blocks))
        self.runner = TorchRunner(model.decoder, self.arena)
        self.step = 0
        order = np.random.default_rng(4).permutation(blocks).astype(np.int32)
        self.tables = order.reshape(16, len(groups), -1)

    def row(
        self, seq: int, first: int, tokens: Iterable[int], sampling: Sampling | None = None, **more
    ) -> PlanRow:
        ids = np.array(list(tokens), dtype=np.int64)
        count = 1 if "fed" in more else len(ids)
        return PlanRow(seq, 0, first, count, ids, more.pop("table", self.tables[seq]), sampling, **more)

    def launch(self, *rows: PlanRow, copies: tuple[BlockCopy, ...] = ()):
        self.step += 1
        return self.runner.launch(in_slots(plan_of(self.step, rows, copies), [row.seq for row in rows]))

    def run(self, *rows: PlanRow, copies: tuple[BlockCopy, ...] = ()) -> list[Any]:
        return ids_of(self.launch(*rows, copies=copies))

    def say(self, seq: int, prompt: list[int], count: int, sampling: Sampling = GREEDY) -> list[Any]:
        """A prompt and ``count`` tokens after it, alone."""
        said = self.run(self.row(seq, 0, prompt, sampling))
        while len(said) < count:
            said += self.run(self.row(seq, len(prompt) + len(said) - 1, said[-1:], sampling))
        return said


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 256, length).tolist()


def test_greedy_tokens_are_those_of_generate(model: LoadedModel, folder: Path) -> None:
    reference = Qwen3ForCausalLM.from_pretrained(folder).eval()
    for seed, length in enumerate((1, 15, 16, 40)):
        ids = torch.tensor([prompt(length, seed)])
        expected = reference.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=32, do_sample=False, pad_token_id=0
        )[0, length:].tolist()
        assert len(set(expected)) > 8, "the toy must vary"
        assert Bench(model).say(0, prompt(length, seed), 32) == expected


def test_rows_of_every_kind_in_one_step(model: LoadedModel) -> None:
    """A chunk without a draw, the end of a prompt, single tokens and a draw, each as it would be alone."""
    alone = [
        Bench(model).say(0, prompt(length, length), 3, how) for length, how in ((20, GREEDY), (33, WARM))
    ]
    bench = Bench(model)
    first = bench.run(
        bench.row(0, 0, prompt(20, 20), GREEDY),
        bench.row(1, 0, prompt(33, 33)[:30]),
        bench.row(2, 0, prompt(5)),
    )
    assert first == [alone[0][0], None, None]
    second = bench.run(
        bench.row(1, 30, prompt(33, 33)[30:], WARM),
        bench.row(2, 5, prompt(1)),
        bench.row(0, 20, first[:1], GREEDY),
    )
    assert second == [alone[1][0], None, alone[0][1]]
    third = bench.run(bench.row(0, 21, second[2:], GREEDY), bench.row(1, 33, second[:1], WARM))
    assert third == [alone[0][2], alone[1][1]]


@pytest.mark.parametrize("at_once", [3, 128])
def test_the_scores_of_prompts_are_those_of_the_reference(
    model: LoadedModel, folder: Path, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two prompts in chunks, beside rows without scores; part of a chunk may have them already."""
    monkeypatch.setattr(sampler, "SCORED_AT_ONCE", at_once)
    reference = Qwen3ForCausalLM.from_pretrained(folder).eval()
    bench, told = Bench(model), dict[int, list[TokenLogprob]]()
    prompts = {seq: prompt(length, seq) for seq, length in ((0, 30), (1, 9))}

    def scored(seq: int, first: int, end: int, since: int, top: int, how: Sampling | None = None) -> PlanRow:
        ids = np.array(prompts[seq][since + 1 : end + 1], dtype=np.int64)
        asks = RowAsks(scored=ids, scored_from=since, scored_top=top)
        return bench.row(seq, first, prompts[seq][first:end], how, asks=asks)

    steps = [
        [bench.row(2, 0, prompt(5), GREEDY), scored(0, 0, 14, 0, 2), scored(1, 0, 9, 0, 0, GREEDY)],
        [scored(0, 14, 20, 16, 2), bench.row(2, 5, [7], Sampling(logprobs=1))],
        [bench.row(3, 0, prompt(4)), scored(0, 20, 30, 20, 2, Sampling(logprobs=3))],
    ]
    for rows in steps:
        for row, outcome in zip(rows, bench.launch(*rows).tokens(), strict=True):
            has = isinstance(outcome, Scored) and bool(outcome.prompt)
            assert has is (row.asks.scored is not None)
            if isinstance(outcome, Scored):
                told.setdefault(row.seq, []).extend(outcome.prompt)
                logprobs = row.sampling.logprobs if row.sampling is not None else None
                assert len(outcome.logprobs) == (logprobs is not None)
    for seq, top in ((0, 2), (1, 0)):
        ids = torch.tensor([prompts[seq]])
        expected = reference(ids).logits[0].log_softmax(-1)
        positions = [at for at in range(len(prompts[seq]) - 1) if seq == 1 or at not in (14, 15)]
        for at, score in zip(positions, told[seq], strict=True):
            assert score.logprob == pytest.approx(expected[at, prompts[seq][at + 1]].item(), abs=1e-4)
            best = expected[at].topk(top)
            assert [token for token, _ in score.top] == best.indices.tolist()
            assert [value for _, value in score.top] == pytest.approx(best.values.tolist(), abs=1e-4)


def test_a_draw_is_decided_by_seed_and_position_in_any_company(model: LoadedModel) -> None:
    alone = Bench(model).say(0, prompt(12), 8, WARM)
    assert alone != Bench(model).say(0, prompt(12), 8, Sampling(1.0, 20, 0.95, seed=8))
    bench = Bench(model)
    others = [Sampling(), Sampling(0.5, seed=1), Sampling(1.5, top_p=0.3, seed=2)]
    rows = [bench.row(seq, 0, prompt(9, seq), others[seq]) for seq in range(3)]
    assert bench.run(*rows, bench.row(3, 0, prompt(12), WARM))[3] == alone[0]
    for at in range(7):
        rows = [bench.row(seq, 9 + at, [seq], others[seq]) for seq in range(3)]
        assert bench.run(bench.row(3, 12 + at, alone[at : at + 1], WARM), *rows)[0] == alone[at + 1]


@pytest.mark.parametrize("seed", [2**63, 2**40 + 1, -1, 2**64 + 5])
def test_any_whole_number_is_a_seed(seed: int, model: LoadedModel) -> None:
    draws = Bench(model).say(0, prompt(4), 6, Sampling(1.0, seed=seed))
    assert draws == Bench(model).say(0, prompt(4), 6, Sampling(1.0, seed=seed % 2**64))
    if 0 < seed < 2**64:
        assert draws != Bench(model).say(0, prompt(4), 6, Sampling(1.0, seed=seed % 2**32))


@pytest.mark.parametrize("device", DEVICES)
def test_sampled_tokens_feed_the_next_step_before_they_are_read(device: str, folder: Path) -> None:
    model = load_model(folder, device, "float32")
    expected = [Bench(model).say(0, prompt(seq + 3, seq), 5) for seq in range(3)]
    bench = Bench(model)
    places = {seq: seq for seq in range(3)}
    rows = [bench.row(seq, 0, prompt(seq + 3, seq), GREEDY) for seq in range(3)]
    in_flight = [(places, bench.launch(*rows))]
    for at in range(4):
        turned = sorted(places, key=lambda seq: (seq + at) % 3)  # rows change places from step to step
        rows = [bench.row(seq, seq + 3 + at, [], GREEDY, fed=True) for seq in turned]
        places = {seq: 1 + place for place, seq in enumerate(turned)}
        in_flight.append((places, bench.launch(bench.row(9, 0, prompt(2)), *rows)))
    for at, (places, handle) in enumerate(in_flight):
        said = ids_of(handle)
        assert {seq: said[place] for seq, place in places.items()} == {
            seq: expected[seq][at] for seq in range(3)
        }


def test_changes_that_are_lost_or_come_twice_are_refused(model: LoadedModel) -> None:
    bench = Bench(model)
    whole = plan_of(1, [bench.row(0, 0, prompt(4), GREEDY)])
    bench.runner.launch(whole).tokens()
    second = replace(
        whole, step=2, changes=Changes(1), firsts=np.array([4]), counts=np.array([1]), tokens=np.array([7])
    )
    bench.runner.launch(second).tokens()
    for number in (1, 3):
        with pytest.raises(ValueError, match=f"changes {number} of the batch came; the next are 2"):
            bench.runner.launch(replace(second, changes=Changes(number)))
    with pytest.raises(ValueError, match="never sent"):
        bench.runner.launch(replace(second, changes=Changes(0)))


@pytest.mark.parametrize("how", [GREEDY, WARM])
def test_guessed_tokens_are_checked_in_one_step_beside_other_rows(model: LoadedModel, how: Sampling) -> None:
    """Behind each guess stands what follows if it is right; what was computed for a wrong one is written
    over."""
    expected = Bench(model).say(0, prompt(12), 8, how)
    bench = Bench(model)
    assert bench.run(bench.row(0, 0, prompt(12), how)) == expected[:1]
    guesses = [expected[1], expected[2], (expected[3] + 1) % 256]
    rows = [
        bench.row(1, 0, prompt(5)),
        bench.row(0, 12, [expected[0], *guesses], how, drafts=3),
        bench.row(2, 0, prompt(7), Sampling(logprobs=1)),
    ]
    _, found, other = bench.launch(*rows).tokens()
    assert isinstance(found, list) and found[:3] == expected[1:4] and len(found) == 4
    assert isinstance(other, Scored) and len(other.tokens) == 1
    assert bench.run(bench.row(0, 15, expected[3:4], how)) == expected[4:5]


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_copies_come_first_and_in_order_in_every_group(family: str, tmp_path: Path) -> None:
    """A fork in the middle of a block: the child goes on from a copy, the parent's block stays as it is."""
    model = load_model(make_toy("tiny", tmp_path, family=family), "cpu", "float32")
    assert len(model.kv_groups(BLOCK)) == {"qwen3": 1, "gemma2": 2}[family]
    expected = Bench(model).say(0, prompt(20), 4)
    bench = Bench(model)
    bench.run(bench.row(0, 0, prompt(20), GREEDY))
    (shared, tail), (via, own) = (bench.tables[row][:, :2].T for row in (0, 1))
    before = bench.arena.kv[tail.astype(np.int64)].clone()
    child = np.stack((shared, own), axis=1)
    copies = tuple(BlockCopy(*pair) for both in ((tail, via), (via, own)) for pair in zip(*both, strict=True))
    said = bench.run(bench.row(5, 20, expected[:1], GREEDY, table=child), copies=copies)
    said += bench.run(bench.row(5, 21, said[-1:], GREEDY, table=child))
    assert said == expected[1:3]
    assert torch.equal(bench.arena.kv[tail.astype(np.int64)].nan_to_num(9), before.nan_to_num(9))


def test_a_plan_of_copies_alone(model: LoadedModel) -> None:
    bench = Bench(model)
    bench.arena.kv[3] = 1.0
    assert bench.run(copies=(BlockCopy(3, 8),)) == []
    assert bool((bench.arena.kv[8] == 1.0).all())


def test_a_row_of_nan_fails_alone(folder: Path) -> None:
    model = load_model(folder, "cpu", "float32")
    expected = Bench(model).say(0, [1, 2, 3], 1)
    weights = model.decoder.weights
    # The head is tied: with its row 200 not a number too, every row would fail.
    untied = replace(weights, embedding=weights.embedding.clone())
    untied.embedding[200] = float("nan")
    bench = Bench(replace(model, decoder=Decoder(model.config, untied)))
    said = bench.run(
        bench.row(0, 0, [1, 2, 3], GREEDY),
        bench.row(1, 0, [5, 200, 7], GREEDY),
        bench.row(2, 0, [200, 4, 5]),
        bench.row(3, 0, [6, 200], WARM),
    )
    assert said[0] == expected[0]
    assert said[2] is None
    for at in (1, 3):
        fault = said[at]
        assert isinstance(fault, RowFault)
        assert fault.message == f"sequence {at}: logits are not finite"


def test_a_table_and_tokens_may_change_once_launched(model: LoadedModel) -> None:
    expected = Bench(model).say(0, prompt(18), 1)
    bench = Bench(model)
    table, tokens = bench.tables[0].copy(), np.array(prompt(18))
    handle = bench.launch(PlanRow(0, 0, 0, 18, tokens, table, GREEDY))
    table[:], tokens[:] = 0, 0
    assert ids_of(handle) == expected


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_type_runs_on_every_device(device: str, dtype: str, folder: Path) -> None:
    said = Bench(load_model(folder, device, dtype)).say(0, prompt(30), 8, WARM)
    assert all(isinstance(token, int) and 0 <= token < 256 for token in said)


@pytest.mark.parametrize("device", DEVICES)
def test_a_launch_that_fails_behind_its_saves_has_no_copy_under_way(device: str) -> None:
    group = KVGroup(0, tuple(range(8)), layout=HeadLayout(8, 128), dtype="bfloat16", block_tokens=16)
    arena = DeviceArena(group, 64, device)
    fd = make_memory(64 << 20)
    memory = SlotMemory(fd, bytes(16), group.block_bytes)
    os.close(fd)
    mover = BlockMover(arena, memory)
    mover.registration.begin()

    def no_room(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    decoder: Any = SimpleNamespace(
        groups=1, device=arena.kv.device, kernels=SimpleNamespace(by_slot=False, lay_out=no_room)
    )
    runner = TorchRunner(decoder, arena, mover=mover)
    row = PlanRow(0, 0, 0, 1, np.zeros(1, np.int64), np.zeros(1, np.int32), GREEDY)
    saves = tuple(BlockSave(block, block, 16) for block in range(1, 40))
    with pytest.raises(torch.OutOfMemoryError):
        runner.launch(replace(plan_of(1, [row]), saves=saves))
    mark = bytes([9]) * memory.block_bytes
    for save in saves:
        memory.payload(save.slot)[:] = mark
    device_of(arena.kv.device).synchronize()
    assert all(bytes(memory.payload(save.slot)) == mark for save in saves)
    mover.close()
