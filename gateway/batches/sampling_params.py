"""``SamplingParams``: how a prompt of `offline.LLM` is completed, with the names and defaults of vLLM's class.

The values are checked by `sessions.turn.request`, which also checks those of all protocols. No torch is
imported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import msgspec

from ...runtime.verbs import Grammar, SamplingDefaults
from ...sessions.conversation.items import Tool
from ...sessions.errors import GrammarInvalid, SamplingInvalid
from ...sessions.turn.request import UNBOUNDED, RequestBounds, TurnRequest, integer
from ..live.requests import renaming, sampling_of, structured_grammar

DEFAULT_MAX_TOKENS = 16
MAX_N = 16_384
STRUCTURED = "structured_outputs"
NAMES = {"max_output_tokens": "max_tokens", "min_output_tokens": "min_tokens", "top_logprobs": "logprobs"}
"""Names of fields, where they are not those of all protocols."""


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
        return structured_grammar(given[0], getattr(self, given[0]), f"{STRUCTURED}.{given[0]}")


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
        structured = self.structured_outputs
        if structured is not None and not isinstance(structured, StructuredOutputsParams):
            raise GrammarInvalid(f"`{STRUCTURED}` must be a StructuredOutputsParams", param=STRUCTURED)
        _check_list("stop_token_ids", self.stop_token_ids)
        _check_list("bad_words", self.bad_words)
        if not isinstance(self.stop, str):
            _check_list("stop", self.stop)
        with renaming(NAMES):
            return TurnRequest.checked(
                **sampling_of(self, NAMES),
                prompt_logprobs=self.prompt_logprobs,
                format=None if structured is None else structured.compiled(),
                bounds=bounds,
                tools=tools or None,
                tool_choice=tool_choice,
                tool=tool,
            )


def _check_list(name: str, values: object) -> None:
    if values is not None and (isinstance(values, str) or not isinstance(values, Sequence)):
        raise SamplingInvalid(f"`{name}` must be a list", param=name)
