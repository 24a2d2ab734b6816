"""The engine's copy of a branch is brought to what is wanted by the cheapest verbs, never trusted blindly."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from holdfast.runtime.errors import EngineDied, SequenceUnknown
from holdfast.runtime.link.crash_report import EngineDeath
from holdfast.runtime.verbs import Sampling, TokenLimits
from holdfast.sessions.engine_copy import ISOLATE_AFTER, CrashCount, EngineCopy
from holdfast.sessions.token_ids import Ids, ids_of

from .scripted_link import ScriptedLink
from .session_stage import run

END = 0


def span(*edges: int) -> Ids:
    return ids_of(range(*edges))


def counting(**more: object) -> ScriptedLink:
    return ScriptedLink(lambda tokens: tokens[-1] + 1, END, **more)


def verbs(link: ScriptedLink) -> list[tuple]:
    told = [(entry[0], len(entry[2]) if isinstance(entry[2], list) else entry[2]) for entry in link.log]
    link.log.clear()
    return told


async def brought(sequence: EngineCopy, ids: Ids) -> None:
    """As text that is on its way does it."""
    await sequence.prefill(ids, unless=lambda: False)


async def begun(sequence: EngineCopy, ids: Ids) -> None:
    """As a turn does it."""
    (await sequence.begin(ids, Sampling(), TokenLimits(1))).leave(len(ids))


@run
async def test_only_the_difference_crosses_the_link() -> None:
    link = counting()
    sequence = EngineCopy(link)
    await brought(sequence, span(1, 9))
    assert verbs(link) == [("open", 8)]
    await brought(sequence, span(1, 12))
    assert verbs(link) == [("extend", 3)]
    await brought(sequence, ids_of([1, 2, 3, 7, 7]))
    assert verbs(link) == [("truncate", 3), ("extend", 2)]
    await brought(sequence, span(1, 3))
    assert verbs(link) == [("truncate", 2)]
    await brought(sequence, span(1, 3))
    assert verbs(link) == []
    assert [held.tokens for held in link.held.values()] == [[1, 2]]


@run
async def test_what_a_stop_leaves_is_told_by_the_engine() -> None:
    link = counting(ahead=5)
    sequence = EngineCopy(link)
    generation = await sequence.begin(span(1, 5), Sampling(), TokenLimits(20))
    first = await anext(generation)
    link.log.clear()
    await sequence.stop(ids_of([1, 2, 3, 4, *first.tokens]))
    await sequence.wait_stopped()
    assert [name for name, *_ in link.log] == ["stop"], "unread events go with the same verb"
    assert [held.tokens for held in link.held.values()] == [[1, 2, 3, 4, 5]]
    link.log.clear()
    await brought(sequence, ids_of([1, 2, 3, 4, 5, 9]))
    assert verbs(link) == [("extend", 1)]


@run
async def test_a_sequence_that_is_not_as_thought_is_opened_anew() -> None:
    link = counting()
    sequence = EngineCopy(link)
    await brought(sequence, span(1, 9))
    for held in link.held.values():
        held.epoch += 7
    await brought(sequence, span(1, 5))
    assert verbs(link)[-1] == ("open", 4)
    assert [held.tokens for held in link.held.values()] == [[1, 2, 3, 4]]


@run
async def test_a_verb_cut_off_in_the_middle_leaves_nothing_to_trust() -> None:
    link = counting()
    sequence = EngineCopy(link)
    await brought(sequence, span(1, 9))
    link.cut_off.add("truncate")
    task = asyncio.create_task(brought(sequence, span(1, 5)))
    await link.stuck.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    link.cut_off.clear()
    link.log.clear()
    await brought(sequence, span(1, 5))
    assert [name for name, _ in verbs(link)] == ["close", "open"]


@run
async def test_nothing_waits_until_the_engine_has_answered_that_it_has_more_tokens() -> None:
    link = counting()
    sequence = EngineCopy(link)
    await brought(sequence, span(1, 5))
    link.slow = True
    await brought(sequence, span(1, 7))
    await brought(sequence, span(1, 9))
    assert sequence.pending_extends == 2 and len(sequence.sent) == 8
    generation = await sequence.begin(span(1, 12), Sampling(), TokenLimits(1))
    assert [row.tokens async for row in generation] == [[12]]
    assert verbs(link) == [
        ("open", 4),
        ("extend", 2),
        ("extend", 2),
        ("extend", 3),
        ("generate", TokenLimits(1)),
    ]
    await sequence.wait_extended()
    assert sequence.pending_extends == 0


@run
async def test_what_takes_a_refused_verb_for_granted_is_refused_too_and_all_begins_anew() -> None:
    link = counting()
    sequence = EngineCopy(link)
    await brought(sequence, span(1, 5))
    (held,) = link.held.values()
    held.tokens.append(77)  # the engine does not know of it
    link.slow = True
    await brought(sequence, span(1, 7))
    await brought(sequence, span(1, 9))
    generation = await sequence.begin(span(1, 12), Sampling(), TokenLimits(1))
    assert [row.tokens async for row in generation] == [[12]]
    assert [name for name, _ in verbs(link)] == ["open", "extend", "extend", "close", "begin"]
    assert [held.tokens for held in link.held.values()] == [[*range(1, 13)]]


@run
async def test_a_refusal_that_is_learnt_late_leaves_nothing_to_trust() -> None:
    link = counting()
    sequence = EngineCopy(link)
    await brought(sequence, span(1, 5))
    (held,) = link.held.values()
    held.tokens.append(77)
    await brought(sequence, span(1, 7))
    await sequence.wait_extended()
    await brought(sequence, span(1, 9))
    assert [name for name, _ in verbs(link)] == ["open", "extend", "close", "open"]
    assert [held.tokens for held in link.held.values()] == [[*range(1, 9)]]


@run
async def test_an_answer_of_a_sequence_that_was_let_go_says_nothing_of_the_next() -> None:
    link = counting()
    sequence = EngineCopy(link)
    await brought(sequence, span(1, 5))
    link.cut_off.add("extend")
    await brought(sequence, span(1, 7))
    link.cut_off.clear()
    await sequence.close()
    await brought(sequence, span(1, 3))
    link.unanswered[0].set_exception(SequenceUnknown("gone"))
    await sequence.wait_extended()
    link.log.clear()
    await brought(sequence, span(1, 4))
    assert verbs(link) == [("extend", 1)]


@run
async def test_a_turn_cut_off_as_it_begins_tells_no_child_what_its_parent_holds() -> None:
    """The engine may have the turn's tokens by now, which end otherwise than those the child is to have."""
    link = counting()
    sequence = EngineCopy(link)
    await brought(sequence, span(1, 9))
    link.cut_off.add("generate")
    task = asyncio.create_task(begun(sequence, ids_of([*range(1, 8), 50, 51])))
    await link.stuck.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    link.cut_off.clear()
    child = sequence.child()
    await sequence.fork([child], span(1, 9))
    await begun(child, span(1, 10))
    assert [*link.held.values()][-1].tokens == [*range(1, 10)]


