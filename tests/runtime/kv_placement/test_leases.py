"""Leases: what a receipt promises, what is evicted first because of it, and when it is over."""

from __future__ import annotations

import pytest

from holdfast.runtime.kv_placement.leases import LEAD_SECONDS, MOST_PRIORITY, MOST_SECONDS, USUAL_SECONDS
from holdfast.runtime.order.idle_eviction import USUAL_ABSENCE
from holdfast.runtime.order.queues import HEAD_START
from holdfast.runtime.verbs import Grant, Lease, Receipt
from holdfast.tests.runtime.worlds import World, world


def story(seq: int, length: int) -> list[int]:
    return [(seq * 37 + position * 11) % 250 for position in range(length)]


def resident(here: World) -> list[int]:
    return [here.state(seq).computed for seq in sorted(here.beings)]


def idle(length: int = 15, *, seqs: int = 3, **numbers: int) -> World:
    """So many sequences that had a turn, the first the longest unused."""
    here = world(**{"depth": 1, "blocks": 12, **numbers})
    for seq in range(seqs):
        here.open(seq, story(seq, length))
        here.reply(seq, 1)
    return here


def test_a_receipt_has_the_numbers_that_count() -> None:
    here = idle(seqs=1)
    assert here.lease(0, 2, 60.0, 5.0) == Receipt(Grant.GRANTED, 2, 60.0, 5.0, 16, 0)
    assert here.lease(0) == Receipt(Grant.GRANTED, 0, USUAL_SECONDS, USUAL_SECONDS, 16, 0)
    assert here.lease(0, ttl=0) == Receipt(Grant.GRANTED, 0, 0.0, 0.0, 0, 0)
    assert here.scheduler.statistics()["leases"] == 0


@pytest.mark.parametrize(
    ("wish", "told"),
    [
        ((99, 10.0, 5.0), (MOST_PRIORITY, 10.0, 5.0)),
        ((-99, 10.0, 5.0), (-MOST_PRIORITY, 10.0, 5.0)),
        ((0, 1e12, 5.0), (0, MOST_SECONDS, 5.0)),
        ((0, 10.0, 11.0), (0, 10.0, 10.0)),
        ((0, 10.0, -1.0), (0, 10.0, 0.0)),
        ((0, 10.0, float("nan")), (0, 10.0, 0.0)),
        ((0, -1.0, 0.0), (0, 0.0, 0.0)),
    ],
)
def test_what_is_out_of_range_is_clipped(wish, told) -> None:
    here = idle(seqs=1)
    receipt = here.lease(0, *wish)
    assert receipt is not None and receipt.grant is Grant.CLIPPED
    assert (receipt.priority, receipt.ttl, receipt.returns_in) == told


def test_the_budget_clips_and_then_denies() -> None:
    """Half of 12 blocks: one sequence of four, the beginning of the next, nothing of the third."""
    here = idle()
    grants = [here.lease(seq, ttl=60.0) for seq in range(3)]
    assert [receipt and receipt.grant for receipt in grants] == [Grant.GRANTED, Grant.CLIPPED, Grant.DENIED]
    assert [receipt and receipt.tokens for receipt in grants] == [16, 8, 0]
    assert here.lease(0, ttl=0) is not None
    third = here.lease(2, ttl=60.0)
    assert third is not None and third.tokens == 16, "what is given back can be had"


def test_a_tenant_with_a_cap_is_clipped_at_it_and_the_others_have_the_rest() -> None:
    """Half of 16 blocks may be leased: three of them by one tenant, whatever the others have."""
    here = world(depth=1, blocks=16, slots=16, lease_caps={b"capped": 3})
    for seq in range(4):
        here.open(seq, story(seq, 7), salt=b"capped" if seq < 2 else b"")
        here.reply(seq, 1)
    first, second = here.lease(0, ttl=60.0), here.lease(1, ttl=60.0)
    assert first is not None and (first.grant, first.tokens) == (Grant.GRANTED, 8)
    assert second is not None and (second.grant, second.tokens, second.host_tokens) == (Grant.CLIPPED, 4, 4)
    here.reply(0, 8)
    assert here.scheduler.statistics()["leased_blocks"] == 3, "its leases do not grow beyond it"
    for seq in (2, 3):
        receipt = here.lease(seq, ttl=60.0)
        assert receipt is not None and receipt.grant is Grant.GRANTED
    here.lease(0, ttl=0)
    again = here.lease(1, ttl=60.0)
    assert again is not None and (again.grant, again.tokens) == (Grant.GRANTED, 8), "what is given back"
    here.fork(1, [7])
    here.lease(7, ttl=60.0)
    denied = here.lease(0, ttl=60.0)
    assert denied is not None and denied.grant is Grant.DENIED, "a fork's are counted with it"
    assert here.state(0).length == 16


def test_an_unknown_sequence_has_no_lease() -> None:
    here = idle(seqs=1)
    assert here.lease(7) is None


