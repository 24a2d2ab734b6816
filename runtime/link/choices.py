"""Several replies to one prompt: sequences that share its KV, each with draws of its own.

What other interfaces call ``n``. Knows the link's verbs; nothing of steps, text or sessions (where a client of
the gateway wants alternatives it asks for out-of-band responses, which are forks too).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec

from ..errors import EngineGone, VerbRefused
from .client import EngineLink
from .generation import Generation
from .messages import Finish, Opening, Row, Sampling, TokenLimits, TokenLogprob

_SEEDS = 2**63


@dataclass(slots=True)
class Choice:
    """One reply. ``finish`` None: it was stopped. ``logprobs`` are aligned with ``tokens`` where asked for."""

    tokens: list[int] = field(default_factory=list)
    finish: Finish | None = None
    error: str | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)

    def take(self, row: Row) -> None:
        """What one more step brought."""
        self.tokens += row.tokens
        self.logprobs += row.logprobs or []
        self.finish, self.error = row.finish, row.error


async def choices(
    link: EngineLink,
    prompt: Sequence[int],
    sampling: Sampling,
    limits: TokenLimits,
    n: int,
    salt: bytes = b"",
) -> list[Choice]:
    """``n`` replies to ``prompt``, which is computed once; reply i is that of ``sampling.seed + i`` alone.

    Raises what the link's verbs raise; whatever happens no sequence stays open.
    """
    assert n >= 1, "at least one reply"
    first = await link.begin(Opening(salt), sampling, limits, tokens=prompt)
    opened = [first.state.seq]
    made = [Choice() for _ in range(n)]
    try:
        async for row in first:  # the prompt is computed when the first token is there
            made[0].take(row)
            break
        if n > 1:
            opened += await link.fork(opened[0], n - 1, len(prompt))
        others = [
            await link.generate(seq, _reseeded(sampling, number), limits)
            for number, seq in enumerate(opened[1:], start=1)
        ]
        await asyncio.gather(*map(_read, (first, *others), made))
    finally:
        for seq in opened:
            with suppress(EngineGone, VerbRefused):
                await link.close(seq)
    return made


def _reseeded(sampling: Sampling, number: int) -> Sampling:
    return msgspec.structs.replace(sampling, seed=(sampling.seed + number) % _SEEDS)


async def _read(generation: Generation, choice: Choice) -> None:
    async for row in generation:
        choice.take(row)