@run
async def test_a_child_forks_where_a_block_is_shared() -> None:
    link = counting()
    sequence = EngineCopy(link)
    await brought(sequence, span(1, 9))
    link.log.clear()
    child = sequence.child()
    await brought(child, span(1, 12))
    assert verbs(link) == [("fork", 8), ("extend", 3)]
    await child.close()
    same = sequence.child()
    link.log.clear()
    await brought(same, span(1, 9))  # the last token is left to compute
    assert verbs(link) == [("fork", 7), ("extend", 1)]
    await same.close()
    other = sequence.child()
    link.log.clear()
    await brought(other, ids_of([1, 2, 3, 99]))
    assert verbs(link) == [("open", 4)]


@run
async def test_pending_is_the_sampled_token_without_kv() -> None:
    link = counting()
    sequence = EngineCopy(link)
    assert sequence.without_kv(5) == 1
    generation = await sequence.begin(span(1, 5), Sampling(), TokenLimits(2))
    rows = [row async for row in generation]
    sequence.finish(ids_of(range(1, rows[-1].length + 1)), 1)
    assert sequence.without_kv(rows[-1].length) == 1
    assert sequence.without_kv(rows[-1].length - 1) == 0
    generation = await sequence.begin(span(1, 5), Sampling(), TokenLimits(2))
    rows = [row async for row in generation]
    sequence.finish(ids_of(range(1, rows[-1].length + 1)), 3)  # a grammar had two more follow
    assert [sequence.without_kv(rows[-1].length - less) for less in range(4)] == [3, 2, 1, 0]
    link.die()
    link.restart()
    assert sequence.without_kv(3) == 1


