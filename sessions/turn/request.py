"""What a client may ask of a turn: ``TurnRequest``. It is checked when it is made and trusted afterwards.

The gateway makes it from ``response.create`` and the session's defaults.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from ...runtime.verbs import LEAST_PENALTY, MAX_LOGPROBS, MOST_PENALTY, Grammar, GrammarKind, Sampling
from ..conversation.items import Item, Preamble, Tool, checked_item, checked_preamble
from ..errors import GrammarInvalid, SamplingInvalid, ToolInvalid
from ..tools.arguments import parameters

MAX_INTEGER = 2**31 - 1
MAX_SEED = 2**63 - 1
MAX_BIASED = 1024
MAX_BIAS = 100.0
MAX_BAD_WORDS = 256
MAX_WORD_TOKENS = 64
MAX_WORD_CHARACTERS = 256
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 256
MAX_STOP_IDS = 64
LEAST_TOP_P = 1e-9
"""Instead of 0: the most likely token alone."""
NO_TOOLS = (
    "This model's chat template does not show tools to the model. "
    "A server that is started with --tool-fallback writes them into the instructions"
)


@dataclass(frozen=True, slots=True)
class RequestBounds:
    """What a model allows in a request.

    ``vocab_size``: every token id is smaller; None: unknown here, so only the engine refuses ids that are too
    large. ``tools``: prompts show tools. ``cycle_tokens``: the number of repeated tokens that ends a reply; 0:
    none.
    """

    vocab_size: int | None = None
    tools: bool = True
    cycle_tokens: int = 0


UNBOUNDED = RequestBounds()

RETAINED = 0.8
"""The share of the tokens behind the instructions that ``truncation: auto`` keeps when the context is full.

