"""Grammars as the scheduler knows them: how far a reply has come in one, and the compiler.

Two protocols, implemented in ``llguidance``, and the matchers of all turns by the numbers that plans carry. No
tokenizer, no text.
"""

from __future__ import annotations

from concurrent.futures import Future
from itertools import count
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ..link.messages import Grammar

ANY_TOKEN = 0
"""The number of a grammar that allows every token, for warm-up."""


class Matcher(Protocol):
    """How far one reply has come in its grammar. It moves on with the reply's tokens, and never back."""

    @property
    def complete(self) -> bool:
        """Whether nothing but an end may follow."""
        ...

    @property
    def fault(self) -> str:
        """Why it allows no token any more; empty while it does."""
        ...

    def take(self, token: int) -> None:
        """The reply goes on with ``token``, which does not end it."""
        ...

    def go_on(self, most: int) -> list[int]:
        """Take the tokens that must come next, at most ``most``, and return them; none of them ends the reply.

        They are written as the tokenizer would write them, and depend only on the tokens taken before. Once
        they are taken the next token is a choice. Taking the same tokens one by one, or as the ``said`` of
        `Compiler.compile`, leads to the same state.
        """
        ...

    def fill(self, mask: NDArray[np.int64]) -> None:
        """Set the bits of the tokens that may come next, and clear all others. End tokens may come where the
        grammar accepts.

        ``mask``: contiguous ``[words]``, little-endian: token t is bit ``t % 8`` of byte ``t // 8``.
        """
        ...


class Compiler(Protocol):
    """Compiles grammars on other threads, while steps run."""

    @property
    def warm(self) -> bool:
        """Whether it has loaded all that it loads once. Before, the time a grammar takes says nothing of it."""
        ...

    @property
    def threads(self) -> int:
        """How many grammars are compiled at once; more calls of `compile` wait."""
        ...

    def knows(self, grammar: Grammar) -> bool:
        """Whether it is compiled already."""
        ...

    def compile(
        self, grammar: Grammar, stop_ids: tuple[int, ...], said: NDArray[np.int32]
    ) -> Future[Matcher]:
        """A matcher that has taken ``said``, int32 ``[tokens]``; done at once where the grammar is known.

        ``stop_ids``: what ends the reply. Those that are end tokens are allowed exactly where the grammar
        accepts; those that are text are allowed as the grammar has them. The future raises `GrammarInvalid`.
        """
        ...

    def statistics(self) -> dict[str, float]:
        """What it holds and has done."""
        ...


class Matchers:
    """The matchers of all turns that follow a grammar, by number; implements `plan.GrammarMasks`."""

    def __init__(self) -> None:
        self._matchers: dict[int, Matcher] = {}
        self._numbers = count(ANY_TOKEN + 1)

    def __getitem__(self, grammar: int) -> Matcher:
        return self._matchers[grammar]

    def add(self, matcher: Matcher) -> int:
        """Keep a turn's matcher; returns its number, which is never used again."""
        grammar = next(self._numbers)
        self._matchers[grammar] = matcher
        return grammar

    def drop(self, grammar: int | None) -> None:
        """The turn is over; None: it followed no grammar."""
        if grammar is not None:
            del self._matchers[grammar]

    def fill(self, grammar: int, mask: NDArray[np.int64]) -> None:
        """As `Matcher.fill` of this grammar does."""
        if grammar == ANY_TOKEN:
            mask.fill(-1)
        else:
            self._matchers[grammar].fill(mask)

    def fault(self, grammar: int) -> str:
        """As `Matcher.fault` of this grammar is; empty if its turn is over."""
        matcher = self._matchers.get(grammar)
        return "" if matcher is None else matcher.fault
