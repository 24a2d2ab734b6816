"""The eviction rule: ranks by hits, oldest first inside a rank, fame that fades."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from holdfast.kvstore.eviction import EvictionOrder


def test_oldest_first_when_none_was_found_again() -> None:
    order = EvictionOrder(8)
    order.add([5, 3, 4])
    assert order.pop(2) == [5, 3]
    assert [*order] == [4]


def test_more_hits_go_later() -> None:
    order = EvictionOrder(16)
    order.hit([1] * 4 + [2])
    order.add([1, 2, 3])
    assert order.pop(3) == [3, 2, 1]


def test_held_again_is_out_of_the_order() -> None:
    order = EvictionOrder(8)
    order.add([1, 2])
    assert order.remove(1)
    assert not order.remove(1)
    assert 1 not in order
    assert order.pop(1) == [2]
    assert len(order) == 0


def test_a_block_without_its_key_has_no_past() -> None:
    order = EvictionOrder(8)
    order.hit([1] * 9)
    order.forget([1])
    order.add([1, 2])
    assert order.pop(1) == [1]


def test_old_fame_fades_when_newer_fame_needs_the_room() -> None:
    order = EvictionOrder(8)  # two blocks may be hot, two more returned
    for block in range(6):
        order.hit([block] * 9)
    order.add([6])
    order.add(range(6))
    assert [*order] == [6, 0, 1, 2, 3, 4, 5]
    assert order.pop(2) == [6, 0]
    order.add([7])
    assert order.pop(2) == [1, 7], "0 and 1 had fallen among the one-offs, before 7 came"


def test_a_block_that_fell_has_to_earn_its_rank_again() -> None:
    order = EvictionOrder(4)
    order.hit([1] * 9 + [2] * 9 + [3] * 9)
    order.add([1, 2, 3])  # 1 fell to the one-offs, 2 among the returned
    order.remove(1)
    order.add([1])
    assert order.pop(1) == [1]
    order.remove(2)
    order.hit([2])
    order.add([2])
    assert order.pop(2) == [3, 2], "one more hit made 2 hot again, and crowded 3 out"


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 6)), min_size=1, max_size=60))
def test_chains_are_given_up_from_their_ends(visits: list[tuple[int, int]]) -> None:
    """Four prompts of six blocks; each visit holds the first few of one and lets them go, the last first."""
    order = EvictionOrder(24)
    for prompt, length in visits:
        chain = [prompt * 6 + at for at in range(length)]
        order.hit([block for block in chain if order.remove(block)])
        order.add(reversed(chain))
    given_up = order.pop(len(order))
    for prompt in range(4):
        mine = [block for block in given_up if block // 6 == prompt]
        assert mine == sorted(mine, reverse=True)


@given(st.lists(st.tuples(st.integers(0, 15), st.integers(0, 6)), unique_by=lambda pair: pair[0]))
def test_everything_comes_out_once(blocks: list[tuple[int, int]]) -> None:
    order = EvictionOrder(16)
    for block, hits in blocks:
        order.hit([block] * hits)
        order.add([block])
    expected = [*order]
    assert len(order) == len(expected) == len(blocks)
    assert order.pop(len(blocks)) == expected
    assert sorted(expected) == sorted(block for block, _ in blocks)


def test_what_a_lease_covers_goes_last_the_latest_return_first() -> None:
    order = EvictionOrder(40)
    order.hit([9] * 6)
    order.add([1, 2])
    order.lease(1, 5.0)
    order.lease(3, 9.0)  # not in the order yet
    order.lease(4, 7.0)
    order.add([3, 4, 9])
    assert [*order] == [2, 9, 3, 4, 1]
    assert len(order) == 5 and 3 in order
    order.lease(3, None)
    order.lease(4, 4.0)
    assert order.pop(3) == [2, 3, 9]
    assert order.pop(1) == [1] and [*order] == [4]
    order.forget([4])
    assert order.remove(4) and not len(order)


def test_what_was_foreseen_and_leaves_is_withdrawn() -> None:
    withdrawn: list[int] = []
    order = EvictionOrder(8, withdrawn)
    order.add([1, 2, 3])
    assert order.foresee(2, 8) == [1, 2]
    assert order.remove(1) and order.remove(3) and withdrawn == [1], "3 was not foreseen"
    assert order.foresee(2, 8) == []


SLOTS = 12
ACTS = st.sampled_from(["use", "put first", "lease", "end lease", "remove", "foresee", "foresee few"])


@given(st.lists(st.tuples(st.integers(0, SLOTS - 1), ACTS, st.integers(0, 6)), max_size=150))
def test_what_is_foreseen_is_what_a_walk_over_all_finds(acts: list[tuple[int, str, int]]) -> None:
    """The first blocks of the order that are not elsewhere, whatever came and went since the last look."""
    withdrawn: list[int] = []
    order = EvictionOrder(SLOTS, withdrawn)
    elsewhere, leased, foreseen = set[int](), set[int](), set[int]()
    for block, act, number in acts:
        if act == "use":
            order.remove(block)
            order.hit([block])
            order.add([block])
            elsewhere.discard(block)
        elif act == "put first" and order.remove(block):
            order.put_first(block)
            elsewhere |= {block} - leased
        elif act in ("lease", "end lease"):
            leased = leased | {block} if act == "lease" else leased - {block}
            elsewhere.discard(block)
            order.lease(block, float(number) if act == "lease" else None)
        elif act == "remove":
            order.remove(block)
            elsewhere.discard(block)
        elif act.startswith("foresee"):
            came = order.foresee(number, 2 if act == "foresee few" else SLOTS)
            foreseen -= set(withdrawn)
            withdrawn.clear()
            assert foreseen.isdisjoint(came)
            foreseen |= set(came)
            wanted = [one for one in order if one not in elsewhere][:number]
            assert foreseen == set(wanted) or (
                act == "foresee few" and len(came) == 2 >= len(foreseen) - number
            )
        assert order.alone == len(set(order) - elsewhere)