@run
async def test_what_a_stop_leaves_without_kv_is_pending_but_no_prompt() -> None:
    link = counting(ahead=5)
    sequence = EngineCopy(link)
    generation = await sequence.begin(span(1, 5), Sampling(), TokenLimits(20))
    await anext(generation)
    (held,) = link.held.values()
    held.computed = 5  # of the three that were read two are a grammar's, which had them follow without a step
    await sequence.stop(span(1, 8))
    await sequence.wait_stopped()
    assert [sequence.without_kv(keep) for keep in (7, 6, 5)] == [2, 1, 0]
    generation = await sequence.begin(span(1, 12), Sampling(), TokenLimits(20))
    await anext(generation)
    held.computed = 2  # cut while its prompt was computed
    await sequence.stop(span(1, 13))
    await sequence.wait_stopped()
    assert sequence.without_kv(12) == 1


@run
async def test_after_a_restart_it_opens_without_closing_what_is_gone() -> None:
    link = counting()
    sequence = EngineCopy(link)
    await brought(sequence, span(1, 9))
    link.die()
    with pytest.raises(EngineDied):
        await brought(sequence, span(1, 12))
    link.restart()
    link.log.clear()
    assert sequence.lost
    await begun(sequence, span(1, 12))
    assert link.log[0][0] == "begin"
    assert not sequence.lost


@run
async def test_what_a_turn_adds_comes_with_its_generation() -> None:
    link = counting()
    sequence = EngineCopy(link)
    await brought(sequence, span(1, 9))
    link.log.clear()
    generation = await sequence.begin(ids_of([1, 2, 3, 4, 9, 9]), Sampling(), TokenLimits(1))
    assert [entry[0] for entry in link.log] == ["truncate", "extend", "generate"]
    assert [row.tokens async for row in generation] == [[10]]
    assert [held.tokens for held in link.held.values()] == [[1, 2, 3, 4, 9, 9, 10]]


@run
async def test_a_turn_on_a_sequence_that_is_not_there_opens_another() -> None:
    link = counting()
    sequence = EngineCopy(link)
    await brought(sequence, span(1, 9))
    link.held.clear()
    link.log.clear()
    generation = await sequence.begin(span(1, 12), Sampling(), TokenLimits(1))
    assert [row.tokens async for row in generation] == [[12]]
    assert [held.tokens for held in link.held.values()] == [list(range(1, 13))]


@run
async def test_text_on_its_way_is_not_tried_again_on_the_next_engine() -> None:
    """Else each piece of a text that kills engines would kill one."""
    link = counting()
    sequence = EngineCopy(link)
    await brought(sequence, span(1, 9))
    (held,) = link.held
    link.die()
    link.deaths[-1] = replace(link.deaths[-1], step=frozenset({held}))
    link.restart()
    link.log.clear()
    await brought(sequence, span(1, 12))
    assert verbs(link) == []
    await begun(sequence, span(1, 12))
    assert link.log[0][0] == "begin", "a turn does, under the poison rule"


@run
async def test_text_that_comes_while_there_is_no_engine_does_not_hide_what_that_died_over() -> None:
    link = counting()
    sequence = EngineCopy(link)
    await brought(sequence, span(1, 9))
    link.cut_off.add("extend")
    await brought(sequence, span(1, 10))
    (held,) = link.held
    link.die()
    link.deaths[-1] = replace(link.deaths[-1], step=frozenset({held}))
    await sequence.wait_extended()
    for end in (11, 12):
        with pytest.raises(EngineDied):
            await brought(sequence, span(1, end))
    link.restart()
    link.log.clear()
    await brought(sequence, span(1, 13))
    assert verbs(link) == []


