"""``holdfast bench pocket``: the skills of the pocket model through SDK, socket, gateway and engine process.

Holds several conversations at once that are not in the training data; a conversation is right if every scored
turn is, to the letter. Also counts tokens prefilled against truly new ones. Measures no speed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from holdfast.gateway.server import serving
from holdfast.gateway.settings import GatewaySettings
from holdfast.runtime.errors import RuntimeFault
from holdfast.runtime.settings import EngineSettings
from holdfast.sdk import Chat, Client, SDKError, ServerError, connect
from holdfast.sdk.connection.responses import Finished
from holdfast.sdk.frames.items import FunctionCallItem

from ..report import Goal, percentile, show
from .skills import SKILLS, ScoredConversation, ScoredTurn, conversations

GOALS = {"recall_short": 97.0, "recall_long": 90.0, "tools": 97.0, "repeat": 95.0, "not_told": 95.0}
"""The percentage of right conversations that is the goal, by skill."""

SAMPLING: dict[str, Any] = {"temperature": 0, "max_output_tokens": 400}
"""The sampling of all replies. Their longest length is twice that of the longest story, so a reply that never
ends is cut off, and wrong."""

TOOL_ERROR = '{"error": "no such thing"}'
"""The output that an unexpected tool call gets."""


@dataclass
class SkillTally:
    """What came of the conversations of one skill: how many were right and wrong, and figures of their
    responses."""

    right: int = 0
    wrong: int = 0
    responses: int = 0
    uneven: int = 0
    """The number of responses, without each session's first, that prefilled another number of tokens than their
    truly new ones."""
    output_tokens: int = 0
    ttft_ms: list[float] = field(default_factory=list)
    misses: list[dict[str, str | None]] = field(default_factory=list)

    def count(self, finished: Finished, first: bool) -> None:
        """Add the figures of one response. ``first``: it is its session's first, for which prefilled tokens are
        not checked, because the description of its tools may be cached."""
        self.responses += 1
        self.output_tokens += finished.usage.output_tokens if finished.usage else 0
        if finished.ttft_ms is not None:
            self.ttft_ms.append(finished.ttft_ms)
        kv = finished.kv
        self.uneven += not first and (kv is None or kv.prefilled + kv.recomputed != kv.new)

    def told(self) -> dict[str, Any]:
        return {
            "conversations": self.right + self.wrong,
            "right": self.right,
            "responses": self.responses,
            "responses_not_prefilling_exactly_new": self.uneven,
            "output_tokens": self.output_tokens,
            "median_ttft_ms": round(median(self.ttft_ms), 1) if self.ttft_ms else None,
            "p99_ttft_ms": round(percentile(self.ttft_ms, 0.99), 1) if self.ttft_ms else None,
            "misses": self.misses[:10],
        }


async def hold(client: Client, conversation: ScoredConversation, tally: SkillTally) -> None:
    """Hold one conversation as it is written, judge it, and count it in ``tally``. If the server refuses
    something, it is wrong."""
    try:
        right = await _hold(client, conversation, tally)
    except ServerError as refused:
        tally.misses.append({"user": None, "expected": None, "said": f"{refused.code}: {refused.message}"})
        right = False
    tally.right += right
    tally.wrong += not right


async def _hold(client: Client, conversation: ScoredConversation, tally: SkillTally) -> bool:
    right = True
    fields: dict[str, Any] = (
        {} if conversation.instructions is None else {"instructions": conversation.instructions}
    )
    async with client.session(tools=conversation.tools, **SAMPLING, **fields) as chat:
        for number, turn in enumerate(conversation.turns):
            said, calls = await _take(chat, turn, tally, first=number == 0)
            if turn.scored and not _is_right(turn, said, calls):
                right = False
                called = "".join(f"{call.name}({call.arguments})" for call in calls)
                tally.misses.append({"user": turn.user, "expected": turn.expect, "said": called + said})
    return right


async def _take(
    chat: Chat, turn: ScoredTurn, tally: SkillTally, first: bool
) -> tuple[str, list[FunctionCallItem]]:
    """Take a turn, and answer the tool call if there is one. Returns all text and calls of the turn."""
    said = await chat.say(turn.user).text()
    tally.count(chat.last, first)
    calls = chat.last.calls
    for call in calls:
        expected = turn.tool_call is not None and turn.tool_output is not None and len(calls) == 1
        await chat.answer(call, str(turn.tool_output) if expected else TOOL_ERROR)
    if calls:
        said += await chat.say().text()
        tally.count(chat.last, first=False)
        calls = [*calls, *chat.last.calls]
    return said, calls


def _is_right(turn: ScoredTurn, said: str, calls: Sequence[FunctionCallItem]) -> bool:
    wanted = turn.tool_call
    if wanted is None:
        return not calls and said == turn.expect
    if len(calls) != 1 or calls[0].name != wanted.name or said != turn.expect:
        return False
    return bool(json.loads(calls[0].arguments) == wanted.arguments)


async def measure(
    skills: Iterable[str], count: int, seed: int, sessions: int, model: str
) -> tuple[dict[str, SkillTally], float]:
    """Hold ``count`` conversations of each skill, ``sessions`` of them at once. Returns what came of them by
    skill, and the seconds that it took."""
    tallies = {skill: SkillTally() for skill in skills}
    waiting = [
        (tally, conversation)
        for skill, tally in tallies.items()
        for conversation in conversations(skill, count, seed)
    ]
    waiting.reverse()
    async with serving(GatewaySettings(port=0), EngineSettings(model=model)) as running:
        began = time.monotonic()
        async with connect(running.url) as client:

            async def work() -> None:
                while waiting:
                    tally, conversation = waiting.pop()
                    await hold(client, conversation, tally)
                    _progress(len(waiting))

            await asyncio.gather(*(work() for _ in range(sessions)))
        return tallies, time.monotonic() - began


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="holdfast bench pocket", description=__doc__)
    parser.add_argument("--count", type=int, default=200, help="conversations of each skill")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--sessions", type=int, default=12, help="conversations at once")
    parser.add_argument("--skills", nargs="*", default=SKILLS, choices=SKILLS)
    parser.add_argument("--model", default="pocket", help="the pocket model, or another folder of its kind")
    chosen = parser.parse_args(words)
    measuring = measure(chosen.skills, chosen.count, chosen.seed, chosen.sessions, chosen.model)
    try:
        tallies, seconds = asyncio.run(measuring)
    except (RuntimeFault, SDKError, OSError) as failed:
        print(f"holdfast bench pocket: {failed}", file=sys.stderr)
        return 1
    figures = {
        "skills": {skill: tally.told() for skill, tally in tallies.items()},
        "sessions_at_once": chosen.sessions,
        "seconds": round(seconds, 1),
    }
    show("pocket", chosen.seed, figures, [*_skill_goals(tallies), _prefill_goal(tallies)])
    return 0


def _skill_goals(tallies: dict[str, SkillTally]) -> list[Goal]:
    return [
        Goal(skill, 100.0 * tally.right / max(1, tally.right + tally.wrong), "%", GOALS[skill], "higher")
        for skill, tally in tallies.items()
    ]


def _prefill_goal(tallies: dict[str, SkillTally]) -> Goal:
    uneven = sum(tally.uneven for tally in tallies.values())
    return Goal("responses that prefilled other than their new tokens", float(uneven), "", 0.0, "lower")


def _progress(left: int) -> None:
    if sys.stderr.isatty():
        print(f"\r{left} conversations left ", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