@pytest.mark.parametrize("depth", [1, 2])
def test_leased_ones_go_after_all_others_whenever_they_were_used(depth: int) -> None:
    here = idle(depth=depth)
    here.lease(0, ttl=60.0)
    here.open(3, story(3, 20))
    here.reply(3, 1)
    assert resident(here)[:3] == [15, 0, 12], "the longest unused one stayed"


def test_of_leased_ones_the_latest_return_goes_first() -> None:
    here = idle(7, seqs=6, max_context=48, blocks=12)
    for seq, returns_in in ((0, 30.0), (1, 50.0), (2, 20.0)):
        here.lease(seq, ttl=60.0, returns_in=returns_in)
    here.open(6, story(6, 35))
    here.reply(6, 1)
    assert resident(here) == [4, 0, 7, 0, 0, 0, 35]
    assert here.scheduler.counters.preempted == 0


def test_an_expected_return_counts_without_a_lease() -> None:
    """The latest return goes first, and one without a hint between those before and behind the usual pause."""
    here = idle(7, seqs=6, max_context=48, blocks=12)
    said = {0: 5.0, 1: USUAL_ABSENCE + 60, 2: 1.0, 3: USUAL_ABSENCE - 60, 4: None, 5: 3.0}
    for seq, returns_in in said.items():
        receipt = here.lease(seq, ttl=0, returns_in=returns_in)
        assert receipt == Receipt(Grant.GRANTED, 0, 0.0, returns_in or 0.0, 0, 0)
    figures = here.scheduler.statistics()
    assert (figures["leases"], figures["idle_expected"]) == (0, 5)
    here.open(6, story(6, 19))
    here.reply(6, 1)
    assert resident(here) == [7, 0, 7, 4, 0, 7, 19]


def test_a_lease_that_is_denied_is_foresight_all_the_same() -> None:
    here = idle(7, seqs=3, blocks=6, max_context=24, lease_share=0.34)
    granted = here.lease(0, ttl=1e4)
    assert granted is not None and granted.grant is Grant.GRANTED
    denied = here.lease(1, ttl=1e4, returns_in=5.0)
    assert denied == Receipt(Grant.DENIED, 0, 0.0, 5.0, 0, 0)
    assert here.lease(2, ttl=1e4) == Receipt(Grant.DENIED, 0, 0.0, 0.0, 0, 0)
    here.reply(2, 1)  # used last, but its return is unknown
    here.open(3, story(3, 7))
    here.reply(3, 1)
    assert resident(here) == [7, 7, 0, 7]


def test_a_late_sequence_is_likely_to_be_late_for_as_long_again() -> None:
    here = idle(7, seqs=3, blocks=6, max_context=24)
    for seq, returns_in in ((0, 1.0), (1, 30.0), (2, 60.0)):
        here.lease(seq, ttl=0, returns_in=returns_in)
    here.time += 45.0
    here.open(3, story(3, 3))
    here.reply(3, 1)
    assert resident(here) == [4, 7, 7, 3]


def test_a_sequence_that_is_back_is_expected_no_longer() -> None:
    here = idle(7, seqs=3, blocks=6, max_context=24, slots=8)
    here.lease(0, ttl=0, returns_in=20.0)
    assert here.due() is not None
    here.extend(0, [])
    here.evict(0)
    here.time += 20.0
    here.run()
    assert here.state(0).computed == 0, "it has been back since"
    here.lease(1, ttl=0, returns_in=500.0)
    here.reply(1, 1)
    here.open(3, story(3, 7))
    here.reply(3, 1)
    assert resident(here)[1] == 8 and here.due() is None


def test_of_what_is_said_often_the_last_word_counts() -> None:
    here = idle(7, seqs=1)
    for _ in range(200):
        here.time += 0.01
        here.lease(0, ttl=0, returns_in=3600.0)
    due = here.due()
    assert due is not None and due > 3590


def test_what_is_foreseen_is_brought_up_but_not_computed_ahead() -> None:
    """A hint about a return may be wrong; it costs a copy, never a computation."""
    for slots in (0, 20):
        here = idle(15, seqs=1, slots=slots)
        here.lease(0, ttl=0, returns_in=20.0)
        here.settle(0)
        here.run()
        here.open(1, story(1, 47))  # over what the device may still have of it
        here.run()
        here.close(1)
        here.time += 20.0 - LEAD_SECONDS
        here.run()
        assert here.state(0).computed == (15 if slots else 0)


def test_a_sequence_that_may_be_back_at_once_is_not_restored_for_that() -> None:
    """It was sent down on purpose, or lost what it had to those that need it now."""
    here = idle(15, seqs=1, slots=20)
    here.settle(0)
    here.run()
    here.lease(0, ttl=0, returns_in=0.0)
    here.time += 1.0
    here.run()
    assert here.state(0).computed == 0 and here.due() is None
    here.lease(0, ttl=60.0, returns_in=0.0)
    here.run()
    assert here.state(0).computed == 15, "a lease is a promise"


