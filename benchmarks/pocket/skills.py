"""The skills of the pocket model as conversations that it was never trained on, with the exact replies
expected.

Values in them are of the held-out split. The conversations are held over a socket by `bench`, or in `evaluate`
with transformers alone.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from . import chatter
from .dialogues import Writer, opening
from .facts import any_subject
from .script import Dialogue, Exchange
from .toolbox import Json, WrittenCall
from .words import WorldWords

FAR = 1100
"""The least number of tokens in the turns between telling and asking in `recall_long`."""

ExpectedCall = WrittenCall


@dataclass(frozen=True)
class ScoredTurn:
    """One turn: what the user says and the exact reply that is expected; also the tool call, if one is
    expected, and its output. ``scored``: whether the turn counts for the skill."""

    user: str
    expect: str | None
    tool_call: ExpectedCall | None = None
    tool_output: str | None = None
    scored: bool = False


@dataclass(frozen=True)
class ScoredConversation:
    """One conversation. It shows the skill if every scored turn is right. ``tools``: definitions in the flat
    form of Realtime."""

    skill: str
    instructions: str | None
    tools: list[Json]
    turns: tuple[ScoredTurn, ...]

    def dialogue(self) -> Dialogue:
        exchanges = (Exchange(t.user, t.expect, t.tool_call, t.tool_output or "") for t in self.turns)
        return Dialogue(self.instructions, self.tools, list(exchanges))


def conversations(skill: str, count: int, seed: int) -> Iterator[ScoredConversation]:
    """So many conversations that test a skill; the same ones for the same seed."""
    for number in range(count):
        rng = random.Random(f"{skill} {seed} {number}")
        writer = Writer(rng, WorldWords(rng, held_out=True))
        start = opening(writer, tools=1.0 if skill == "tools" else 0.4)
        yield ScoredConversation(skill, start.system, start.tools, tuple(_MAKERS[skill](writer)))


def _recall_short(writer: Writer) -> list[ScoredTurn]:
    turns = _tells(writer, writer.rng.randint(1, 3))
    turns += _fill(writer, writer.rng.randint(0, 4 - len(turns)))
    asked = writer.rng.choice(list(writer.told))
    return [*turns, _turn(writer.ask(writer.told[asked][0]), scored=True)]


def _recall_long(writer: Writer) -> list[ScoredTurn]:
    turns = _tells(writer, writer.rng.randint(2, 4))
    subjects = [subject for subject, _ in writer.told.values()]
    tokens = 0
    filling: list[ScoredTurn] = []
    while tokens < FAR or len(filling) < 10:
        (turn,) = _fill(writer, 1)
        tokens += _at_least(turn)
        filling.append(turn)
    asked = writer.rng.sample(subjects, min(2, len(subjects)))
    return [*turns, *filling, *(_turn(writer.ask(subject), scored=True) for subject in asked)]


def _tools(writer: Writer) -> list[ScoredTurn]:
    turns = _fill(writer, writer.rng.randint(0, 3))
    for tool in writer.rng.choices(writer.tools, k=writer.rng.randint(1, 2)):
        turns.append(_turn(writer.tool_use(tool), scored=True))
        turns += _fill(writer, writer.rng.randint(0, 2))
    return turns


def _repeat(writer: Writer) -> list[ScoredTurn]:
    turns = _fill(writer, writer.rng.randint(0, 3))
    return [*turns, *(_turn(writer.repeat(), scored=True) for _ in range(writer.rng.randint(1, 2)))]


def _not_told(writer: Writer) -> list[ScoredTurn]:
    turns = _tells(writer, writer.rng.randint(0, 4)) + _fill(writer, writer.rng.randint(0, 4))
    return [*turns, _turn(writer.ask_untold(), scored=True)]


_MAKERS: dict[str, Callable[[Writer], list[ScoredTurn]]] = {
    "recall_short": _recall_short,
    "recall_long": _recall_long,
    "tools": _tools,
    "repeat": _repeat,
    "not_told": _not_told,
}
SKILLS = tuple(_MAKERS)


def _tells(writer: Writer, count: int) -> list[ScoredTurn]:
    turns = []
    for _ in range(count):
        subject = any_subject(writer.rng, writer.words)
        if writer.told and writer.rng.random() < 0.15:
            subject = writer.rng.choice(list(writer.told.values()))[0]
        turns.append(_turn(writer.tell(subject)))
    return turns


def _fill(writer: Writer, count: int) -> list[ScoredTurn]:
    """So many turns that neither repeat nor change what was told before."""
    makers: dict[Callable[[], Exchange], float] = {
        lambda: writer.tell(writer.untold()): 3,
        writer.ask_untold: 1,
        writer.repeat: 2,
        writer.tool: 2,
        lambda: writer.chat(chatter.count): 1,
        lambda: writer.chat(chatter.talk): 2,
        lambda: writer.chat(chatter.story): 1,
    }
    turns: list[ScoredTurn] = []
    while len(turns) < count:
        exchange = writer.rng.choices(list(makers), list(makers.values()))[0]()
        if exchange.weight > 0:
            turns.append(_turn(exchange))
    return turns


def _at_least(turn: ScoredTurn) -> int:
    """The fewest tokens that a turn can take: one for each word, digit, mark and white space that stands
    alone."""
    called = turn.tool_call.render() + "\n" * 10 if turn.tool_call else ""
    said = f"{turn.user}{called}{turn.tool_output or ''}{turn.expect}"
    return 10 + len(re.findall(r" ?[^\W\d_]+|\d| ?[^\w\s]+|\s", said))


def _turn(exchange: Exchange, scored: bool = False) -> ScoredTurn:
    turn = ScoredTurn(exchange.user, exchange.reply, exchange.call, scored=scored)
    return replace(turn, tool_output=exchange.output) if exchange.call else turn
