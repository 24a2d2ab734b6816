"""Limits of `Sampling` and `TokenLimits` in the engine, wide enough that all numbers stay finite.

What a client may ask for is narrower, and the sessions check that. These limits keep a caller of the link from
breaking a step that other sequences share.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from math import isfinite

from msgspec.structs import asdict

from ..errors import SamplingInvalid
from ..verbs import LEAST_PENALTY, MAX_LOGPROBS, MOST_PENALTY, Sampling, TokenLimits

MOST_ADDEND = 1000.0
"""The most that a bias or an additive penalty may be: more than the distance of any two logits that matter."""


def check_sampling(sampling: Sampling, limits: TokenLimits, vocab_size: int) -> None:
    """Check the values of ``sampling`` and ``limits``; every token id must be below ``vocab_size``. Raises
    `SamplingInvalid`, which names what is out of bounds."""
    wrong = [*_numbers(sampling, limits), *_tokens(sampling, limits, vocab_size)]
    if wrong:
        raise SamplingInvalid(f"out of bounds: {', '.join(wrong[:8])}")


def _numbers(sampling: Sampling, limits: TokenLimits) -> Iterator[str]:
    fit = {
        "temperature": isfinite(sampling.temperature) and sampling.temperature >= 0,
        "top_k": sampling.top_k >= 0,
        "top_p": 0 < sampling.top_p <= 1,
        "min_p": 0 <= sampling.min_p <= 1,
        "typical_p": 0 < sampling.typical_p <= 1,
        "repetition_penalty": LEAST_PENALTY <= sampling.repetition_penalty <= MOST_PENALTY,
        "presence_penalty": abs(sampling.presence_penalty) <= MOST_ADDEND,
        "frequency_penalty": abs(sampling.frequency_penalty) <= MOST_ADDEND,
        "logprobs": sampling.logprobs is None or 0 <= sampling.logprobs <= MAX_LOGPROBS,
        "prompt_logprobs": sampling.prompt_logprobs is None or 0 <= sampling.prompt_logprobs <= MAX_LOGPROBS,
        "max_tokens": limits.max_tokens >= 1,
        "min_tokens": 0 <= limits.min_tokens <= max(1, limits.max_tokens),
        "gather": limits.gather >= 1,
    }
    values = asdict(sampling) | asdict(limits)
    yield from (f"{name} {values[name]}" for name, fits in fit.items() if not fits)
    yield from (f"logit_bias {bias}" for _, bias in sampling.logit_bias if not abs(bias) <= MOST_ADDEND)


def _tokens(sampling: Sampling, limits: TokenLimits, vocab_size: int) -> Iterator[str]:
    named = {
        "logit_bias": (token for token, _ in sampling.logit_bias),
        "bad_words": chain.from_iterable(sampling.bad_words),
        "stop_ids": limits.stop_ids,
    }
    for name, tokens in named.items():
        yield from (f"{name} {token}" for token in tokens if not 0 <= token < vocab_size)
    if not all(sampling.bad_words):
        yield "an empty one of bad_words"
    if len({token for token, _ in sampling.logit_bias}) < len(sampling.logit_bias):
        yield "a token twice in logit_bias"
