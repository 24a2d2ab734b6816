"""``holdfast demo --voice``: a call without audio. A synthetic recogniser turns speech into words, with errors;
its partial results are prefilled while they come. The caller interrupts some replies.

The same call is held twice over real sockets and in real time: once each partial result is sent when it comes
("streamed"), once each line is sent whole at the end of speech. The demo prints the TTFT from the end of speech
and the tokens computed in vain, and fails if the replies of the two calls differ. Speech has 3.3 words a
second, a partial result every 200 ms, and one in ten of these is wrong about its last words.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from random import Random
from statistics import median

from rich.console import Console
from rich.table import Table

from holdfast.gateway.cli.demo import engine_of, figures, played, verdict
from holdfast.gateway.server import serving
from holdfast.gateway.settings import GatewaySettings
from holdfast.runtime.model.folder import POCKET
from holdfast.sdk import Chat, connect
from holdfast.sdk.text_input import TextInput

WORDS_PER_SECOND = 3.3
PARTIAL_SECONDS = 0.2
WRONG = 0.1  # the share of partials with one to three wrong words at their end
MUMBLED = ("well", "the", "a", "and", "there", "then", "told", "moss")
STORY = "Tell me the story of the fox."


@dataclass(frozen=True, slots=True)
class SpokenLine:
    """One line of the call. ``speak``: what the caller says. ``expect``: a text that the reply must contain.
    ``barge_in``: after how many characters of the reply the caller interrupts it; None: not at all."""

    speak: str
    expect: str = ""
    barge_in: int | None = None


SCRIPT = (
    SpokenLine(
        "Hello there. My name is Marisol and my sister is called Clara and my favourite colour is teal.",
        "Marisol",
    ),
    SpokenLine(
        "My locker code is 4821 and my bike code is 1357 and the meeting is at 14:30"
        " and my favourite drink is cocoa and my dog is called Rocky."
    ),
    SpokenLine(STORY, barge_in=40),
    SpokenLine("What is my locker code?", "4821"),
    SpokenLine("When is the meeting?", "14:30"),
    SpokenLine("What is my favourite colour?", "teal"),
    SpokenLine("What is my sister called?", "Clara"),
    SpokenLine("What is my name?", "Marisol"),
)
DICTATED = 12
"""A line of at least so many words is long enough that a part of it can be prefilled while it is spoken."""


@dataclass(frozen=True, slots=True)
class Partial:
    """A partial result of the recogniser: ``text`` is what it has understood ``at`` so many seconds after the
    beginning of speech."""

    at: float
    text: str


@dataclass(frozen=True, slots=True)
class VoiceReply:
    """The reply to one line. ``ttft_ms``: milliseconds from the end of speech to its first text. ``wasted``:
    tokens computed beyond the truly new ones. For a streamed line also ``ahead``: tokens that were prefilled
    while it was spoken; ``retracted``: how often text that was sent was taken back."""

    text: str
    ttft_ms: float
    wasted: int
    ahead: int = 0
    retracted: int = 0


def partials(text: str, chance: Random) -> Iterator[Partial]:
    """The recogniser's results while ``text`` is spoken, in order of time. ``chance`` decides which are wrong.
    The last one, at the end of speech, is right."""
    words = text.split(" ")
    ends = len(words) / WORDS_PER_SECOND
    at = PARTIAL_SECONDS
    while at < ends:
        said = words[: int(at * WORDS_PER_SECOND)]
        if said and chance.random() < WRONG:
            wrong = min(len(said), chance.randint(1, 3))
            said = [*said[:-wrong], *chance.choices(MUMBLED, k=wrong)]
        if said:
            yield Partial(at, " ".join(said))
        at += PARTIAL_SECONDS
    yield Partial(ends, text)


def run(speed: float = 1.0, lines: int | None = None) -> int:
    """Hold the call, ``speed`` times as fast as people speak. ``lines``: only the first so many lines; None:
    all. Returns the exit code: 0 if all was right, 1 if not, 2 if it could not start."""
    return played(lambda console: _call(console, speed, SCRIPT[:lines]))


async def _call(console: Console, speed: float, script: tuple[SpokenLine, ...]) -> int:
    console.print(
        "[dim]A call to the pocket model, held twice: streamed while it is spoken, and not.[/dim]\n"
    )
    chance = Random(5)
    wrong: list[str] = []
    pairs: list[tuple[VoiceReply, VoiceReply]] = []
    async with (
        serving(GatewaySettings(port=0), engine_of(POCKET)) as running,
        connect(running.url) as client,
        client.session(temperature=0) as streamed,
        client.session(temperature=0) as plain,
    ):
        for line in script:
            console.print(f"[bold]caller[/bold]  {line.speak}")
            pair = await _streamed(streamed, line, chance, speed), await _plain(plain, line)
            pairs.append(pair)
            console.print(f"[bold cyan]pocket[/bold cyan]  {pair[0].text}", soft_wrap=True)
            console.print(f"[dim]        {_cost(line, *pair)}[/dim]", soft_wrap=True)
            wrong += _faults(line, *pair)
    console.print(_table(script, pairs))
    return _verdict(wrong, script, pairs, console)


async def _streamed(chat: Chat, line: SpokenLine, chance: Random, speed: float) -> VoiceReply:
    """Speak a line, and send what each partial result changes when it comes. Returns the reply and its
    figures."""
    began = time.perf_counter()
    typing, retracted = chat.input(), 0
    for partial in partials(line.speak, chance):
        await asyncio.sleep(max(0.0, began + partial.at / speed - time.perf_counter()))
        ended = time.perf_counter()
        retracted += await _correct(typing, partial.text)
    committed = await typing.commit()
    heard = await _reply(chat, None, line, ended)
    return replace(heard, ahead=committed.prefilled_tokens, retracted=retracted)


async def _plain(chat: Chat, line: SpokenLine) -> VoiceReply:
    """Send the whole line at the end of speech. Returns the reply and its figures."""
    return await _reply(chat, line.speak, line, time.perf_counter())


async def _correct(typing: TextInput, text: str) -> bool:
    """Change the input so far, ``typing``, into ``text``, by sending only what differs. Returns whether text
    that was sent was taken back."""
    pairs = enumerate(zip(typing.text, text, strict=False))
    same = next((at for at, (one, other) in pairs if one != other), min(len(typing.text), len(text)))
    if same < len(typing.text):
        await typing.replace(same, text[same:])
        return True
    if same < len(text):
        await typing.append(text[same:])
    return False


async def _reply(chat: Chat, text: str | None, line: SpokenLine, ended: float) -> VoiceReply:
    said, first = "", 0.0
    async for piece in chat.say(text):
        first = first or time.perf_counter()
        said += piece
        if line.barge_in is not None and len(said) >= line.barge_in:
            said = await chat.interrupt(heard=line.barge_in)
            break
    kv = chat.last.kv
    wasted = 0 if kv is None else max(0, kv.prefilled + kv.recomputed - kv.new)
    return VoiceReply(said, 1000 * (first - ended), wasted)


# --- output ---------------------------------------------------------------------------------------------------


def _cost(line: SpokenLine, streamed: VoiceReply, plain: VoiceReply) -> str:
    cut = f" · cut after {line.barge_in} characters" if line.barge_in is not None else ""
    ahead = f" · {streamed.ahead} tokens ahead"
    vain = f" · {streamed.retracted} times corrected" if streamed.retracted else ""
    vain += f" · {streamed.wasted} tokens in vain" if streamed.wasted else ""
    times = f"{streamed.ttft_ms:.0f} ms, not streamed {plain.ttft_ms:.0f} ms"
    return f"TTFT from the end of speech {times}{ahead}{vain}{cut}"


def _faults(line: SpokenLine, streamed: VoiceReply, plain: VoiceReply) -> list[str]:
    faults = []
    if streamed.text != plain.text:
        faults.append(f"{line.speak!r}: {streamed.text!r} where it was streamed, {plain.text!r} where not")
    if line.expect not in streamed.text:
        faults.append(f"{line.speak!r}: the reply lacks {line.expect!r}")
    if plain.wasted:
        faults.append(f"{line.speak!r}: {plain.wasted} tokens were computed twice")
    return faults


def _table(script: tuple[SpokenLine, ...], pairs: list[tuple[VoiceReply, VoiceReply]]) -> Table:
    headings = ("words", "streamed ms", "not streamed ms", "ahead", "corrected", "in vain", "cut after")
    rows = [
        [
            len(line.speak.split()),
            *(f"{heard.ttft_ms:.0f}" for heard in (streamed, plain)),
            *(streamed.ahead, streamed.retracted, streamed.wasted),
            "" if line.barge_in is None else line.barge_in,
        ]
        for line, (streamed, plain) in zip(script, pairs, strict=True)
    ]
    return figures("From the end of speech to the first word", headings, rows)


def _verdict(
    wrong: list[str],
    script: tuple[SpokenLine, ...],
    pairs: list[tuple[VoiceReply, VoiceReply]],
    console: Console,
) -> int:
    heard = list(zip(script, pairs, strict=True))
    long = [pair for line, pair in heard if len(line.speak.split()) >= DICTATED]
    retracted = sum(streamed.retracted for streamed, _ in pairs)
    vain = sum(streamed.wasted for streamed, _ in pairs)
    console.print(
        f"Median TTFT from the end of speech: {_medians(pairs)}; of lines of {DICTATED} words or more"
        f" {_medians(long)}. What was recognised was corrected {retracted} times, and"
        f" {vain} tokens were computed in vain.",
        soft_wrap=True,
    )
    right = "Streamed and not, every reply was the same, and what was told was recalled."
    return verdict(wrong, console, [right])


def _medians(pairs: list[tuple[VoiceReply, VoiceReply]]) -> str:
    if not pairs:
        return "not measured"
    streamed, plain = (median(pair[which].ttft_ms for pair in pairs) for which in (0, 1))
    return f"{streamed:.0f} ms streamed, {plain:.0f} ms not"
