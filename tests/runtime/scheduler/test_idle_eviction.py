"""Which session without a lease loses KV first: against a search over all of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.runtime.order.idle_eviction import USUAL_ABSENCE, IdleEviction
from holdfast.runtime.sequence import Sequence
from holdfast.runtime.tokens import TokenList

SECONDS = st.floats(0, 1e4)
MOVES = st.lists(st.tuples(st.integers(0, 9), st.sampled_from(["put", "tell", "take", "wait"]), SECONDS))


def absence(sequence: Sequence, now: float) -> float:
    if sequence.returns is None:
        return USUAL_ABSENCE + now - sequence.used
    return abs(sequence.returns - now)


@given(MOVES)
def test_the_longest_is_as_long_as_any(moves: list[tuple[int, str, float]]) -> None:
    holders, there, now = IdleEviction(), dict[int, Sequence](), 0.0
    sequences = [Sequence(seq, b"", TokenList()) for seq in range(10)]
    for seq, move, seconds in moves:
        sequence = sequences[seq]
        if move == "wait":
            now += seconds
        elif move == "take":
            holders.discard(seq)
            there.pop(seq, None)
        else:
            sequence.used = now
            sequence.returns = now + seconds if move == "tell" else None
            holders.put(sequence)
            there[seq] = sequence
        assert (len(holders), set(holders)) == (len(there), set(there.values()))
        assert all((seq in holders) == (seq in there) for seq in range(10))
        if there:
            most = max(absence(one, now) for one in there.values())
            assert absence(holders.longest(now), now) == pytest.approx(most)
