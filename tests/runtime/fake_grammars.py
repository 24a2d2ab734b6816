"""A grammar compiler without a library: what it compiles is done when it is told so.

The text of a grammar is numbers: in "STEP COUNT" the n-th token leaves what n leaves when divided by STEP, and
it is complete after COUNT of them; "STEP" alone goes on for ever and accepts from the first on. In "STEP COUNT
RUN" there is a choice for each RUN-th token only, the first among them, and in "STEP COUNT RUN FIRST" for the
FIRST-th and each RUN-th from there; the others must be n % STEP. Anything else cannot be compiled.
"""

from __future__ import annotations

from concurrent.futures import Future

import numpy as np

from holdfast.runtime.errors import GrammarInvalid
from holdfast.runtime.grammar.llguidance import Matcher
from holdfast.runtime.verbs import Grammar, GrammarKind


def grammar(text: str) -> Grammar:
    return Grammar(GrammarKind.LARK, text)


class FakeMatcher:
    """`grammars.Matcher` of "STEP COUNT RUN"."""

    def __init__(
        self, ends: tuple[int, ...], step: int, count: int | None = None, run: int = 1, first: int = 0
    ) -> None:
        self.step, self.count, self.ends, self.run, self.first = step, count, ends, run, first
        self.taken: list[int] = []
        self.fault = ""

    @property
    def complete(self) -> bool:
        return len(self.taken) == self.count

    def take(self, token: int) -> None:
        assert not (token - len(self.taken)) % self.step and not self.complete, f"{token} after {self.taken}"
        self.taken.append(token)

    def go_on(self, most: int) -> list[int]:
        ids: list[int] = []
        while len(ids) < most and not self.complete and (len(self.taken) - self.first) % self.run:
            token = len(self.taken) % self.step
            if token in self.ends:
                break
            ids.append(token)
            self.take(token)
        return ids

    def fill(self, mask: np.ndarray) -> None:
        allowed = np.zeros(64 * len(mask), dtype=np.uint8)
        allowed[len(self.taken) % self.step :: self.step] = not self.complete
        accepts = self.complete or (self.count is None and bool(self.taken))
        allowed[list(self.ends)] = accepts
        mask[:] = np.packbits(allowed, bitorder="little").view(np.int64)


class FakeCompiler:
    """`grammars.Compiler`. Not ``slow``: done at once; else after ``finish``."""

    def __init__(self, *, slow: bool = False, threads: int = 4) -> None:
        self.warm = True
        self.threads = threads
        self.known: set[str] = set()
        self.slow = slow
        self.asked: list[tuple[str, list[int]]] = []
        self.matchers: list[FakeMatcher] = []
        self.jobs: list[tuple[Future[Matcher], str, tuple[int, ...], list[int]]] = []

    def knows(self, grammar: Grammar) -> bool:
        return grammar.text in self.known

    def compile(self, grammar: Grammar, stop_ids: tuple[int, ...], said: np.ndarray) -> Future[Matcher]:
        job: Future[Matcher] = Future()
        self.asked.append((grammar.text, said.tolist()))
        self.jobs.append((job, grammar.text, stop_ids, said.tolist()))
        if not self.slow or self.knows(grammar):
            self._finish(*self.jobs.pop())
        return job

    @property
    def running(self) -> list[str]:
        """What is being compiled."""
        return [text for job, text, _, _ in self.jobs]

    def finish(self, *texts: str) -> None:
        """All that was asked for is compiled now, or these."""
        jobs, self.jobs = self.jobs, []
        for job, text, stop_ids, said in jobs:
            if texts and text not in texts:
                self.jobs.append((job, text, stop_ids, said))
            elif job.cancelled():
                continue
            else:
                self._finish(job, text, stop_ids, said)

    def _finish(self, job: Future[Matcher], text: str, stop_ids: tuple[int, ...], said: list[int]) -> None:
        try:
            numbers = list(map(int, text.split()))
        except ValueError:
            job.set_exception(GrammarInvalid("no such grammar"))
            return
        matcher = FakeMatcher(stop_ids, *numbers)
        for token in said:
            matcher.take(token)
        self.matchers.append(matcher)
        self.known.add(text)
        job.set_result(matcher)

    def statistics(self) -> dict[str, float]:
        return {"grammars_kept": 0.0}
