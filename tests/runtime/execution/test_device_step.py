"""Steps that are captured and replayed give what eager ones give, on a device that refuses all else in them."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
import torch
from torch import Tensor

from holdfast.kernels.reference import backend
from holdfast.kvstore.arena import DeviceArena
from holdfast.runtime.execution.batch import Capacity
from holdfast.runtime.execution.runner import TorchRunner
from holdfast.runtime.plan import Changes, Handle, Outcome, Plan, PlanRow, Slot, plan_of
from holdfast.runtime.settings import StepSize
from holdfast.runtime.verbs import Sampling
from holdfast.tests.runtime.fake_device import DigestDecoder, FakeDevice, digest_arena
from holdfast.tests.runtime.fakes import FakeRunner, Shadow, in_slots

BLOCK, SEQS, WIDTH, VOCAB = 4, 6, 8, 259
CAPACITY = Capacity(slots=SEQS, blocks=WIDTH, tokens=24, rows=SEQS)
SIZES = [
    StepSize(2, 2),
    StepSize(4, 4),
    StepSize(6, 6),
    StepSize(8, 3),
    StepSize(16, 6),
    StepSize(24, 6),
]


class Side:
    """A runner on a device of its own; memory where nothing is written is garbage."""

    def __init__(self, seed: int, *, captured: bool, by_slot: bool = True) -> None:
        self.device = FakeDevice(Random(seed), late=seed % 2 == 0)
        self.arena: DeviceArena = digest_arena(SEQS * WIDTH, BLOCK)
        decoder = DigestDecoder(self.device, VOCAB, frozenset())
        decoder.by_slot = by_slot
        self.runner = TorchRunner(decoder, self.arena, device=self.device, capacity=CAPACITY)  # type: ignore[arg-type]
        if captured:
            self.runner.capture(SIZES)

    @property
    def replays(self) -> int:
        return self.device.replays


class Sequences:
    """Sequences that grow and begin anew, by chance; and plans for them, as a scheduler makes them."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.lengths = [0] * SEQS
        self.tables = [self._table(seq) for seq in range(SEQS)]
        self.fed = [False] * SEQS  # whether the last token was drawn by the step before, and is not known
        self.number = 0

    def _table(self, seq: int) -> np.ndarray:
        ids = [seq * WIDTH + at for at in range(WIDTH)]
        self.random.shuffle(ids)
        return np.array(ids, dtype=np.int32)

    def plan(self, step: int) -> Plan:
        random, rows, counts, draws, fed, tokens = self.random, [], [], [], [], []
        whole, blocks = [], []
        most = 0 if random.random() < 0.6 else 6  # a step of single tokens, or a mixed one
        for seq in random.sample(range(SEQS), random.randint(1, SEQS)):
            if self.lengths[seq] in (0, WIDTH * BLOCK) or random.random() < 0.1:
                self.lengths[seq], self.fed[seq] = 0, False
                self.tables[seq] = self._table(seq)
                how = Sampling(temperature=random.choice((0.0, 1.0)), seed=random.randrange(9))
                whole.append(Slot(seq, seq, step, self.tables[seq].copy(), how))
            left = WIDTH * BLOCK - self.lengths[seq]
            count = 1 if self.fed[seq] or not most else random.randint(1, min(most, left))
            if random.random() < 0.2:  # a block that nothing is in yet is another one from now on
                column = -(-self.lengths[seq] // BLOCK)
                if column + 1 < WIDTH:
                    table = self.tables[seq]
                    table[[column, column + 1]] = table[[column + 1, column]]
                    blocks += [(0, seq, at, int(table[at])) for at in (column, column + 1)]
            rows.append(seq)
            counts.append(count)
            draws.append(random.random() < 0.8)
            fed.append(self.fed[seq])
            if not self.fed[seq]:
                tokens += [random.randrange(200) for _ in range(count)]
            self.fed[seq] = draws[-1] and random.random() < 0.7
        firsts = [self.lengths[seq] for seq in rows]
        for seq, count in zip(rows, counts, strict=True):
            self.lengths[seq] += count
        changes = Changes(self.number, tuple(whole), np.array(blocks, dtype=np.int32).reshape(-1, 4))
        self.number += 1
        arrays = [np.array(one, dtype=np.int64) for one in (rows, rows, rows, firsts, counts)]
        flags = [np.array(one, dtype=bool) for one in (draws, fed)]
        return Plan(step, *arrays, *flags, np.array(tokens, dtype=np.int64), changes=changes)


@pytest.mark.parametrize("seed", range(6))
def test_replayed_steps_give_what_eager_ones_give(seed: int) -> None:
    """And what the fake runner gives, which knows no slots: over random schedules, two steps in flight. The
    device refuses an upload, a fetch or an event in a capture; what a replay makes lies in memory that is
    garbage whenever one begins."""
    eager, replayed = Side(seed, captured=False), Side(seed, captured=True)
    said: list[list[list[Outcome]]] = []
    for runner in (FakeRunner(SEQS * WIDTH, BLOCK, VOCAB), eager.runner, replayed.runner):
        sequences, handles, found = Sequences(Random(seed)), list[Handle](), list[list[Outcome]]()
        for step in range(120):
            handles.append(runner.launch(sequences.plan(step)))
            if len(handles) == 2:
                found.append(list(handles.pop(0).tokens()))
        said.append(found)
    assert said[0] == said[1] == said[2]
    assert len({str(one) for step in said[0] for one in step}) > 20
    assert replayed.replays > 150 and not eager.replays
    for side in (eager, replayed):
        side.device.synchronize()
    assert torch.equal(eager.arena.kv.view(torch.uint8), replayed.arena.kv.view(torch.uint8)), "and KV too"


@pytest.mark.parametrize("captured", [False, True])
def test_a_row_with_guesses_draws_behind_each_of_its_tokens(captured: bool) -> None:
    """Though there are as many draws as tokens."""
    side, table = Side(0, captured=captured), np.arange(2, dtype=np.int32)
    row = PlanRow(0, 0, 0, 3, np.array([4, 9, 6]), table, Sampling(), drafts=2)
    expected = [Shadow([4, 9, 6][:end], VOCAB).next() for end in (1, 2, 3)]
    assert list(side.runner.launch(plan_of(1, [row])).tokens()) == [expected]


@pytest.mark.parametrize("by_slot", [False, True])
@pytest.mark.parametrize("captured", [False, True])
def test_each_draw_goes_to_its_row_where_some_draw_several_and_others_none(
    captured: bool, by_slot: bool
) -> None:
    """Any rows: also such that there are as many draws as rows. On a device, and laid out on the host."""
    for seed in range(60):
        random, side = Random(seed), Side(0, captured=captured, by_slot=by_slot)
        rows, expected = [], []
        for seq in range(random.randint(1, 5)):
            count = random.randint(1, 4)
            guesses = random.choice((None, 0, random.randrange(count)))  # None: it draws nothing
            tokens, table = [random.randrange(200) for _ in range(count)], np.array([seq], dtype=np.int32)
            how = None if guesses is None else Sampling()
            rows.append(PlanRow(seq, 0, 0, count, np.array(tokens), table, how, drafts=guesses or 0))
            behind = [] if guesses is None else range(count - guesses, count + 1)
            expected.append([Shadow(tokens[:end], VOCAB).next() for end in behind])
        assert list(side.runner.launch(plan_of(1, rows)).tokens()) == expected, f"seed {seed}"


def test_steps_are_right_where_memory_cannot_be_made_anew() -> None:
    """As when a step has more rows than there was room for: no graph is left that reads the old memory."""
    table = np.arange(2 * WIDTH, dtype=np.int32)
    rows = [
        PlanRow(seq, 0, 0, 3, np.array([1, 2, seq]), table[seq * 2 : seq * 2 + 2], Sampling())
        for seq in range(4)
    ]
    plain = list(Side(0, captured=False).runner.launch(plan_of(1, rows)).tokens())
    for call in range(8):
        side = Side(0, captured=True)
        side.device.refuse(call)
        with pytest.raises(torch.OutOfMemoryError):
            side.runner.launch(in_slots(plan_of(1, rows), [3, 90, 41, 7]))
        side.device.refuse(None)
        assert list(side.runner.launch(plan_of(2, rows)).tokens()) == plain, f"call {call}"
        assert list(side.runner.launch(in_slots(plan_of(3, rows), [3, 90, 41, 7])).tokens()) == plain


def test_what_a_step_drew_stands_when_the_next_one_has_run() -> None:
    """Both are replays of one graph, and leave their draws in one place."""
    side = Side(0, captured=True)
    table = np.arange(2, dtype=np.int32)
    handles = []
    for step in range(2):
        rows = [PlanRow(0, 0, step, 1, np.array([step + 4]), table, Sampling())]
        handles.append(side.runner.launch(plan_of(step, rows)))
    side.device.synchronize()
    said = [list(handle.tokens()) for handle in handles]
    assert said == [[[Shadow([4, 5][: step + 1], VOCAB).next()]] for step in range(2)]
    assert said[0] != said[1] and side.replays == 4


def test_a_capture_that_uploads_or_fetches_is_refused() -> None:
    device = FakeDevice()
    for work in (
        lambda: device.upload([np.arange(2)]),
        lambda: device.fetch(torch.zeros(1)),
        lambda: device.main.record(),
    ):
        with device.active(), pytest.raises(AssertionError, match="in a capture"):
            device.capture(work)


def test_tokens_are_found_by_line_and_padding_nowhere() -> None:
    tables = torch.tensor([[7, 3], [5, 9], [0, 0]], dtype=torch.int32)
    last = torch.tensor([11, 22, 33])

    def look_up(*columns: list[int]) -> list[list[int]]:
        lines, positions, given = (torch.tensor(one) for one in columns)
        found: tuple[Tensor, Tensor] = backend.look_up(tables, last, lines, positions, given, 4)
        return [one.tolist() for one in found]

    ids, slots = look_up([1, 0, -1, 1], [5, 3, 0, 0], [-1, 8, 4, -1])
    assert ids == [22, 8, 4, 22]
    assert slots == [9 * 4 + 1, 7 * 4 + 3, -1, 5 * 4]


def test_where_a_batch_outgrows_its_memory_steps_are_eager_and_right() -> None:
    side = Side(0, captured=True)
    table = np.arange(2 * WIDTH, dtype=np.int32)
    rows = [
        PlanRow(seq, 0, 0, 3, np.array([1, 2, seq]), table[seq * 2 : seq * 2 + 2], Sampling())
        for seq in range(4)
    ]
    expected = list(side.runner.launch(plan_of(1, rows)).tokens())
    before = side.replays
    far = in_slots(plan_of(2, rows), [3, 90, 41, 7])
    assert list(side.runner.launch(far).tokens()) == expected
    assert side.replays == before > 0


@pytest.mark.parametrize(
    ("now", "kind"), [(True, RuntimeError), (False, RuntimeError), (False, torch.OutOfMemoryError)]
)
def test_where_a_step_cannot_be_captured_steps_are_eager(
    now: bool,
    kind: type[RuntimeError],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refused(device: FakeDevice, work: object) -> None:
        raise kind("operation not permitted when stream is capturing")

    monkeypatch.setattr(FakeDevice, "capture", refused)
    side = Side(0, captured=False)
    side.runner.capture(SIZES, now=now)
    table = np.arange(2, dtype=np.int32)
    rows = [PlanRow(0, 0, 0, 3, np.array([1, 2, 3]), table, Sampling())]
    plain = Side(0, captured=False).runner.launch(plan_of(1, rows)).tokens()
    assert list(side.runner.launch(plan_of(1, rows)).tokens()) == list(plain)
    assert not side.runner.captured and caplog.text.count("not captured as CUDA graphs") == 1


def test_a_step_is_captured_when_it_is_needed() -> None:
    side = Side(0, captured=False)
    side.runner.capture(SIZES, now=False)
    assert not side.runner.captured
    table = np.arange(2, dtype=np.int32)
    said = []
    for step in range(3):
        rows = [PlanRow(0, 0, step, 1, np.array([step + 4]), table, Sampling())]
        said += side.runner.launch(plan_of(step, rows)).tokens()
    assert side.runner.captured == 2 and side.replays == 4
    assert said == [[Shadow([4, 5, 6][: step + 1], VOCAB).next()] for step in range(3)]
