"""Blocks of sequences: prefixes found, tails copied, nothing written that another sequence reads.

Each of these stories has a wrong token if a line of the bookkeeping is wrong: `tests/mutations` plants such.
"""

from __future__ import annotations

from holdfast.tests.runtime.worlds import LAUNCH_BOMB, world

ONE, TWO, THREE, FOUR = ([start, start + 1, start + 2, start + 3] for start in (30, 40, 50, 60))


def test_a_prefix_is_computed_once() -> None:
    here = world()
    here.open(0, ONE + TWO + [7])
    here.run()
    here.open(1, ONE + TWO + [8, 9])
    assert here.state(1).computed == 8
    here.reply(1, 6)
    work = here.ended[1].work
    assert work is not None and (work.prefilled, work.resident) == (2, 8)


def test_the_last_token_is_never_taken_from_the_cache() -> None:
    here = world()
    here.open(0, ONE + TWO + [7])
    here.run()
    here.open(1, ONE + TWO)
    assert here.state(1).computed == 4
    here.reply(1, 6)


def test_a_block_is_found_only_behind_its_own_prefix() -> None:
    here = world()
    here.open(0, ONE + TWO + [7])
    here.open(1, THREE + FOUR + [7])
    here.run()
    here.open(2, THREE + TWO + [7])  # both blocks are cached, but this one behind another
    assert here.state(2).computed == 4
    here.reply(2, 6)


def test_tenants_share_nothing() -> None:
    here = world()
    here.open(0, ONE + TWO + [7], salt=b"a")
    here.run()
    here.open(1, ONE + TWO + [7], salt=b"b")
    assert here.state(1).computed == 0


def test_a_prefix_computed_meanwhile_is_found_when_first_planned() -> None:
    here = world(depth=1, max_sequences=1)
    here.open(0, ONE + TWO + THREE + [7])
    here.open(1, ONE + TWO + THREE + [8])
    here.generate(0, 2)
    here.generate(1, 2)
    here.run()
    work = here.ended[1].work
    assert work is not None and (work.prefilled, work.resident) == (1, 12)


def test_blocks_are_found_only_once_they_are_computed() -> None:
    here = world(late=True, max_step_tokens=4, max_sequences=2)
    here.open(0, ONE + TWO + THREE + FOUR)
    here.generate(0, 1)
    here.step()  # the first block is committed, the second in flight
    here.open(1, ONE + TWO + [7])
    assert here.state(1).computed == 4
    here.generate(1, 6)
    here.run()


def test_of_two_blocks_with_one_key_the_first_is_found() -> None:
    here = world(depth=1, max_step_tokens=16)
    here.open(0, ONE + TWO + [7])
    here.open(1, ONE + TWO + [8])
    here.run()  # both in one step: neither could find the other's
    here.close(0)
    here.open(2, ONE + TWO + [9])
    assert here.state(2).computed == 8
    for seq in (1, 2):
        here.reply(seq, 9)


def test_truncation_into_a_sealed_block_copies_it() -> None:
    here = world()
    here.open(0, ONE + TWO + [7])
    here.run()
    here.truncate(0, 6)
    here.extend(0, [8, 9, 10])
    here.run()
    here.open(1, ONE + TWO + [7])
    assert here.state(1).computed == 8, "the sealed block is as it was"
    here.reply(1, 6)
    here.reply(0, 6)
    assert here.scheduler.counters.copies == 1


def test_truncation_of_a_tail_that_is_not_shared_copies_nothing() -> None:
    here = world()
    here.open(0, [*ONE, 40, 41, 42])
    here.reply(0, 1)
    here.truncate(0, 5)
    here.extend(0, [8, 9])
    here.reply(0, 6)
    assert here.scheduler.counters.copies == 0


def test_generating_again_from_a_truncation_computes_one_token() -> None:
    here = world()
    here.open(0, ONE + TWO + [7])
    first = here.reply(0, 6)
    for length in (9, 8, 7):
        here.truncate(0, length)
        here.reply(0, 6)
    here.truncate(0, 7)
    here.extend(0, [TWO[-1], 7])
    assert here.reply(0, 6) == first


def test_running_turns_hold_their_blocks_once() -> None:
    here = world(blocks=40)
    here.open(0, [*ONE, *TWO, 7])
    here.reply(0, 2)
    held = here.engine.statistics()["pool_held"]
    assert held > 2 and here.engine.statistics()["running_blocks"] == 0, "an idle sequence holds the rest"
    here.fork(0, [1])
    for seq in (0, 1):
        here.extend(seq, [70 + seq])
        here.generate(seq, 9)
    here.step()
    statistics = here.engine.statistics()
    assert statistics["running"] == 2 and statistics["running_blocks"] == statistics["pool_held"]
    here.run()
    assert here.engine.statistics()["running_blocks"] == 0


def test_forks_share_blocks_and_part_ways() -> None:
    here = world(blocks=40)
    here.open(0, [*ONE, *TWO, 7])
    here.reply(0, 2)
    held = here.engine.statistics()["pool_held"]
    here.fork(0, [1, 2, 3])
    assert here.engine.statistics()["pool_held"] == held, "a fork takes no block"
    for seq in range(4):
        here.extend(seq, [70 + seq])
    for seq in range(4):
        here.generate(seq, 9)
    here.run()
    assert here.scheduler.counters.copies == 3, "only tails are copied, and the parent writes on in its own"


