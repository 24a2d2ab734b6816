"""Any mix of turns, cuts, edits and faults: the engine holds what the tree says."""

from __future__ import annotations

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.sessions.conversation.items import Preamble
from holdfast.sessions.engine_copy import EngineCopy
from holdfast.sessions.turn.request import TurnRequest

from .scripted_link import ScriptedLink
from .session_stage import END, cancel, say, session_on, toks

actions = st.lists(
    st.sampled_from(
        ["turn", "cancel", "leave", "limit", "stop", "delete", "update", "error", "die", "aside"]
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=settings().max_examples * 3 // 2)
@given(actions, st.integers(1, 5), st.integers(1, 3), st.randoms(use_true_random=False))
def test_whatever_happens_the_engine_holds_what_the_tree_says(
    todo: list, ahead: int, per_row: int, random
) -> None:
    """After any mix of turns, cuts, edits and faults the branch's tokens and the engine's are the same."""

    def model(tokens: list[int]) -> int:
        if broken[0] and random.random() < 0.3:
            raise RuntimeError("not a number")
        return END if random.random() < 0.15 else random.choice(toks("one two three 🎉 four"))

    async def play() -> None:
        link = ScriptedLink(model, END, ahead=ahead, tokens_per_row=per_row)
        sequence = EngineCopy(link)
        session = session_on(link, sequence=sequence)
        for number, action in enumerate(todo):
            if action == "delete" and len(session.history):
                session.history.delete(random.choice(session.history.items()).id)
            elif action == "update":
                session.history.preamble = Preamble(instructions=f"Number {number}")
            elif action == "die":
                link.die()
                link.restart()
            broken[0] = action == "error"
            said = say(session, f"turn {number}")
            stop = ["two three", "🎉"] if action == "stop" else []
            request = TurnRequest.checked(
                max_output_tokens=3 if action == "limit" else 30, stop=stop, out_of_band=action == "aside"
            )
            response = session.respond(request)
            seen = 0
            async with response:
                async for _ in response:
                    seen += 1
                    if action == "cancel" and seen == 3:
                        await cancel(session)
                    if action == "leave" and seen == 3:
                        break
            assert not session.history.busy
            await sequence.wait_stopped()
            head = session.history.head
            if (
                head is not None
                and action not in ("error", "aside")
                and head.inputs[-1:]
                == session.history.items()[-2:-1]
                == (said,)  # not a reply before an empty one
            ):
                (held,) = link.held.values()
                tokens = head.tokens().tolist()
                if action == "stop":  # the rest of the stop string goes with the next turn
                    sampled = head.length - head.reply.respelled
                    assert held.tokens[:sampled] == tokens[:sampled]
                else:
                    assert held.tokens == tokens
            assert len(link.held) <= 1

    broken = [False]
    asyncio.run(asyncio.wait_for(play(), 20))
