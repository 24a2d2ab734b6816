"""The sampling fields of a session and of a response, and the log probabilities of its tokens.

They are declared here for all protocols: names, ranges and meanings. Another protocol's requests have the same
fields under its names (`sampling_fields`). Except for `max_output_tokens` they are not in the Realtime
standard; their names are those of the Responses API, Chat Completions and vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import UNSET, Meta, UnsetType

MAX_STOPS = 16

TokenId: TypeAlias = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Count: TypeAlias = Annotated[int, Meta(ge=0, le=2**31 - 1)]
_MOST = 'The reply has no more tokens; "inf": as many as the context holds.'
MaxOutputTokens: TypeAlias = Annotated[int, Meta(ge=1, le=2**31 - 1, description=_MOST)] | Literal["inf"]
LogitBias: TypeAlias = Annotated[
    dict[TokenId, Annotated[float, Meta(ge=-100, le=100)]],
    Meta(max_length=1024, description="By token id, a number that is added to its logit."),
]
BadWord: TypeAlias = (
    Annotated[str, Meta(min_length=1, max_length=256)]
    | Annotated[list[TokenId], Meta(min_length=1, max_length=64)]
)
BadWords: TypeAlias = Annotated[
    list[BadWord],
    Meta(max_length=256, description="Texts, or lists of token ids, that never come whole in the reply."),
]
Stop: TypeAlias = Annotated[
    list[Annotated[str, Meta(min_length=1, max_length=256)]],
    Meta(max_length=MAX_STOPS, description="Texts that end the reply, and are not delivered."),
]
StopTokenIds: TypeAlias = Annotated[
    list[TokenId], Meta(max_length=64, description="Token ids that end the reply, and are not delivered.")
]


Temperature: TypeAlias = Annotated[float, Meta(ge=0, le=2, description="Divides the logits; 0 is greedy.")]
_TOP_P = "Only the fewest of the most likely tokens that reach this probability; 0: one."
TopP: TypeAlias = Annotated[float, Meta(ge=0, le=1, description=_TOP_P)]
TopK: TypeAlias = Annotated[Count, Meta(description="Only so many of the most likely tokens; 0: all.")]
_MIN_P = "Only tokens at least so many times as likely as the most likely one."
MinP: TypeAlias = Annotated[float, Meta(ge=0, le=1, description=_MIN_P)]
_TYPICAL_P = "Only the locally typical tokens of this mass; 1: all."
TypicalP: TypeAlias = Annotated[float, Meta(gt=0, le=1, description=_TYPICAL_P)]
_REPETITION = "For tokens of prompt and reply; 1: none."
RepetitionPenalty: TypeAlias = Annotated[float, Meta(ge=0.01, le=100, description=_REPETITION)]
_PRESENCE = "For each token that the reply has; 0: none."
PresencePenalty: TypeAlias = Annotated[float, Meta(ge=-2, le=2, description=_PRESENCE)]
_FREQUENCY = "For each token of the reply, as often as it has it; 0: none."
FrequencyPenalty: TypeAlias = Annotated[float, Meta(ge=-2, le=2, description=_FREQUENCY)]
_SEED = "Makes a reply repeatable: each draw depends on it and on the token's position alone."
Seed: TypeAlias = Annotated[int, Meta(ge=0, le=2**63 - 1, description=_SEED)]
_LEAST = "Nothing ends the reply before it has so many tokens."
MinOutputTokens: TypeAlias = Annotated[Count, Meta(description=_LEAST)]
_LOGPROBS = "Send each token's log probability, and those of that many of the most likely tokens there."
TopLogprobs: TypeAlias = Annotated[int, Meta(ge=0, le=20, description=_LOGPROBS)]


class SamplingFields(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Sampling fields that a client sends, for a session or for one response. An absent field changes nothing.
    Null in a session restores the server's default; null in a response is the same as absent: the session's
    value counts.

    Tokens are filtered in this order: `top_k`, `top_p`, `min_p`, `typical_p`.
    """

    max_output_tokens: MaxOutputTokens | UnsetType | None = UNSET
    min_output_tokens: MinOutputTokens | UnsetType | None = UNSET
    temperature: Temperature | UnsetType | None = UNSET
    top_p: TopP | UnsetType | None = UNSET
    top_k: TopK | UnsetType | None = UNSET
    min_p: MinP | UnsetType | None = UNSET
    typical_p: TypicalP | UnsetType | None = UNSET
    repetition_penalty: RepetitionPenalty | UnsetType | None = UNSET
    presence_penalty: PresencePenalty | UnsetType | None = UNSET
    frequency_penalty: FrequencyPenalty | UnsetType | None = UNSET
    logit_bias: LogitBias | UnsetType | None = UNSET
    bad_words: BadWords | UnsetType | None = UNSET
    seed: Seed | UnsetType | None = UNSET
    stop: Stop | UnsetType | None = UNSET
    stop_token_ids: StopTokenIds | UnsetType | None = UNSET
    top_logprobs: TopLogprobs | UnsetType | None = UNSET


def sampling_fields(
    names: Mapping[str, str],
    types: Mapping[str, Any] = MappingProxyType({}),
    base: type[msgspec.Struct] | None = None,
) -> Any:
    """A struct of the sampling fields for another protocol: the attributes are those of `SamplingFields`, and
    ``names`` maps some to the names that they have on the wire. ``types``: those of fields of which that
    protocol takes fewer or further values. ``base``: a struct with fields that come before them."""
    fields = [
        (one.name, types.get(one.name, one.type), UNSET) for one in msgspec.structs.fields(SamplingFields)
    ]
    return msgspec.defstruct(
        "NamedSampling",
        fields,
        bases=None if base is None else (base,),
        rename=dict(names),
        kw_only=True,
        frozen=True,
        forbid_unknown_fields=True,
        omit_defaults=True,
    )


class SamplingResource(msgspec.Struct, kw_only=True, frozen=True):
    """The sampling fields as the server shows them: the values in force.

    Null: not set. Without a `temperature` the reply is greedy, without a `seed` each response has another one,
    and any other field without a value does nothing.
    """

    max_output_tokens: MaxOutputTokens = "inf"
    min_output_tokens: int = 0
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    bad_words: list[str | list[int]] = msgspec.field(default_factory=list)
    seed: int | None = None
    stop: list[str] = msgspec.field(default_factory=list)
    stop_token_ids: list[int] = msgspec.field(default_factory=list)
    top_logprobs: int | None = None


class TopLogprob(msgspec.Struct, kw_only=True, frozen=True):
    """A token that may stand at one position of a reply. `token`: its text alone, with U+FFFD for a part of a
    character; `id`: its token id; `logprob`: its natural log probability by the model, before any penalty or
    filter."""

    token: str
    id: int
    logprob: float


class TokenLogprob(TopLogprob, frozen=True):
    """A token of the reply with its own `logprob`. `top_logprobs`: the most likely tokens at its position, the
    best first."""

    top_logprobs: list[TopLogprob]
