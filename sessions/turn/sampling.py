"""What a client may ask of the draw, checked at birth: every number within bounds, every id in the vocabulary.

Knows nothing of frames, of the session's or the model's defaults.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ...runtime.link.messages import LEAST_PENALTY, MAX_LOGPROBS, MOST_PENALTY, Sampling
from ..errors import SamplingInvalid

MAX_INTEGER = 2**31 - 1
MAX_SEED = 2**63 - 1
MAX_BIASED = 1024
MAX_BIAS = 100.0
MAX_BAD_WORDS = 256
MAX_WORD_TOKENS = 64
MAX_WORD_CHARACTERS = 256


def checked_sampling(
    *,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int | None = None,
    min_p: float = 0.0,
    typical_p: float = 1.0,
    repetition_penalty: float = 1.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    logit_bias: Mapping[int, float] | None = None,
    bad_words: Sequence[Sequence[int]] = (),
    top_logprobs: int | None = None,
    vocab_size: int | None = None,
) -> Sampling:
    """How to draw; ``seed`` None draws one. ``vocab_size`` None: the engine alone looks at the largest ids.

    Raises ``SamplingInvalid``; ``param`` names the field.
    """
    if seed is not None:
        integer("seed", seed, 0, MAX_SEED)
    if top_logprobs is not None:
        integer("top_logprobs", top_logprobs, 0, MAX_LOGPROBS)
    integer("top_k", top_k, 0, MAX_INTEGER)
    return Sampling(
        temperature=number("temperature", temperature, 0.0, 2.0),
        top_k=top_k,
        top_p=_share("top_p", top_p),
        seed=secrets.randbits(63) if seed is None else seed,
        min_p=number("min_p", min_p, 0.0, 1.0),
        typical_p=_share("typical_p", typical_p),
        repetition_penalty=number("repetition_penalty", repetition_penalty, LEAST_PENALTY, MOST_PENALTY),
        presence_penalty=number("presence_penalty", presence_penalty, -2.0, 2.0),
        frequency_penalty=number("frequency_penalty", frequency_penalty, -2.0, 2.0),
        logit_bias=_bias(logit_bias or {}, vocab_size),
        bad_words=_bad_words(bad_words, vocab_size),
        logprobs=top_logprobs,
    )


def number(name: str, value: Any, least: float, most: float) -> float:
    """``value`` as a float. Raises ``SamplingInvalid`` where it is no number, or not within the bounds."""
    real = isinstance(value, int | float) and not isinstance(value, bool)
    if not real or not least <= value <= most or not math.isfinite(value):
        raise SamplingInvalid(f"`{name}` must be a number from {least:g} to {most:g}", param=name)
    return float(value)


def integer(name: str, value: Any, least: int, most: int) -> int:
    """``value``. Raises ``SamplingInvalid`` where it is no whole number, or not within the bounds."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise SamplingInvalid(f"`{name}` must be an integer from {least} to {most}", param=name)
    return value


def token_ids(name: str, ids: Any, vocab_size: int | None) -> tuple[int, ...]:
    """``ids``, each in the vocabulary. Raises ``SamplingInvalid``."""
    most = MAX_INTEGER if vocab_size is None else vocab_size - 1
    if not isinstance(ids, Iterable) or isinstance(ids, str | bytes):
        raise SamplingInvalid(f"`{name}` must hold token ids", param=name)
    found = tuple(ids)
    for token in found:
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token <= most:
            raise SamplingInvalid(f"`{name}`: {token!r:.40} is not a token id from 0 to {most}", param=name)
    return found


def _share(name: str, value: Any) -> float:
    share = number(name, value, 0.0, 1.0)
    if share == 0:
        raise SamplingInvalid(f"`{name}` must be above 0", param=name)
    return share


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
