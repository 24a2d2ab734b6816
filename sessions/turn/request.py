"""What a client may ask of a turn: ``TurnRequest``, checked once at birth and trusted below.

Knows nothing of frames; the gateway makes one from ``response.create`` and the session's defaults.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from ...runtime.link.messages import Grammar, GrammarKind, Sampling
from ..errors import GrammarInvalid, SamplingInvalid
from ..items import Item, Preamble, Tool, checked_item, checked_preamble
from ..tools.grammar import check_tool
from .sampling import MAX_BAD_WORDS, MAX_INTEGER, MAX_WORD_CHARACTERS, checked_sampling, integer, token_ids

MAX_STOPS = 16
MAX_STOP_CHARACTERS = 256
MAX_STOP_IDS = 64


class TurnRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One turn. Make it with ``checked``.

    ``max_output_tokens`` None: as many as the context holds. Before ``min_output_tokens`` no end token, stop
    id or stop string ends it. ``stop_ids`` end it besides the model's own end tokens. ``banned``: bad words
    that are text still; `Language.spelled` makes token ids of them. ``input``, ``instructions`` and ``tools``
    override the conversation's for this turn alone when they are not None. An ``out_of_band`` turn leaves
    the conversation as it was and may run beside others. Without ``parse_calls`` a call is delivered as
    text. ``format``: what its text must be. ``tool_choice`` is auto, none or required: then the reply is
    calls, of ``tool`` alone where it is named.
    """

    sampling: Sampling = Sampling()
    max_output_tokens: int | None = None
    stop: tuple[str, ...] = ()
    out_of_band: bool = False
    input: tuple[Item, ...] | None = None
    instructions: str | None = None
    tools: tuple[Tool, ...] | None = None
    parse_calls: bool = True
    min_output_tokens: int = 0
    stop_ids: tuple[int, ...] = ()
    banned: tuple[str, ...] = ()
    format: Grammar | None = None
    tool_choice: str = "auto"
    tool: str | None = None

    @classmethod
    def checked(
        cls,
        *,
        max_output_tokens: int | None = None,
        min_output_tokens: int = 0,
        stop: Sequence[str] = (),
        stop_token_ids: Sequence[int] = (),
        bad_words: Sequence[str | Sequence[int]] = (),
        vocab_size: int | None = None,
        out_of_band: bool = False,
        input: Sequence[Item] | None = None,  # noqa: A002 - the standard's word
        instructions: str | None = None,
        tools: Sequence[Tool] | None = None,
        tool_choice: str = "auto",
        tool: str | None = None,
        format: Grammar | None = None,  # noqa: A002 - the standard's word
        offered: Sequence[Tool] = (),
        **draw: Any,
    ) -> TurnRequest:
        """A request within bounds. ``draw`` is what `checked_sampling` takes: temperature, seed, penalties…

        ``offered``: the conversation's tools, where ``tools`` does not override them.
        Raises ``SamplingInvalid``, ``ItemInvalid``, ``ToolInvalid`` or ``GrammarInvalid``; ``param`` names the
        field.
        """
        if max_output_tokens is not None:
            integer("max_output_tokens", max_output_tokens, 1, MAX_INTEGER)
        integer("min_output_tokens", min_output_tokens, 0, MAX_INTEGER)
        if max_output_tokens is not None and min_output_tokens > max_output_tokens:
            raise SamplingInvalid(
                f"`min_output_tokens` {min_output_tokens} is above `max_output_tokens` {max_output_tokens}",
                param="min_output_tokens",
            )
        preamble = checked_preamble(Preamble(instructions=instructions or "", tools=tuple(tools or ())))
        callable_tools = tuple(offered) if tools is None else preamble.tools
        _check_choice(tool_choice, tool, format, callable_tools)
        texts, words = _words(bad_words)
        return cls(
            sampling=checked_sampling(bad_words=words, vocab_size=vocab_size, **draw),
            max_output_tokens=max_output_tokens,
            stop=_stops(stop),
            out_of_band=out_of_band,
            input=None if input is None else tuple(checked_item(item) for item in input),
            instructions=instructions,
            tools=None if tools is None else preamble.tools,
            parse_calls=tool_choice != "none" and (format is None or _joins(format, callable_tools)),
            min_output_tokens=min_output_tokens,
            stop_ids=_stop_ids(stop_token_ids, vocab_size),
            banned=texts,
            format=format,
            tool_choice=tool_choice,
            tool=tool,
        )

    @property
    def bound(self) -> bool:
        """Whether a grammar says all of its reply from the first token on, which leaves no room to think."""
        return self.format is not None or self.tool_choice == "required"

    @property
    def one_call(self) -> bool:
        """Whether its reply is one call and nothing else, which nothing but its grammar or its length ends."""
        return self.tool is not None and not self.stop and not self.stop_ids

    def preamble(self, default: Preamble) -> Preamble:
        """The session's preamble with this turn's overrides."""
        instructions = default.instructions if self.instructions is None else self.instructions
        return Preamble(instructions=instructions, tools=default.tools if self.tools is None else self.tools)


def _joins(format: Grammar, tools: Sequence[Tool]) -> bool:  # noqa: A002 - the standard's word
    """Whether calls may come in place of text in this format."""
    return bool(tools) and format.kind is GrammarKind.JSON


def _check_choice(
    choice: str,
    tool: str | None,
    format: Grammar | None,  # noqa: A002 - the standard's word
    tools: Sequence[Tool],
) -> None:
    if choice not in ("auto", "none", "required"):
        raise SamplingInvalid("`tool_choice` must be auto, none, required or a function", param="tool_choice")
    if choice == "required" and format is not None:
        raise GrammarInvalid("A call is required, and a text format asked for", param="tool_choice")
    if choice == "required" and not tools:
        raise SamplingInvalid("A call is required, and there are no tools", param="tool_choice")
    if tool is not None and (choice != "required" or all(known.name != tool for known in tools)):
        raise SamplingInvalid(f"There is no tool {tool!r} to be called", param="tool_choice")
    for known in tools:
        if choice == "required" or (choice == "auto" and (known.strict or format is not None)):
            check_tool(known, "tools")


def _stops(stop: Sequence[str]) -> tuple[str, ...]:
    if len(stop) > MAX_STOPS:
        raise SamplingInvalid(f"At most {MAX_STOPS} stop strings", param="stop")
    if not all(isinstance(text, str) and 1 <= len(text) <= MAX_STOP_CHARACTERS for text in stop):
        raise SamplingInvalid(f"A stop string has 1 to {MAX_STOP_CHARACTERS} characters", param="stop")
    return tuple(stop)


def _stop_ids(ids: Sequence[int], vocab_size: int | None) -> tuple[int, ...]:
    found = token_ids("stop_token_ids", ids, vocab_size)
    if len(found) > MAX_STOP_IDS:
        raise SamplingInvalid(f"At most {MAX_STOP_IDS} stop ids", param="stop_token_ids")
    return found


def _words(words: Sequence[str | Sequence[int]]) -> tuple[tuple[str, ...], list[Sequence[int]]]:
    """Bad words given as text, and those given as token ids."""
    if len(words) > MAX_BAD_WORDS:
        raise SamplingInvalid(f"At most {MAX_BAD_WORDS} bad words", param="bad_words")
    texts = tuple(word for word in words if isinstance(word, str))
    if not all(1 <= len(text) <= MAX_WORD_CHARACTERS for text in texts):
        raise SamplingInvalid(f"A bad word has 1 to {MAX_WORD_CHARACTERS} characters", param="bad_words")
    return texts, [word for word in words if not isinstance(word, str)]