def test_a_child_has_its_tail_though_the_parent_rewrites_it() -> None:
    here = world(late=True)
    here.open(0, [*ONE, 40, 41, 42])
    here.reply(0, 1)
    here.fork(0, [1])
    here.truncate(0, 5)
    here.extend(0, [8, 9])
    here.reply(0, 2)
    here.reply(1, 6)


def test_a_child_outlives_its_parent() -> None:
    here = world()
    here.open(0, [*ONE, *TWO, 7, 8])
    here.reply(0, 1)
    here.fork(0, [1])
    here.close(0, keep_kv=False)
    here.open(2, THREE * 8)
    here.reply(2, 2)
    here.reply(1, 6)


def test_fork_in_the_middle_of_a_turn() -> None:
    here = world(late=True)
    here.open(0, [*ONE, 40])
    here.generate(0, 20)
    for child in range(1, 8):
        here.step()
        here.fork(0, [child])
    here.run()
    for child in range(1, 8):
        assert here.beings[child].shadow.tokens == here.beings[0].shadow.tokens[: 5 + child]
        here.reply(child, 26 - 5 - child)
        assert here.beings[child].shadow.tokens[:25] == here.beings[0].shadow.tokens


def test_fork_of_a_part_and_of_nothing() -> None:
    here = world()
    here.open(0, ONE + TWO + THREE)
    here.run()
    for child, at in enumerate((0, 1, 4, 6, 8, 11, 12), 1):
        here.fork(0, [child], at)
        here.extend(child, [9])
        here.reply(child, 3)


def test_a_block_let_go_in_flight_is_not_used_before_the_step_is_done() -> None:
    here = world(late=True, blocks=12)
    here.open(0, [*ONE, 40])
    here.generate(0, 20)
    here.step()  # a row that writes into the tail is in flight, and will be late
    here.close(0)
    for seq in range(1, 4):
        here.open(seq, [70 + seq, 71, 72])
        here.generate(seq, 8)
    here.run()


def test_the_source_of_a_copy_is_held_until_it_is_made() -> None:
    here = world(late=True, max_step_tokens=4, max_sequences=3)
    here.open(0, [*ONE, 40, 41])
    here.reply(0, 1)
    here.fork(0, [1])
    here.close(0)  # the child alone holds the tail now
    here.open(2, [70, 71, 72])
    here.open(3, [80, 81, 82])
    for seq in (2, 1, 3):
        here.generate(seq, 6)
    here.run()  # the third leases its first block in the step behind the copy, which is late


def test_a_stopped_turn_leaves_no_trace_of_the_step_in_flight() -> None:
    here = world(late=True)
    here.open(0, [*ONE, 40])
    here.generate(0, 20)
    here.step()
    here.step()
    here.stop(0)
    here.extend(0, [8, 9, 10])
    here.generate(0, 8)
    here.run()
    assert here.scheduler.counters.discarded == 1


def test_a_closed_sequence_and_a_new_one_of_the_same_name() -> None:
    here = world(late=True)
    here.open(0, [*ONE, 40])
    here.generate(0, 20)
    here.step()
    here.close(0)
    here.open(0, [*ONE, 41, 42])
    here.generate(0, 20)
    here.run()
    assert here.scheduler.counters.discarded == 1


def test_a_turn_that_begins_while_its_whole_prompt_is_in_flight() -> None:
    here = world(max_step_tokens=4, max_sequences=1)
    here.open(0, ONE + TWO + THREE + FOUR)
    here.step()  # the second block is in flight
    here.truncate(0, 8)
    here.generate(0, 5)
    here.run()


def test_an_idle_row_is_not_robbed_by_the_next_row_of_its_step() -> None:
    here = world(late=True, depth=1, blocks=3, max_context=12, max_step_tokens=20)
    here.open(0, ONE + TWO)
    here.open(1, THREE + FOUR)
    here.step()
    for seq in (1, 0):
        here.reply(seq, 3)


def test_a_copy_in_a_step_that_failed_is_not_trusted() -> None:
    here = world(max_step_tokens=32)
    here.open(0, [*ONE, 40, 41, 42])
    here.run()
    here.fork(0, [1])
    here.open(2, [LAUNCH_BOMB, 7])
    here.generate(1, 8)
    here.generate(2, 8)
    here.run()
    assert here.scheduler.counters.copies > 0 and here.scheduler.counters.isolations > 0


def test_a_copy_gives_way_where_there_is_no_block_for_it() -> None:
    """The child holds every block there is, its shared tail among them: it computes the tail again."""
    here = world(blocks=3, max_context=12, max_sequences=1)
    here.open(0, ONE + TWO + [50, 51])
    here.run()
    here.fork(0, [1])
    here.close(0)
    assert len(here.reply(1, 9)) == 2
    work = here.ended[1].work
    assert here.scheduler.counters.copies == 0 and work is not None and work.recomputed == 1
