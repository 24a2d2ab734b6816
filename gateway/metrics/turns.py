"""Counts and times of all turns of a server, whatever protocol their clients speak. `metrics` writes them for
Prometheus.

Times are taken where a turn's events are handed to the client's connection, so a client that reads slowly makes
its own turns look slow.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

from ...sessions.turn.events import EndReason, ReplyDone
from ..access.attribution import Attribution, TenantLabels

NOTHING_KNOWN = Attribution()
FIRST_TOKEN_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
TOKEN_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0),
    *(7.5, 10.0, 20.0, 40.0, 80.0),
)
TURN_SECONDS = (
    *(0.01, 0.03, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)


class Histogram:
    """A histogram as Prometheus has it. ``bounds``: the upper bounds of its buckets, ascending; a value that
    equals a bound is in that bound's bucket. One more bucket takes all larger values."""

    __slots__ = ("_bounds", "_counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self.total = 0.0
        """The sum of all observed values."""

    def observe(self, value: float) -> None:
        """Count a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self.total += value

    def buckets(self) -> list[tuple[str, int]]:
        """For each bound, as text, how many observed values are at most that; the last bound is ``+Inf``. This
        is the form in which Prometheus' client takes buckets."""
        found, below = [], 0
        for bound, count in zip((*map(repr, self._bounds), "+Inf"), self._counts, strict=True):
            below += count
            found.append((bound, below))
        return found


class TurnTimes:
    """The times of one turn, which begins when this is made. ``clock``: seconds, monotonic. ``metrics``: where
    the time to the first output and the gaps between outputs are counted. ``tenant``, ``protocol``: the labels
    under which the turn counts. ``began``, ``first``, ``last``: when
    it began, and when the first and the latest output came, on that clock."""

    __slots__ = ("_clock", "_metrics", "began", "first", "last", "protocol", "tenant")

    def __init__(
        self, metrics: TurnMetrics, clock: Callable[[], float], tenant: str = "", protocol: str = ""
    ) -> None:
        self.tenant = tenant
        self.protocol = protocol
        self._metrics = metrics
        self._clock = clock
        self.began = clock()
        self.first: float | None = None
        """When its first output came, on the clock; None before that."""
        self.last = self.began

    @property
    def first_seconds(self) -> float | None:
        """Seconds from its begin to its first output; None before that."""
        return None if self.first is None else self.first - self.began

    @property
    def seconds(self) -> float:
        """Seconds from its begin to now."""
        return self._clock() - self.began

    def output(self) -> None:
        """Called when output of the turn comes: counts the time to the first output, or the gap since the
        output before."""
        now = self._clock()
        if self.first is None:
            self.first = now
            self._metrics.first_token.observe(now - self.began)
            self._metrics.first_token_of[self.tenant].observe(now - self.began)
        else:
            self._metrics.inter_token.observe(now - self.last)
        self.last = now


class TurnMetrics:
    """The counts and histograms (in seconds) of all turns of a server, and of its requests. ``clock``: seconds,
    monotonic. ``labels``: which tenants have counts of their own; each count is kept by its tenant's label.

    ``prompt``: tokens of whole prompts, those with cached KV included. ``cached``: how many of them had cached
    KV, by the tier that held it: ``device``, ``host``, ``disk``. ``generated``: tokens of replies. ``ended``:
    turns by protocol, status and reason; a turn that its client's mistake ended has the status ``refused`` and
    the error's wire code as its reason. ``refused``: turns that were not admitted, by protocol and the error's
    wire code. ``requests``: by route, protocol and status.
    """

    def __init__(
        self, clock: Callable[[], float] = time.perf_counter, labels: TenantLabels | None = None
    ) -> None:
        self._clock = clock
        self.labels = labels or TenantLabels()
        self.first_token = Histogram(FIRST_TOKEN_SECONDS)
        self.first_token_of: defaultdict[str, Histogram] = defaultdict(lambda: Histogram(FIRST_TOKEN_SECONDS))
        """By tenant's label."""
        self.inter_token = Histogram(TOKEN_SECONDS)
        """Seconds between two successive output events of a turn."""
        self.per_token = Histogram(TOKEN_SECONDS)
        """For each turn, the seconds from its first to its last output divided by its tokens after the
        first."""
        self.whole = Histogram(TURN_SECONDS)
        self.prompt: Counter[tuple[str]] = Counter()
        self.generated: Counter[tuple[str]] = Counter()
        self.cached: Counter[tuple[str, str]] = Counter()
        self.ended: Counter[tuple[str, str, str, str]] = Counter()
        self.refused: Counter[tuple[str, str, str]] = Counter()
        self.requests: Counter[tuple[str, str, str, str]] = Counter()

    def request(self, attribution: Attribution, status: str) -> None:
        """Count a request. ``status``: of its answer."""
        tenant = self.labels.of(attribution.tenant)
        self.requests[tenant, attribution.route, attribution.protocol, status] += 1

    def begin(self, attribution: Attribution = NOTHING_KNOWN) -> TurnTimes:
        """Note the begin of a turn, which is now. Returns its times; they are counted as they are taken."""
        return TurnTimes(self, self._clock, self.labels.of(attribution.tenant), attribution.protocol)

    def end(self, times: TurnTimes, done: ReplyDone, refused: str | None = None) -> None:
        """Count a turn that has ended with its last event ``done``: its whole time, tokens, status and reason.
        ``refused``: the wire code of the client's mistake that ended it; None if none did."""
        usage, tenant = done.usage, times.tenant
        self.whole.observe(times.seconds)
        if times.first is not None and usage.output_tokens > 1:
            self.per_token.observe((times.last - times.first) / (usage.output_tokens - 1))
        self.prompt[(tenant,)] += usage.input_tokens
        self.generated[(tenant,)] += usage.output_tokens
        self.cached[tenant, "device"] += usage.cached_tokens - usage.host_tokens - usage.disk_tokens
        self.cached[tenant, "host"] += usage.host_tokens
        self.cached[tenant, "disk"] += usage.disk_tokens
        if refused is not None:
            self.fail(times, refused, refused=True)
        else:
            self.ended[tenant, times.protocol, done.status.value, done.reason.value] += 1

    def fail(self, times: TurnTimes, code: str, *, refused: bool = False) -> None:
        """Count a turn that raised an error before its last event came. ``code``: the error's wire code.
        ``refused``: the mistake is the client's."""
        self.ended[times.tenant, times.protocol, "refused" if refused else "failed", code] += 1

    def refuse(self, attribution: Attribution, code: str) -> None:
        """Count a turn that was not admitted. ``code``: the wire code of the error that refused it."""
        self.refused[self.labels.of(attribution.tenant), attribution.protocol, code] += 1


FINISHED: dict[str, str] = {
    EndReason.STOP: "stop",
    EndReason.MAX_OUTPUT_TOKENS: "length",
    EndReason.REPETITION: "length",
    EndReason.CLIENT_CANCELLED: "abort",
    EndReason.SERVER_LEAVING: "abort",
    EndReason.STEERED: "abort",
    EndReason.ERROR: "error",
}
"""vLLM's ``finished_reason`` for each reason by which a turn ends. A reason that is not here counts as
``error``."""