A share r frees 1 - r of the context. What stays is prefilled again, which costs r / (1 - r) tokens for each new
token. At 0.8 that is 4, and on average nine tenths of the context are in use; at 0.5 it is 1, and three
quarters. At 1.0, OpenAI's ``auto``, every turn in a full context prefills the whole prompt.
"""


class Truncation(msgspec.Struct, frozen=True):
    """What a turn does if its prompt, with room for the reply, does not fit into the context. It leaves out the
    oldest turns until the tokens behind the instructions are at most the share ``retained`` of what fits there.

    ``post_instructions``: the most tokens behind the instructions; None: as many as fit.
    """

    retained: float = RETAINED
    post_instructions: int | None = None


class TurnRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The request for one turn. Make it with ``checked``.

    ``max_output_tokens``: None for as many as the context holds.
    ``min_output_tokens``: no end token, stop id or stop string ends the reply before.
    ``stop_ids``: ids that end the reply, besides the model's end tokens.
    ``banned``: bad words that are still text; `TurnGrammar.spell` makes token ids of them.
    ``input``, ``instructions``, ``tools``: if not None, they replace the conversation's in this turn only.
    ``out_of_band``: the reply does not join the conversation, and may run beside other turns.
    ``prefill_only``: the reply does not join the conversation either, but the KV of the prompt stays with it.
    ``more``: items that follow the conversation in this turn only; for a request out of band.
    ``truncation``: None refuses a prompt that does not fit. ``input`` is never truncated.
    ``prompt``: token ids that are the whole prompt, instead of the conversation and its template; for a
    request out of band. None: the conversation is the prompt.
    ``parse_calls``: if false, tool calls are delivered as text; so are those of a turn without tools.
    ``parallel_calls``: if false, the reply ends behind its first call.
    ``format``: the grammar of the reply's text.
    ``tool_choice``: auto, none or required; with required the reply is only calls, of ``tool`` if that is set.
    ``allowed``: names of the only tools that may be called; none: nothing is ruled out.
    ``cycle_tokens``: so many repeated tokens end the reply, as in `cycles`; 0: none do.
    ``verbatim``: the client sent the whole conversation with the request. The prompt reads as the template
    writes its items, whatever tokens the session has of earlier turns.
    """

    sampling: Sampling = Sampling()
    max_output_tokens: int | None = None
    stop: tuple[str, ...] = ()
    out_of_band: bool = False
    prefill_only: bool = False
    input: tuple[Item, ...] | None = None
    instructions: str | None = None
    tools: tuple[Tool, ...] | None = None
    parse_calls: bool = True
    parallel_calls: bool = True
    min_output_tokens: int = 0
    stop_ids: tuple[int, ...] = ()
    banned: tuple[str, ...] = ()
    format: Grammar | None = None
    tool_choice: str = "auto"
    tool: str | None = None
    allowed: tuple[str, ...] = ()
    cycle_tokens: int = 0
    more: tuple[Item, ...] = ()
    truncation: Truncation | None = None
    prompt: tuple[int, ...] | None = None
    verbatim: bool = False

    @classmethod
    def checked(
        cls,
        *,
        bounds: RequestBounds = UNBOUNDED,
        offered: Sequence[Tool] = (),
        ignore_eos: bool = False,
        stop_token_ids: Sequence[int] = (),
        bad_words: Sequence[str | Sequence[int]] = (),
        **given: Any,
    ) -> TurnRequest:
        """Make a request and check its bounds. ``given``: fields of this class, lists for tuples, too, and
        parameters of `checked_sampling`. ``bounds``: what the model allows.

        ``offered``: the conversation's tools, which are used if ``tools`` is None. ``ignore_eos``: the reply
        has as many tokens as ``max_output_tokens``, or as fit into the context. Raises ``SamplingInvalid``,
        ``ItemInvalid``, ``ToolInvalid`` or ``GrammarInvalid``; ``param`` names the field.
        """
        asked = cls(**{name: given.pop(name) for name in cls.__struct_fields__ if name in given})
        most, least = asked.max_output_tokens, asked.min_output_tokens
        if ignore_eos:  # served as a least number of tokens, before which nothing stops a reply
            if most is None or asked.stop or stop_token_ids:
                told = "`ignore_eos` needs a limit of tokens, and no `stop` and no `stop_token_ids`"
                raise SamplingInvalid(told, param="ignore_eos")
            least = most
        if most is not None:
            integer("max_output_tokens", most, 1, MAX_INTEGER)
        integer("min_output_tokens", least, 0, MAX_INTEGER)
        if most is not None and least > most:
            told = f"`min_output_tokens` {least} is above `max_output_tokens` {most}"
            raise SamplingInvalid(told, param="min_output_tokens")
        preamble = checked_preamble(
            Preamble(instructions=asked.instructions or "", tools=tuple(asked.tools or ()))
        )
        tools = tuple(offered) if asked.tools is None else preamble.tools
        if tools and not bounds.tools:
            raise ToolInvalid(NO_TOOLS, param="tools")
        allowed, form = _allowed(asked.allowed, tools), asked.format
        _check_choice(asked.tool_choice, asked.tool, allowed, form, tools)
        texts, words = _words(bad_words)
        ids = None if asked.prompt is None else token_ids("prompt", asked.prompt, bounds.vocab_size)
        if ids is not None and not (ids and asked.out_of_band):
            raise SamplingInvalid("A prompt of tokens has at least one, and is out of band", param="prompt")
        calls = asked.tool_choice != "none" and (
            form is None or (bool(tools) and form.kind is GrammarKind.JSON)
        )
        return msgspec.structs.replace(
            asked,
            sampling=checked_sampling(bad_words=words, vocab_size=bounds.vocab_size, **given),
            stop=_stops(asked.stop),
            input=None if asked.input is None else tuple(map(checked_item, asked.input)),
            tools=None if asked.tools is None else preamble.tools,
            parse_calls=ids is None and calls,
            min_output_tokens=least,
            stop_ids=_stop_ids(stop_token_ids, bounds.vocab_size),
            banned=texts,
            allowed=allowed,
            cycle_tokens=bounds.cycle_tokens,
            more=tuple(map(checked_item, asked.more)),
            prompt=ids,
        )

    @property
    def bound(self) -> bool:
        """Whether a grammar constrains the reply from its first token on."""
        return self.format is not None or self.tool_choice == "required"

    @property
    def plain(self) -> bool:
        """Whether the reply has no reasoning: a grammar constrains it, or no template wrote its prompt."""
        return self.bound or self.prompt is not None

    @property
    def one_call(self) -> bool:
        """Whether the reply is exactly one call, and only its grammar or its length can end it: a tool is
        named, and there are no stop strings and no stop ids."""
        return self.tool is not None and not self.stop and not self.stop_ids

    def preamble(self, default: Preamble) -> Preamble:
        """The preamble of this turn: ``default``, the session's, with the request's instructions and tools,
        where they are set, instead of its own."""
        instructions = default.instructions if self.instructions is None else self.instructions
        return Preamble(instructions=instructions, tools=default.tools if self.tools is None else self.tools)


def _allowed(names: Sequence[str], tools: Sequence[Tool]) -> tuple[str, ...]:
    """The names of the tools that may be called; none if ``names`` has none. One that lists all tools counts,
    too: without a grammar, the model may call what an earlier turn has shown."""
    unknown = set(names) - {tool.name for tool in tools}
    if unknown:
        raise SamplingInvalid(f"There is no tool {min(unknown)!r} to be allowed", param="tool_choice")
    wanted = set(names)
    return tuple(tool.name for tool in tools if tool.name in wanted)


