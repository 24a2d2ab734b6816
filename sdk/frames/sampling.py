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
MaxOutputTokens: TypeAlias = Annotated[int, Meta(ge=1, le=2**31 - 1)] | Literal["inf"]
Penalty: TypeAlias = Annotated[float, Meta(ge=-2, le=2)]
LogitBias: TypeAlias = Annotated[
    dict[TokenId, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=1024)
]
BadWord: TypeAlias = (
    Annotated[str, Meta(min_length=1, max_length=256)]
    | Annotated[list[TokenId], Meta(min_length=1, max_length=64)]
)
BadWords: TypeAlias = Annotated[list[BadWord], Meta(max_length=256)]
Stop: TypeAlias = Annotated[
    list[Annotated[str, Meta(min_length=1, max_length=256)]], Meta(max_length=MAX_STOPS)
]
StopTokenIds: TypeAlias = Annotated[list[TokenId], Meta(max_length=64)]


class SamplingFields(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Sampling fields that a client sends, for a session or for one response. An absent field changes nothing.
    Null in a session restores the server's default; null in a response is the same as absent: the session's
    value counts.

    `temperature` 0 is greedy. Tokens are filtered in this order: the `top_k` most likely (0: all), the fewest
    of them that reach the probability `top_p` (0: one), those at least `min_p` times as likely as the most
    likely, the locally typical ones of mass `typical_p`. `seed` makes a reply repeatable: each sample depends
    on the seed and the token's position alone.

    `repetition_penalty` (1: none) counts the tokens of prompt and reply, `presence_penalty` and
    `frequency_penalty` (0: none) those of the reply. `logit_bias`: maps a token id to a number that is added to
    its logit. `bad_words`: texts, or lists of token ids, that never come whole in the reply.

    `max_output_tokens`: the reply has no more; "inf": as many as the context holds. `stop` strings and
    `stop_token_ids` end the reply and are not delivered. Nothing ends it before `min_output_tokens`.
    `top_logprobs`: send each token's log probability and those of so many of the most likely tokens in its
    place (0: only its own; null, in a session: none).
    """

    max_output_tokens: MaxOutputTokens | UnsetType | None = UNSET
    min_output_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | UnsetType | None = UNSET
    temperature: Annotated[float, Meta(ge=0, le=2)] | UnsetType | None = UNSET
    top_p: Annotated[float, Meta(ge=0, le=1)] | UnsetType | None = UNSET
    top_k: Annotated[int, Meta(ge=0, le=2**31 - 1)] | UnsetType | None = UNSET
    min_p: Annotated[float, Meta(ge=0, le=1)] | UnsetType | None = UNSET
    typical_p: Annotated[float, Meta(gt=0, le=1)] | UnsetType | None = UNSET
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] | UnsetType | None = UNSET
    presence_penalty: Penalty | UnsetType | None = UNSET
    frequency_penalty: Penalty | UnsetType | None = UNSET
    logit_bias: LogitBias | UnsetType | None = UNSET
    bad_words: BadWords | UnsetType | None = UNSET
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] | UnsetType | None = UNSET
    stop: Stop | UnsetType | None = UNSET
    stop_token_ids: StopTokenIds | UnsetType | None = UNSET
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | UnsetType | None = UNSET


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
    """A token that may stand in one place of a reply. `token`: its text alone, with U+FFFD for a part of a
    character; `id`: its token id; `logprob`: its natural log probability by the model, before any penalty or
    filter."""

    token: str
    id: int
    logprob: float


class TokenLogprob(TopLogprob, frozen=True):
    """A token of the reply with its own `logprob`. `top_logprobs`: the most likely tokens in its place, the
    best first."""

    top_logprobs: list[TopLogprob]
