"""Results of traffic: the usual serving figures, and the resources that the processes used."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import mean, median
from time import monotonic
from typing import Any

from ..report import percentile
from .servers import Server, cpu_seconds, memory_bytes
from .talk import Request


@dataclass(frozen=True, slots=True)
class ResourceUsage:
    """CPU seconds of gateway, engine and this client, and the moment, by ``time.monotonic()``."""

    at: float
    gateway: float
    engine: float
    client: float

    @classmethod
    def of(cls, server: Server) -> ResourceUsage:
        """The usage so far."""
        return cls(
            monotonic(), cpu_seconds(server.gateway), cpu_seconds(server.engine), cpu_seconds(os.getpid())
        )

    def since(self, earlier: ResourceUsage) -> ResourceUsage:
        """The usage between two moments; ``at`` is the seconds between them."""
        return ResourceUsage(
            self.at - earlier.at,
            self.gateway - earlier.gateway,
            self.engine - earlier.engine,
            self.client - earlier.client,
        )


@dataclass(slots=True)
class LoadPoint:
    """One load point: the offered turns per second (None: sessions that never pause), and the results."""

    name: str
    rate: float | None
    turns: int = 0
    requests: list[Request] = field(default_factory=list)
    used: ResourceUsage = ResourceUsage(0.0, 0.0, 0.0, 0.0)
    memory: dict[str, dict[str, int]] = field(default_factory=dict)

    def take(self, requests: list[Request]) -> None:
        """Add an ended turn."""
        self.turns += 1
        self.requests += requests

    def close(self, used: ResourceUsage, server: Server) -> None:
        """End the load point."""
        self.used = used
        self.memory = {name: memory_bytes(getattr(server, name)) for name in ("gateway", "engine")}

    def told(self) -> dict[str, Any]:
        """The JSON form, with the keys of serving benchmarks. TTFT includes waiting for a free session."""
        done = [one for one in self.requests if one.failed is None and one.events]
        tokens = sum(one.tokens for one in done)
        events = sum(len(one.events) for one in done)
        seconds = self.used.at or float("nan")
        times = {
            "ttft": [one.events[0] - one.began for one in done],
            "tpot": [(one.ended - one.events[0]) / (one.tokens - 1) for one in done if one.tokens > 1],
            "itl": [later - earlier for one in done for earlier, later in pairwise(one.events)],
            "e2el": [one.ended - one.began for one in done],
        }
        return {
            "load": self.name,
            "offered_turns_per_second": self.rate,
            "turns": self.turns,
            "duration": seconds,
            "completed": len(done),
            "failed": [one.failed for one in self.requests if one.failed is not None],
            "total_output_tokens": tokens,
            "request_throughput": len(done) / seconds,
            "output_throughput": tokens / seconds,
            **{key: value for name, values in times.items() for key, value in _in_ms(name, values)},
            **{name: self._process(name, events) for name in ("gateway", "engine")},
            "client": {"cpu_seconds": self.used.client, "cores": self.used.client / seconds},
        }

    def _process(self, name: str, events: int) -> dict[str, float]:
        cpu: float = getattr(self.used, name)
        memory = self.memory.get(name, {})
        return {
            "cpu_seconds": cpu,
            "cores": cpu / (self.used.at or float("nan")),
            "microseconds_per_event": 1e6 * cpu / max(1, events),
            "rss_bytes": memory.get("now", 0),
            "peak_rss_bytes": memory.get("peak", 0),
        }


def _in_ms(name: str, values: Iterable[float]) -> list[tuple[str, float]]:
    ms = [1000 * value for value in values] or [float("nan")]
    return [
        (f"mean_{name}_ms", mean(ms)),
        (f"median_{name}_ms", median(ms)),
        (f"p90_{name}_ms", percentile(ms, 0.9)),
        (f"p99_{name}_ms", percentile(ms, 0.99)),
    ]
