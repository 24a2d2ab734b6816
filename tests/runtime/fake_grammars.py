"""A grammar compiler without a library: what it compiles is done when it is told so.

The text of a grammar is two numbers: in "STEP COUNT" the n-th token leaves what n leaves when divided by STEP,
and it is complete after COUNT of them; "STEP" alone goes on for ever and accepts from the first on. Anything
else cannot be compiled.
"""

from __future__ import annotations

from concurrent.futures import Future

import numpy as np

from holdfast.runtime.errors import GrammarInvalid
from holdfast.runtime.grammars import Matcher
from holdfast.runtime.link.messages import Grammar, GrammarKind


def grammar(text: str) -> Grammar:
    return Grammar(GrammarKind.LARK, text)


class FakeMatcher:
    """`grammars.Matcher` of "STEP COUNT"."""

    def __init__(self, step: int, count: int | None, ends: tuple[int, ...]) -> None:
        self.step, self.count, self.ends = step, count, ends
        self.taken: list[int] = []
        self.fault = ""

    @property
    def complete(self) -> bool:
        return len(self.taken) == self.count

    def take(self, token: int) -> None:
        assert not (token - len(self.taken)) % self.step and not self.complete, f"{token} after {self.taken}"
        self.taken.append(token)

    def fill(self, mask: np.ndarray) -> None:
        allowed = np.zeros(64 * len(mask), dtype=np.uint8)
        allowed[len(self.taken) % self.step :: self.step] = not self.complete
        accepts = self.complete or (self.count is None and bool(self.taken))
        allowed[list(self.ends)] = accepts
        mask[:] = np.packbits(allowed, bitorder="little").view(np.int64)


class FakeCompiler:
    """`grammars.Compiler`. Not ``slow``: done at once; else after ``finish``."""

    def __init__(self, *, slow: bool = False) -> None:
        self.warm = True
        self.slow = slow
        self.asked: list[tuple[str, list[int]]] = []
        self.matchers: list[FakeMatcher] = []
        self._jobs: list[tuple[Future[Matcher], str, tuple[int, ...], list[int]]] = []

    def compile(self, grammar: Grammar, stop_ids: tuple[int, ...], said: np.ndarray) -> Future[Matcher]:
        job: Future[Matcher] = Future()
        self.asked.append((grammar.text, said.tolist()))
        self._jobs.append((job, grammar.text, stop_ids, said.tolist()))
        if not self.slow:
            self.finish()
        return job

    def finish(self) -> None:
        """All that was asked for is compiled now."""
        for job, text, stop_ids, said in self._jobs:
            if not job.cancelled():
                self._finish(job, text, stop_ids, said)
        self._jobs.clear()

    def _finish(self, job: Future[Matcher], text: str, stop_ids: tuple[int, ...], said: list[int]) -> None:
        try:
            step, *count = map(int, text.split())
        except ValueError:
            job.set_exception(GrammarInvalid("no such grammar"))
            return
        matcher = FakeMatcher(step, count[0] if count else None, stop_ids)
        for token in said:
            matcher.take(token)
        self.matchers.append(matcher)
        job.set_result(matcher)

    def statistics(self) -> dict[str, float]:
        return {"grammars_kept": 0.0}