@run
async def test_text_on_its_way_goes_on_after_a_death_that_others_died_of() -> None:
    link = counting()
    sequence = EngineCopy(link)
    await brought(sequence, span(1, 9))
    link.die()
    link.deaths[-1] = replace(link.deaths[-1], step=frozenset({99}))
    link.restart()
    link.log.clear()
    await brought(sequence, span(1, 12))
    assert verbs(link) == [("open", 11)]


@run
async def test_a_branch_on_trial_is_not_anticipated() -> None:
    link = counting()
    sequence = EngineCopy(link)
    sequence.crashes = CrashCount()
    for _ in range(ISOLATE_AFTER):
        sequence.crashes.add(EngineDeath(1, "crash", False, frozenset({7}), 0.0), 7, isolated=False)
    await brought(sequence, span(1, 9))
    assert verbs(link) == []


@run
async def test_a_turn_brings_its_sequence_with_it() -> None:
    link = counting()
    sequence = EngineCopy(link, b"salt")
    generation = await sequence.begin(span(1, 9), Sampling(), TokenLimits(2))
    assert link.log == [("begin", b"salt", list(range(1, 9)), TokenLimits(2), 0, False)]
    said = [token async for row in generation for token in row.tokens]
    sequence.finish(span(1, 11), 1)
    link.log.clear()
    assert said == [9, 10] and sequence.held.tolist() == list(range(1, 11))
    await sequence.begin(span(1, 13), Sampling(), TokenLimits(2))
    assert verbs(link) == [("extend", 2), ("generate", TokenLimits(2))], "which is one verb, too"


@run
async def test_a_turn_on_a_fork_brings_the_fork_with_it() -> None:
    link = counting()
    sequence = EngineCopy(link)
    await brought(sequence, span(1, 9))
    link.log.clear()
    child = sequence.child()
    generation = await child.begin(span(1, 12), Sampling(), TokenLimits(1))
    assert link.log == [("begin", (1, 8), [9, 10, 11], TokenLimits(1), 0, False)]
    assert [row.tokens async for row in generation] == [[12]]
    link.held.pop(1)
    link.log.clear()
    await sequence.child().begin(span(1, 12), Sampling(), TokenLimits(1))
    assert [entry[1] for entry in link.log] == [(1, 8), b""], "its parent was not there: it stands for itself"
    assert link.held[generation.state.seq + 1].tokens == list(range(1, 12))


@run
async def test_a_turn_cut_off_as_it_begins_leaves_nothing_to_trust() -> None:
    link = counting()
    sequence = EngineCopy(link)
    link.cut_off.add("begin")
    task = asyncio.create_task(sequence.begin(span(1, 9), Sampling(), TokenLimits(1)))
    await link.stuck.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    link.cut_off.clear()
    link.log.clear()
    await brought(sequence, span(1, 9))
    assert verbs(link) == [("open", 8)]


@run
async def test_a_turn_that_begins_anew_has_the_lease_it_was_promised() -> None:
    link = counting()
    sequence = EngineCopy(link)
    await sequence.begin(span(1, 9), Sampling(), TokenLimits(1))
    await sequence.lease(span(1, 9), 2, 60.0, 30.0)
    link.die()
    link.restart()
    link.log.clear()
    await sequence.begin(span(1, 9), Sampling(), TokenLimits(1))
    assert [entry[0] for entry in link.log] == ["open", "lease", "generate"]


@pytest.mark.parametrize("forked", [False, True])
@run
async def test_a_lease_that_is_over_is_not_requested_again(forked: bool) -> None:
    now = 0.0
    link = counting()
    sequence = EngineCopy(link, clock=lambda: now)
    if forked:
        sequence = sequence.child()
    await sequence.begin(span(1, 9), Sampling(), TokenLimits(1))
    await sequence.lease(span(1, 9), 2, 60.0, 30.0)
    now += 61.0
    link.die()
    link.restart()
    link.log.clear()
    await sequence.begin(span(1, 9), Sampling(), TokenLimits(1))
    assert "lease" not in [entry[0] for entry in link.log]


@run
async def test_a_fork_of_other_tokens_shares_only_what_both_have() -> None:
    link = counting()
    parent = EngineCopy(link)
    await brought(parent, span(1, 20))
    child = parent.child()
    await parent.fork([child], ids_of([*range(1, 10), 900, 901, 902]))
    assert child.held.tolist() == list(range(1, 10))
