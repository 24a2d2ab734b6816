"""``SamplingParams``: how a prompt of `offline.LLM` is completed, with the names and defaults of vLLM's class.

The values are checked by `sessions.turn.request`, which also checks those of all protocols. No torch is
imported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import msgspec

from ...runtime.link.messages import SamplingDefaults
from ...runtime.verbs import MAX_LOGPROBS, Grammar, GrammarKind
from ...sessions.conversation.items import Tool
from ...sessions.errors import GrammarInvalid, SamplingInvalid
from ...sessions.tools.grammar import checked_grammar, json_format
from ...sessions.turn.request import MAX_INTEGER, UNBOUNDED, RequestBounds, TurnRequest, integer

DEFAULT_MAX_TOKENS = 16
MAX_N = 16_384
STRUCTURED = "structured_outputs"
_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """The form that every completion must have; exactly one field is set.

    ``json``: a JSON Schema, as a dict or as text. ``json_object``: any JSON object. ``regex``: a regular
    expression. ``choice``: one of these texts. ``grammar``: a Lark grammar in llguidance's dialect. Raises
    ``GrammarInvalid`` if no field or several are set, and for a grammar that is too large or not valid.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool = False

    def __post_init__(self) -> None:
        self.compiled()

    def compiled(self) -> Grammar:
        """The form as a grammar for the engine. Raises ``GrammarInvalid``."""
        given = [field.name for field in fields(self) if getattr(self, field.name) not in (None, False)]
        if len(given) != 1:
            told = f"{' and '.join(given)} are set" if given else "nothing is set"
            raise GrammarInvalid(f"One field of `{STRUCTURED}` says what to write; {told}", param=STRUCTURED)
        param = f"{STRUCTURED}.{given[0]}"
        if self.regex is not None:
            return checked_grammar(Grammar(GrammarKind.REGEX, _text(self.regex, param)), param)
        if self.grammar is not None:
            return checked_grammar(Grammar(GrammarKind.LARK, _text(self.grammar, param)), param)
        if self.choice is not None:
            return checked_grammar(Grammar(GrammarKind.CHOICE, _choices(self.choice, param)), param)
        schema = {"type": "object"} if self.json is None else _schema(self.json, param)
        return json_format(schema, strict=True, param=param)


@dataclass(slots=True, kw_only=True)
class SamplingParams:
    """How to complete a prompt. Names, meanings and defaults are vLLM's; a field that is not here is not
    served.

    ``n``: completions of each prompt. ``temperature``: 0 (greedy) to 2. ``top_p``, ``top_k`` (0 or -1: all),
    ``min_p``, ``typical_p``: filters of the candidates. ``seed``: completion ``i`` of a prompt draws with
    ``seed + i``; None: a random one. ``stop``: texts, ``stop_token_ids``: token ids that end a completion; its
    text has neither. ``include_stop_str_in_output``: the text keeps the stop string that ended it.
    ``ignore_eos``: the model's end tokens do not end a completion. ``max_tokens``: at most so many tokens;
    None: as many as the context holds. ``min_tokens``: before so many tokens no end token, stop id or stop
    string counts. ``logprobs``: how many alternatives to report beside each token, 0 to 20; None: no log
    probabilities at all. ``prompt_logprobs``: the same for the tokens of the prompt, which is computed as a
    whole for them, whatever the prefix cache has. ``logit_bias``: by token id, what is added to its logit, -100
    to 100. ``bad_words``: texts or lists of token ids that are never written. ``structured_outputs``: the form
    that the whole text must have.

    The fields may be set later, too; they are checked again when they are used. Raises ``SamplingInvalid`` or
    ``GrammarInvalid``, which are ``ValueError``s; ``param`` names the field.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    typical_p: float = 1.0
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = DEFAULT_MAX_TOKENS
    min_tokens: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, float] | None = None
    bad_words: Sequence[str | Sequence[int]] | None = None
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        self.request()

    @classmethod
    def of_model(
        cls, defaults: SamplingDefaults, max_tokens: int | None = DEFAULT_MAX_TOKENS
    ) -> SamplingParams:
        """The sampling parameters that the model itself recommends in its ``generation_config.json``; greedy if
        it has no such file. ``max_tokens``: the limit to put with them."""
        values = msgspec.structs.asdict(defaults)
        served = {name: values[name] for name in values if name in cls.__slots__}
        return cls(max_tokens=max_tokens, **served)

    def request(
        self,
        bounds: RequestBounds = UNBOUNDED,
        *,
        tools: Sequence[Tool] = (),
        tool_choice: str = "none",
        tool: str | None = None,
    ) -> TurnRequest:
        """The checked request for the engine. ``bounds``: what the model allows. ``tools``: those that the
        reply may call; ``tool_choice``: ``auto``, ``none`` or ``required``; ``tool``: the only one that it may
        call, None for any. Raises ``SamplingInvalid``, ``GrammarInvalid`` or ``ToolInvalid``."""
        integer("n", self.n, 1, MAX_N)
        integer("min_tokens", self.min_tokens, 0, MAX_INTEGER)
        if self.max_tokens is not None:
            integer("max_tokens", self.max_tokens, 1, MAX_INTEGER)
            if self.min_tokens > self.max_tokens:
                raise SamplingInvalid(
                    f"`min_tokens` {self.min_tokens} is above `max_tokens` {self.max_tokens}",
                    param="min_tokens",
                )
        if self.logprobs is not None:
            integer("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        structured = self.structured_outputs
        if structured is not None and not isinstance(structured, StructuredOutputsParams):
            raise GrammarInvalid(f"`{STRUCTURED}` must be a StructuredOutputsParams", param=STRUCTURED)
        return TurnRequest.checked(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=0 if self.top_k == -1 else self.top_k,
            min_p=self.min_p,
            typical_p=self.typical_p,
            seed=self.seed,
            stop=(self.stop,) if isinstance(self.stop, str) else _listed("stop", self.stop),
            stop_token_ids=_listed("stop_token_ids", self.stop_token_ids),
            max_output_tokens=self.max_tokens,
            min_output_tokens=self.min_tokens,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            top_logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
            logit_bias=self.logit_bias,
            bad_words=_listed("bad_words", self.bad_words),
            format=None if structured is None else structured.compiled(),
            bounds=bounds,
            tools=tools or None,
            tool_choice=tool_choice,
            tool=tool,
        )


def _listed(name: str, values: Sequence[_Value] | None) -> Sequence[_Value]:
    if values is not None and (isinstance(values, str) or not isinstance(values, Sequence)):
        raise SamplingInvalid(f"`{name}` must be a list", param=name)
    return values or ()


def _text(value: object, param: str) -> str:
    if not isinstance(value, str):
        raise GrammarInvalid(f"`{param}` must be text", param=param)
    return value


def _choices(choice: Sequence[str], param: str) -> str:
    if isinstance(choice, str) or not choice or not all(isinstance(one, str) and one for one in choice):
        raise GrammarInvalid(f"`{param}` must be a list of texts, none of them empty", param=param)
    return msgspec.json.encode(list(choice)).decode()


def _schema(schema: object, param: str) -> dict[str, Any]:
    if isinstance(schema, str):
        try:
            schema = msgspec.json.decode(schema)
        except msgspec.DecodeError as fault:
            raise GrammarInvalid(f"`{param}` is no JSON: {fault}", param=param) from None
    if not isinstance(schema, Mapping):
        raise GrammarInvalid(f"`{param}` must be a JSON Schema that is an object", param=param)
    return dict(schema)
