"""A policy for tests: a random order in each step, and a random idle sequence that loses its KV."""

from __future__ import annotations

from collections.abc import Iterable
from random import Random

from holdfast.runtime.order.policy import Policy
from holdfast.runtime.sequence import Sequence


class Shuffled(Policy):
    """Promises nothing: without ageing a turn could wait without end."""

    def __init__(self) -> None:
        self._random = Random(7)

    def order(self, turns: list[Sequence], step: int) -> list[Sequence]:
        return self._random.sample(turns, len(turns))

    def idle_victim(self, idle: Iterable[Sequence], longest: Sequence, now: float) -> Sequence:
        return self._random.choice(list(idle))
