"""Requests and tokens per minute of each API key.

`RateLimiter.admit` takes one request before a turn begins, or raises; `RateLimiter.spent` takes the tokens when
the turn has ended. Both refill continuously: a key with 60 requests per minute gets one back each second. A
turn costs the tokens that were new in its prompt and those of its reply. What the session had before costs
nothing, wherever its KV was; a prompt that was prefilled alone counts once. Tokens are taken on credit: a turn
begins as long as one token is left, and a key in debt waits.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

from ...sdk.frames.server import RateLimit
from ..errors import RateLimited
from ..net.rates import Rate, TokenBucket

MINUTE = 60.0
Counted = Literal["requests", "tokens"]


@dataclass(frozen=True, slots=True)
class KeyRates:
    """How many ``requests`` and ``tokens`` one key may use per minute; None: no limit."""

    requests: int | None = None
    tokens: int | None = None


NO_LIMITS = KeyRates()


@dataclass(frozen=True, slots=True)
class RateLimits:
    """How much of its limits per minute a key has left now. ``limits``: an entry for requests and one for
    tokens, each only if the key has that limit."""

    limits: tuple[RateLimit, ...] = ()

    def headers(self) -> dict[str, str]:
        """The limits as headers of an HTTP answer, in the names that OpenAI's clients read.
        https://platform.openai.com/docs/guides/rate-limits#rate-limits-in-headers
        """
        return self._written("x-ratelimit-{part}-{of}", duration)

    def messages_headers(self, now: float) -> dict[str, str]:
        """The limits as headers of an HTTP answer, in the names that Anthropic's clients read; a reset is a
        time of RFC 3339. ``now``: seconds since 1970.
        https://platform.claude.com/docs/en/api/rate-limits#response-headers"""

        def reset(seconds: float) -> str:
            return f"{datetime.fromtimestamp(math.ceil(now + seconds), UTC):%Y-%m-%dT%H:%M:%SZ}"

        return self._written("anthropic-ratelimit-{of}-{part}", reset)

    def _written(self, header: str, reset: Callable[[float], str]) -> dict[str, str]:
        found: dict[str, str] = {}
        for one in self.limits:
            values = {"limit": str(one.limit), "remaining": str(one.remaining)}
            values["reset"] = reset(one.reset_seconds)
            found |= {header.format(part=part, of=one.name): value for part, value in values.items()}
        return found


class RateLimiter:
    """Counts what each key has used of its requests and tokens per minute. ``rates``: by a tenant's salt, what
    each of the tenant's keys may use; every key has its own count. ``clock``: seconds, monotonic."""

    def __init__(
        self, rates: Mapping[bytes, KeyRates] | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._rates = rates or {}
        self._clock = clock
        self._buckets: dict[bytes, dict[Counted, TokenBucket]] = {}  # by the digest of the key

    @property
    def keys(self) -> int:
        """How many keys' uses are remembered."""
        return len(self._buckets)

    def change(self, rates: Mapping[bytes, KeyRates]) -> None:
        """Use these limits, by tenant's salt, from now on. What a key has used stays used. Keys with full
        allowances are forgotten."""
        self._rates = rates
        self._buckets = {
            key: buckets
            for key, buckets in self._buckets.items()
            if any(bucket.level < bucket.rate.burst for bucket in buckets.values())
        }

    def admit(self, key: bytes, salt: bytes) -> RateLimits:
        """Take one request of a key, before its turn does any work. ``key``: the BLAKE2b of the API key.
        ``salt``: of its tenant. Returns what is left.

        Raises ``RateLimited``, which says when to try again; then nothing is taken.
        """
        self.check(key, salt)
        buckets = self._of(key, salt)
        if "requests" in buckets:
            buckets["requests"].spend()
        return _told(buckets)

    def check(self, key: bytes, salt: bytes) -> None:
        """Raise ``RateLimited`` if `admit` would for this key and its tenant's salt. Takes nothing."""
        buckets = self._of(key, salt)
        if not buckets:
            return
        waits = {name: bucket.seconds_until(1.0) for name, bucket in buckets.items()}
        over = max(waits, key=waits.__getitem__, default=None)
        if over is not None and waits[over] > 0.0:
            raise RateLimited(
                f"Rate limit reached: {buckets[over].rate.burst:,} {over} per minute. Try again in"
                f" {duration(waits[over])}",
                waits[over],
            )

    def spent(self, key: bytes, salt: bytes, tokens: int) -> None:
        """Called when a turn of the key has ended and has cost so many ``tokens``: takes them from the key's
        allowance, on credit if there are too few."""
        bucket = self._of(key, salt).get("tokens")
        if bucket is not None:
            bucket.spend(tokens)

    def left(self, key: bytes, salt: bytes) -> RateLimits:
        """What the key has left now. ``salt``: of its tenant."""
        return _told(self._of(key, salt))

    def _of(self, key: bytes, salt: bytes) -> dict[Counted, TokenBucket]:
        """The key's token buckets by what they count, set to the limits that its tenant has now; empty if it
        has none."""
        rates = self._rates.get(salt)
        if rates is None or rates == NO_LIMITS:
            return {}
        buckets = self._buckets.setdefault(key, {})
        wanted: tuple[tuple[Counted, int | None], ...] = (
            ("requests", rates.requests),
            ("tokens", rates.tokens),
        )
        for name, limit in wanted:
            if limit is None:
                buckets.pop(name, None)
            elif name not in buckets:
                buckets[name] = TokenBucket(_per_minute(limit), self._clock)
            elif buckets[name].rate.burst != limit:
                buckets[name].change(_per_minute(limit))
        return buckets


def duration(seconds: float) -> str:
    """A time as text in the form of OpenAI's rate-limit headers: ``17ms``, ``1.5s``, ``6m0s``. Rounded up, so
    that it is not too short."""
    if seconds < 1.0:
        return f"{math.ceil(seconds * 1000)}ms"
    if seconds < MINUTE:
        return f"{math.ceil(seconds * 10) / 10:g}s"
    minutes, rest = divmod(math.ceil(seconds), int(MINUTE))
    return f"{minutes}m{rest}s"


def _per_minute(limit: int) -> Rate:
    return Rate(limit / MINUTE, limit)


def _told(buckets: Mapping[Counted, TokenBucket]) -> RateLimits:
    return RateLimits(
        tuple(
            RateLimit(
                name=name,
                limit=bucket.rate.burst,
                remaining=max(0, math.floor(bucket.level)),
                reset_seconds=round(bucket.seconds_until(bucket.rate.burst), 3),
            )
            for name, bucket in buckets.items()
        )
    )