def test_what_a_lease_does_not_cover_goes_before_what_another_does() -> None:
    here = idle(11, seqs=3, blocks=12, max_context=48)
    here.lease(0, ttl=60.0, returns_in=1.0)
    receipt = here.lease(1, ttl=60.0, returns_in=40.0)
    assert receipt is not None and receipt.tokens == 12
    here.extend(1, story(9, 8))  # beyond what its lease covers
    here.run()
    here.open(3, story(3, 20))
    here.reply(3, 1)
    assert resident(here) == [11, 12, 0, 20]


def test_a_lease_grows_with_its_session() -> None:
    here = idle(7, seqs=1)
    here.lease(0, ttl=60.0)
    assert here.scheduler.statistics()["leased_blocks"] == 2
    here.reply(0, 6)
    assert here.scheduler.statistics()["leased_blocks"] == 4


def test_it_ends_with_its_time_and_with_its_sequence() -> None:
    here = idle()
    here.lease(0, 3, ttl=60.0)
    here.lease(1, ttl=30.0)
    due = here.due()
    assert due is not None and 29 < due <= 30 - LEAD_SECONDS
    here.close(1)
    here.time += 60.0
    here.step()
    figures = here.scheduler.statistics()
    assert not (figures["leases"] or figures["leased_blocks"]) and here.due() is None
    here.open(3, story(3, 40))
    here.reply(3, 1)
    assert here.state(0).computed == 0, "it is one of many again"


def test_a_higher_priority_goes_before_those_that_wait_and_the_first_that_runs_stays() -> None:
    here = world(depth=1, blocks=12, max_sequences=1)
    for seq in range(4):
        here.open(seq, story(seq, 6))
    here.lease(3, 1, ttl=60.0)
    for seq in range(4):
        here.generate(seq, 4)
        here.step()
    here.run()
    assert list(here.ended) == [0, 3, 1, 2]


def test_the_first_that_runs_is_not_overtaken() -> None:
    """Obligation (a): whatever the priority of those that come later, it is never preempted for them."""
    here = world(blocks=13, max_context=48, max_sequences=3)
    for seq in range(3):
        here.open(seq, story(seq, 3))
        here.lease(seq, 4 * seq, ttl=1e4)
        here.generate(seq, 45)
        here.step()
    here.run()
    assert list(here.ended) == [0, 2, 1]
    assert [here.ended[seq].work.recomputed > 0 for seq in (0, 1)] == [False, True]  # type: ignore[union-attr]


def test_the_lowest_priority_is_preempted_first() -> None:
    here = world(blocks=13, max_context=48, max_sequences=3)
    for seq in range(3):
        here.open(seq, story(seq, 3))
    here.lease(2, 4, ttl=1e4)
    for seq in range(3):
        here.generate(seq, 45)
    here.run()
    assert list(here.ended) == [2, 0, 1] or list(here.ended) == [0, 2, 1]
    assert here.ended[1].work.recomputed > 0  # type: ignore[union-attr]


def test_no_turn_is_overtaken_for_ever() -> None:
    here = world(depth=1, blocks=12, max_sequences=1)
    for seq in (0, 1, 2):
        here.open(seq, story(seq, 2))
    here.lease(1, 1, ttl=1e6)
    here.generate(1, 2)
    here.generate(0, 2)
    waited = 0
    while here.beings[0].turn is not None:
        here.step()
        if here.beings[1].turn is None:
            here.truncate(1, 2)
            here.generate(1, 2)
            waited += 1
    assert 1 < waited <= HEAD_START + 1


def test_what_is_expected_back_is_there_before() -> None:
    here = idle(15, slots=20)
    here.lease(0, ttl=60.0, returns_in=20.0)
    here.settle(0)
    here.run()
    assert here.state(0).computed == 0
    here.time += 20.0 - LEAD_SECONDS
    here.run()
    assert here.state(0).computed == 15
    restored = here.scheduler.counters.restored
    assert restored > 0
    here.reply(0, 1)
    assert here.scheduler.counters.restored == restored


def test_a_flood_of_others_takes_nothing_of_it_from_the_host_tier() -> None:
    here = idle(15, seqs=2, slots=12)
    receipt = here.lease(0, ttl=1e4)
    assert receipt is not None and receipt.host_tokens == 15
    for seq in range(2, 12):
        here.open(seq, story(seq, 40))
        here.reply(seq, 1)
    here.settle(0)
    here.run()
    for seq in range(12, 16):
        here.open(seq, story(seq, 40))
        here.reply(seq, 1)
    here.reply(0, 1)
    work = here.ended[0].work
    assert work is not None and work.host == 15 and work.recomputed == 0


def test_the_verb_is_answered_with_state_and_receipt() -> None:
    here = idle(seqs=1)
    reply = here.engine.apply(Lease(77, 0, 1, 9.0))
    assert reply is not None and (reply.request, reply.receipt.grant) == (77, Grant.GRANTED)  # type: ignore[union-attr]
