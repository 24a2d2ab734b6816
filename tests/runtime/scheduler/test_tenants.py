"""Two tenants on one engine: what the one asks for does not cost the other its KV; on the fake device."""

from __future__ import annotations

from holdfast.runtime.settings import SchedulerSettings
from holdfast.tests.runtime.fakes import fake_memory
from holdfast.tests.runtime.worlds import VOCAB, World

SESSIONS, ROUNDS = 2, 8


def hit_rate(flood: int) -> float:
    """Tokens of the first tenant's turns found on some tier, of all that were not new; the other tenant opens
    ``flood`` sessions between two of its rounds.
    """
    settings = SchedulerSettings(
        blocks=16,
        vocab_size=VOCAB,
        max_context=48,
        block_tokens=4,
        max_step_tokens=8,
        max_sequences=4,
        depth=2,
    )
    here = World(settings, memory=fake_memory(48, 4))
    for seq in range(SESSIONS):
        here.open(seq, [seq + 3] * 12, salt=b"mine")
        here.reply(seq, 2)
    found = wanted = 0
    strangers = iter(range(100, 10_000))
    for _ in range(ROUNDS):
        for stranger in (next(strangers) for _ in range(flood)):
            here.open(stranger, [stranger % 200] * 14, salt=b"theirs")
            here.reply(stranger, 2)
        for seq in range(SESSIONS):
            before = here.state(seq).length
            here.extend(seq, [7, 8])
            here.reply(seq, 2)
            work = here.ended[seq].work
            assert work is not None
            wanted += before - 1
            found += before + 2 - work.prefilled - work.recomputed
    list(here.scheduler.audit_in_slices())
    return found / wanted


def test_a_flood_leaves_nine_tenths_of_the_others_hits() -> None:
    alone = hit_rate(0)
    assert alone > 0.95
    assert hit_rate(12) >= 0.9 * alone