def _check_choice(
    choice: str,
    tool: str | None,
    allowed: Sequence[str],
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
    names = allowed if tool is None else (tool,)
    for at, known in enumerate(tools):
        if known.strict and choice != "none" and (not names or known.name in names):
            parameters(known, f"tools[{at}].parameters")


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
    """Check a request's bad words. Returns those that are text, and those that are lists of token ids. Raises
    ``SamplingInvalid``."""
    if len(words) > MAX_BAD_WORDS:
        raise SamplingInvalid(f"At most {MAX_BAD_WORDS} bad words", param="bad_words")
    texts = tuple(word for word in words if isinstance(word, str))
    if not all(1 <= len(text) <= MAX_WORD_CHARACTERS for text in texts):
        raise SamplingInvalid(f"A bad word has 1 to {MAX_WORD_CHARACTERS} characters", param="bad_words")
    return texts, [word for word in words if not isinstance(word, str)]


# --- sampling parameters ------------------------------------------------------------------------------------


_LIMITS = {
    "top_k": MAX_INTEGER,
    "seed": MAX_SEED,
    "top_logprobs": MAX_LOGPROBS,
    "prompt_logprobs": MAX_LOGPROBS,
}
"""The most of each parameter that is an integer; the least is 0."""
_RANGES = {
    "temperature": (0.0, 2.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "typical_p": (0.0, 1.0),
    "repetition_penalty": (LEAST_PENALTY, MOST_PENALTY),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
}
"""The least and the most of each parameter that is a number."""


def checked_sampling(
    *,
    logit_bias: Mapping[int, float] | None = None,
    bad_words: Sequence[Sequence[int]] = (),
    vocab_size: int | None = None,
    **given: Any,
) -> Sampling:
    """Make sampling parameters and check their bounds.

    ``given``: the fields of ``Sampling`` in `_RANGES` and `_LIMITS`; ``seed``: None for a random one.
    ``top_logprobs``: its ``logprobs``. ``vocab_size``: every token id must be smaller; None: only the engine
    checks that. Raises ``SamplingInvalid``; ``param`` names the field.
    """
    for name, value in given.items():
        if name in _RANGES:
            given[name] = number(name, value, *_RANGES[name])
        elif name in _LIMITS and (value is not None or name == "top_k"):
            integer(name, value, 0, _LIMITS[name])
    if given.get("typical_p") == 0:
        raise SamplingInvalid("`typical_p` must be above 0", param="typical_p")
    seed, logprobs = given.pop("seed", None), given.pop("top_logprobs", None)
    return Sampling(
        **given | {"top_p": given.get("top_p", 1.0) or LEAST_TOP_P},
        seed=secrets.randbits(63) if seed is None else seed,
        logprobs=logprobs,
        logit_bias=_bias(logit_bias or {}, vocab_size),
        bad_words=_bad_words(bad_words, vocab_size),
    )


def number(name: str, value: Any, least: float, most: float) -> float:
    """Check ``value``, the field ``name`` of a request, and return it as a float. Raises ``SamplingInvalid``
    unless it is a finite number from ``least`` to ``most``."""
    real = isinstance(value, int | float) and not isinstance(value, bool)
    if not real or not least <= value <= most or not math.isfinite(value):
        raise SamplingInvalid(f"`{name}` must be a number from {least:g} to {most:g}", param=name)
    return float(value)


def integer(name: str, value: Any, least: int, most: int) -> int:
    """Check and return ``value``, the field ``name`` of a request. Raises ``SamplingInvalid`` unless it is a
    whole number from ``least`` to ``most``."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise SamplingInvalid(f"`{name}` must be an integer from {least} to {most}", param=name)
    return value


def token_ids(name: str, ids: Any, vocab_size: int | None) -> tuple[int, ...]:
    """Check ``ids``, the field ``name`` of a request, and return them as a tuple. Raises ``SamplingInvalid``
    unless all are in the vocabulary. ``vocab_size``: None if it is not known here."""
    most = MAX_INTEGER if vocab_size is None else vocab_size - 1
    if not isinstance(ids, Iterable) or isinstance(ids, str | bytes):
        raise SamplingInvalid(f"`{name}` must hold token ids", param=name)
    found = tuple(ids)
    for token in found:
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token <= most:
            raise SamplingInvalid(f"`{name}`: {token!r:.40} is not a token id from 0 to {most}", param=name)
    return found


def _bias(bias: Mapping[int, float], vocab_size: int | None) -> tuple[tuple[int, float], ...]:
    if not isinstance(bias, Mapping) or len(bias) > MAX_BIASED:
        raise SamplingInvalid(f"`logit_bias` maps at most {MAX_BIASED} token ids", param="logit_bias")
    ids = token_ids("logit_bias", bias, vocab_size)
    values = [number("logit_bias", value, -MAX_BIAS, MAX_BIAS) for value in bias.values()]
    return tuple(zip(ids, values, strict=True))


def _bad_words(words: Sequence[Sequence[int]], vocab_size: int | None) -> tuple[tuple[int, ...], ...]:
    found = tuple(token_ids("bad_words", word, vocab_size) for word in words)
    if len(found) > MAX_BAD_WORDS or not all(1 <= len(word) <= MAX_WORD_TOKENS for word in found):
        raise SamplingInvalid(
            f"At most {MAX_BAD_WORDS} bad words, each of 1 to {MAX_WORD_TOKENS} tokens", param="bad_words"
        )
    return found
