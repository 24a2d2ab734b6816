"""Policies: what they are named, the order they give, and what ageing adds to one."""

from __future__ import annotations

import pytest

from holdfast.runtime.errors import SettingsInvalid
from holdfast.runtime.order.policy import Aged, FirstComeFirstServed, policy_named
from holdfast.runtime.sequence import Sequence, Turn, TurnAge
from holdfast.runtime.tokens import TokenList
from holdfast.runtime.verbs import Finish, Sampling, TokenLimits
from holdfast.tests.runtime.scheduler.shortest_remaining import ShortestRemaining
from holdfast.tests.runtime.scheduler.shuffled import Shuffled

SHUFFLED = "holdfast.tests.runtime.scheduler.shuffled:Shuffled"


def turns(*steps: int) -> list[Sequence]:
    """Turns in the order in which they began, each queued at one of these steps."""
    return [
        Sequence(
            number,
            b"",
            TokenList([1, 2, 3]),
            turn=Turn(Sampling(), TokenLimits(4), prompt=3, allowed=4, exhausted=Finish.LENGTH),
            age=TurnAge(number, number, step),
        )
        for number, step in enumerate(steps)
    ]


def test_a_policy_is_named_or_imported() -> None:
    assert isinstance(policy_named("first_come_first_served", 9), FirstComeFirstServed)
    assert isinstance(policy_named(SHUFFLED, 9), Aged)
    assert policy_named(SHUFFLED, 9).bound(0, 0) == 9


@pytest.mark.parametrize(
    "name", ["", "fastest", "no.such.module:Policy", "os:path", "collections:Counter", ":Policy", "os:"]
)
def test_another_name_is_refused(name: str) -> None:
    with pytest.raises(SettingsInvalid, match="policy"):
        policy_named(name, 9)


def test_the_oldest_comes_first() -> None:
    listed = turns(0, 0, 5, 7)
    policy = FirstComeFirstServed()
    assert policy.order(listed[::-1], 9) == listed
    assert policy.bound(10, 3) == 13


def test_turns_that_are_old_enough_come_before_the_others() -> None:
    listed = turns(0, 1, 2, 3, 4, 5, 6, 7)
    policy = Aged(Shuffled(), 10)
    seen = {tuple(one.id for one in policy.order(listed[::-1], 13)) for _ in range(20)}
    assert {order[:4] for order in seen} == {(0, 1, 2, 3)} and len(seen) > 1
    assert (policy.bound(10, 3), policy.bound(40, 3)) == (13, 43)


def test_what_remains_of_a_turn() -> None:
    (sequence,) = turns(0)
    assert sequence.remaining == 3 + 4
    sequence.computed, sequence.turn = 2, None
    assert sequence.remaining == 1


def test_the_turn_with_the_least_left_comes_first() -> None:
    long, short, equal = turns(0, 1, 2)
    for sequence in (short, equal):
        sequence.computed = 2
    policy = Aged(ShortestRemaining(), 10)
    assert policy.order([equal, long, short], 5) == [short, equal, long]
    assert policy.order([equal, long, short], 10) == [long, short, equal]
    short.computed = 0  # its KV was lost
    assert policy.order([equal, long, short], 5) == [equal, long, short]
