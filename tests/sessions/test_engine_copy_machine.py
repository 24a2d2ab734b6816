"""The states of the engine's copy: which moves are legal, and that each state says what the engine holds."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from itertools import product
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.runtime.errors import EngineGone, VerbRefused
from holdfast.runtime.link.generation import Generation
from holdfast.runtime.verbs import Sampling, TokenLimits
from holdfast.sessions.engine_copy import MOVES, CopyState, EngineCopy, IllegalMove
from holdfast.sessions.token_ids import NONE, Ids, ids_of

from .scripted_link import ScriptedLink

END = 0
LEGAL = {
    "EMPTY": "EMPTY UNSURE HELD",
    "UNSURE": "EMPTY UNSURE HELD GENERATING STOPPING",
    "HELD": "EMPTY UNSURE STOPPING",
    "GENERATING": "EMPTY HELD STOPPING",
    "STOPPING": "UNSURE HELD",
}


@pytest.mark.parametrize(("state", "wanted"), list(product(CopyState, CopyState)))
def test_an_illegal_move_raises_with_both_states(state: CopyState, wanted: CopyState) -> None:
    copy = EngineCopy(ScriptedLink(lambda tokens: tokens[-1] + 1, END))
    copy.state, legal = state, wanted.name in LEGAL[state.name].split()
    illegal = pytest.raises(IllegalMove, match=rf"{state.name} to {wanted.name}")
    with nullcontext() if legal else illegal:
        copy._move(wanted, None, NONE)
    assert copy.state is (wanted if legal else state)


def test_every_state_can_be_left_and_reached() -> None:
    assert set(MOVES) == set(CopyState)
    for state in CopyState:
        assert any(state in MOVES[other] for other in CopyState if other is not state)
        assert MOVES[state] - {state}


class Play:
    """One copy, its engine, and a caller that does what a session may do, in any order."""

    def __init__(self, random: Random, ahead: int) -> None:
        self.random = random
        self.link = ScriptedLink(lambda tokens: tokens[-1] + 1, END, ahead=ahead)
        self.copy = EngineCopy(self.link)
        self.generation: Generation | None = None
        self.prompt: Ids = NONE
        self.read: list[int] = []
        self.said = [1]
        self.tampered = False  # the engine has tokens that the copy was not told of

    async def do(self, action: str) -> None:
        try:
            await getattr(self, action)()
        except (VerbRefused, EngineGone):
            self.generation = None
        self.check()

    def tokens(self) -> Ids:
        """Tokens that follow on what was said, or branch off from it."""
        keep = self.random.randint(1, len(self.said)) if self.random.random() < 0.4 else len(self.said)
        self.said = self.said[:keep] + [self.random.randint(1, 900) for _ in range(self.random.randint(1, 6))]
        return ids_of(self.said)

    async def begin(self) -> None:
        if self.generation is not None:
            await self.stop()
        self.prompt, self.read = self.tokens(), []
        limits = TokenLimits(self.random.randint(1, 5))
        self.generation = await self.copy.begin(self.prompt, Sampling(), limits)
        self.tampered = False

    async def row(self) -> None:
        if self.generation is None:
            return
        row = await anext(self.generation, None)
        if row is None:
            self.generation = None
            return
        self.read += row.tokens
        first = int(self.prompt[-1]) + 1
        assert self.read == list(range(first, first + len(self.read))), "the rows follow on the prompt"
        if row.finish is not None:
            self.generation = None
            if self.copy.state is CopyState.GENERATING:
                self.copy.finish(self.whole(), 1)

    async def stop(self) -> None:
        if self.generation is not None:
            self.generation = None
            await self.copy.stop(self.whole())

    async def prefill(self) -> None:
        if self.generation is None:
            await self.copy.prefill(self.tokens(), unless=lambda: False)

    async def lease(self) -> None:
        await self.copy.lease(ids_of(self.said), 1, 60.0, 1.0)

    async def fork(self) -> None:
        child = self.copy.child()
        await self.copy.fork([child], self.whole() if self.generation is not None else ids_of(self.said))
        if child.state is CopyState.HELD:
            self.agree(child)
            await child.close()

    async def wait(self) -> None:
        await self.copy.wait_stopped()
        await self.copy.wait_extended()

    async def close(self) -> None:
        self.generation = None
        await self.copy.close()

    async def die(self) -> None:
        self.link.die()
        self.link.restart()
        self.tampered = False

    async def tamper(self) -> None:
        for held in self.link.held.values():
            if held.generation is None:
                held.tokens.append(901)
                self.tampered = True

    async def cut_off(self) -> None:
        """A verb of a turn is cancelled on its way."""
        await self.stop()
        await self.wait()
        self.link.cut_off = {"begin", "generate", "open", "truncate"}
        self.link.stuck.clear()
        task = asyncio.create_task(self.copy.begin(self.tokens(), Sampling(), TokenLimits(1)))
        await self.link.stuck.wait()
        task.cancel()
        await asyncio.wait([task])
        self.link.cut_off = set()
        assert self.copy.state is CopyState.UNSURE and not len(self.copy.held)

    def whole(self) -> Ids:
        self.said = [*self.prompt.tolist(), *self.read]
        return ids_of(self.said)

    def check(self) -> None:
        state, lost = self.copy.state, self.copy.lost
        assert state is CopyState.HELD or not len(self.copy.held)
        if state is CopyState.EMPTY:
            assert self.copy._sequence is None and not len(self.copy.sent)
        elif state in (CopyState.HELD, CopyState.GENERATING) and not lost and not self.tampered:
            self.agree(self.copy)

    def agree(self, copy: EngineCopy) -> None:
        """The engine's sequence begins with what the copy knows, and has no more where it is held."""
        if copy._sequence is None or self.tampered:
            return
        held = self.link.held[copy._sequence.seq].tokens
        assert held[: len(copy.sent)] == copy.sent.tolist()
        assert copy.state is not CopyState.HELD or len(held) == len(copy.sent)


ACTIONS = ["begin", "begin", "row", "row", "stop", "prefill", "lease", "fork", "wait", "close", "die"]


@settings(max_examples=settings().max_examples * 3 // 2)
@given(
    st.lists(st.sampled_from([*ACTIONS, "tamper", "cut_off"]), min_size=1, max_size=25),
    st.integers(1, 3),
    st.randoms(use_true_random=False),
)
def test_each_state_says_what_the_engine_holds(actions: list[str], ahead: int, random: Random) -> None:
    async def play() -> None:
        stage = Play(random, ahead)
        for action in actions:
            await stage.do(action)
        await stage.close()
        assert stage.copy.state is CopyState.EMPTY

    asyncio.run(asyncio.wait_for(play(), 20))
