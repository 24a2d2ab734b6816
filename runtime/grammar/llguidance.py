"""Grammars by llguidance: compiled on threads of their own, cached by their text, with one matcher for each
reply.

The only module that knows the library, which is imported with the first grammar. It needs the tokenizer's file
and nothing else of the model. https://github.com/guidance-ai/llguidance
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import sys
import threading
import time
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ...kvstore.system_limits import roam
from ..errors import GrammarInvalid
from ..link.messages import Grammar, GrammarKind
from .limits import check

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from llguidance._lib import JsonCompileOptions

ANY_TOKEN = 0
"""The number of a grammar that allows every token, for warm-up."""

KEPT = 256
"""How many compiled grammars are cached; the last used ones stay."""

KEPT_BYTES = 8 << 20
"""The most bytes of text that these may have together."""

WORKERS = 4
NICENESS = 10
"""Of the threads that compile, so that a step goes first; on systems that have a niceness for each thread."""

AT_ONCE = 64
"""Up to so many tokens said before are taken without a thread, where the grammar is known."""

LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 200_000,
    "step_lexer_fuel": 50_000,  # 3.5 ms of a step, at worst
    "step_max_items": 20_000,
    "max_grammar_size": 100_000,
    "max_lexer_states": 50_000,
    "verbose_errors": False,
}

JSON_STYLE: JsonCompileOptions = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON as templates write it; with free white space a model could write that without end."""


def available() -> bool:
    """Whether the library is installed."""
    return importlib.util.find_spec("llguidance") is not None


class Compiler:
    """Compiles grammars for one model on other threads, while steps run."""

    def __init__(self, tokenizer_file: Path, vocab_size: int, eos_ids: tuple[int, ...]) -> None:
        self._file = tokenizer_file
        self._vocab_size = vocab_size
        self._eos_ids = eos_ids
        self._tokenizer: LLTokenizer | None = None
        self._loading = threading.Lock()
        self._workers = ThreadPoolExecutor(WORKERS, "holdfast-grammar", _step_back)
        self._kept: OrderedDict[Grammar, LLMatcher] = OrderedDict()
        self._bytes = 0
        self._books = threading.Lock()
        self._compiled = self._hits = self._refused = 0
        self._seconds = 0.0

    @property
    def warm(self) -> bool:
        """Whether the tokenizer is loaded. Before, the time a grammar takes says nothing of it."""
        return self._tokenizer is not None

    @property
    def threads(self) -> int:
        """How many grammars are compiled at once; more calls of `compile` wait."""
        return WORKERS

    def knows(self, grammar: Grammar) -> bool:
        """Whether it is cached."""
        return grammar in self._kept

    def compile(
        self, grammar: Grammar, stop_ids: tuple[int, ...], said: NDArray[np.int32]
    ) -> Future[Matcher]:
        """A matcher that has taken ``said``, int32 ``[tokens]``; done at once where the grammar is cached.

        ``stop_ids``: what ends the reply. Those that are end tokens are allowed exactly where the grammar
        accepts; those that are text are allowed as the grammar has them. The future raises `GrammarInvalid`.
        """
        with self._books:
            known = self._kept.get(grammar)
            if known is not None:
                self._kept.move_to_end(grammar)
                self._hits += 1
        if known is None or len(said) > AT_ONCE:
            return self._workers.submit(self._matcher, grammar, known, stop_ids, said)
        done: Future[Matcher] = Future()
        try:
            done.set_result(self._matcher(grammar, known, stop_ids, said))
        except GrammarInvalid as fault:
            done.set_exception(fault)
        return done

    def statistics(self) -> dict[str, float]:
        """Grammars kept, compiled, found compiled and refused; seconds of compiling."""
        return {
            "grammars_kept": len(self._kept),
            "grammars_compiled": self._compiled,
            "grammars_found": self._hits,
            "grammars_refused": self._refused,
            "grammar_seconds": self._seconds,
        }

    def _matcher(
        self, grammar: Grammar, known: LLMatcher | None, stop_ids: tuple[int, ...], said: NDArray[np.int32]
    ) -> Matcher:
        tokenizer = self._loaded()
        matcher = (known or self._compile(grammar, tokenizer)).deep_copy()
        tokens = said.tolist()
        if tokens and not matcher.consume_tokens(tokens):
            raise GrammarInvalid(f"what was said does not follow it: {_shortened(matcher.get_error())}")
        own = frozenset(self._eos_ids).union(
            tokenizer.eos_tokens
        )  # the library takes one where none is named
        ends = frozenset(token for token in stop_ids if token in own or tokenizer.is_special_token(token))
        return Matcher(matcher, ends, own - ends, frozenset(stop_ids))

    def _loaded(self) -> LLTokenizer:
        with self._loading:
            if self._tokenizer is None:
                from llguidance import LLTokenizer

                try:
                    text = self._file.read_text(encoding="utf-8")
                    eos = list(self._eos_ids) or None
                    self._tokenizer = LLTokenizer(text, n_vocab=self._vocab_size, eos_token=eos)
                except Exception as error:  # the library raises many kinds
                    raise GrammarInvalid(f"{self._file}: {error}") from None
            return self._tokenizer

    def _compile(self, grammar: Grammar, tokenizer: LLTokenizer) -> LLMatcher:
        from llguidance import LLMatcher, LLParserLimits

        began = time.perf_counter()
        try:
            check(grammar)
            text = _source(grammar)
            matcher = LLMatcher(tokenizer, text, log_level=0, limits=LLParserLimits(**LIMITS))
            trial = matcher.deep_copy()
            trial.consume_tokens(trial.compute_ff_tokens())
            trial.compute_bitmask()  # what is only found out in its first step is found out here
        except GrammarInvalid as passed:
            return self._refuse(passed.message)
        except (ValueError, RecursionError) as error:
            return self._refuse(str(error))
        finally:
            with self._books:
                self._seconds += time.perf_counter() - began
        if trial.is_error():
            return self._refuse(trial.get_error())
        self._keep(grammar, matcher)
        return matcher

    def _refuse(self, why: str) -> LLMatcher:
        with self._books:
            self._refused += 1
        raise GrammarInvalid(_shortened(why))

    def _keep(self, grammar: Grammar, matcher: LLMatcher) -> None:
        with self._books:
            self._compiled += 1
            if self._kept.setdefault(grammar, matcher) is matcher:
                self._bytes += len(grammar.text)
            while self._kept and (len(self._kept) > KEPT or self._bytes > KEPT_BYTES):
                oldest, _ = self._kept.popitem(last=False)
                self._bytes -= len(oldest.text)


class Matcher:
    """How far one reply has come in its grammar. It moves on with the reply's tokens, and never back.

    ``ends``: tokens that end it, allowed exactly where the grammar accepts. ``others``: end tokens of the model
    that do not end this reply, never allowed. ``stops``: ends too, but ends that the grammar has as text.
    """

    def __init__(
        self, matcher: LLMatcher, ends: frozenset[int], others: frozenset[int], stops: frozenset[int]
    ) -> None:
        self._matcher = matcher
        self._ends = ends
        self._others = others
        self._halts = ends | others | stops

    @property
    def complete(self) -> bool:
        """Whether nothing but an end may follow."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    @property
    def fault(self) -> str:
        """Why it allows no token any more; empty while it does."""
        return _shortened(self._matcher.get_error()) if self._matcher.is_error() else ""

    def take(self, token: int) -> None:
        """The reply goes on with ``token``, which does not end it."""
        self._matcher.consume_token(token)

    def go_on(self, most: int) -> list[int]:
        """Take the tokens that must come next, at most ``most``, and return them; none of them ends the reply.

        They are written as the tokenizer would write them, and depend only on the tokens taken before. Once
        they are taken the next token is a choice. Taking the same tokens one by one, or as the ``said`` of
        `Compiler.compile`, leads to the same state.
        """
        if most < 1 or self._matcher.is_error():
            return []
        forced = self._matcher.compute_ff_tokens()[:most]
        ids = list(takewhile(lambda token: token not in self._halts, forced))
        return ids if not ids or self._matcher.consume_tokens(ids) else []

    def fill(self, mask: NDArray[np.int64]) -> None:
        """Set the bits of the tokens that may come next, and clear all others. End tokens may come where the
        grammar accepts.

        ``mask``: contiguous ``[words]``, little-endian: token t is bit ``t % 8`` of byte ``t // 8``.
        """
        mask[:] = 0
        if self._matcher.is_error():
            return
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        octets = mask.view(np.uint8)
        octets[: len(bits)] = bits[: len(octets)]
        if self._matcher.is_error():
            mask[:] = 0
            return
        accepts = self._matcher.is_accepting()
        for token in self._ends | self._others:
            bit = np.uint8(1 << token % 8)
            if accepts and token in self._ends:
                octets[token // 8] |= bit
            else:
                octets[token // 8] &= ~bit


class Matchers:
    """The matchers of all turns that follow a grammar, by the numbers that plans carry."""

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


def _step_back() -> None:
    roam()
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # a sandbox may forbid it
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


def _source(grammar: Grammar) -> str:
    """The grammar in the library's own form. Raises ``ValueError``."""
    from llguidance import LLMatcher

    match grammar.kind:
        case GrammarKind.JSON:
            return LLMatcher.grammar_from_json_schema(grammar.text, overrides=JSON_STYLE)
        case GrammarKind.REGEX:
            return LLMatcher.grammar_from_regex(grammar.text)
        case GrammarKind.CHOICE:
            return LLMatcher.grammar_from_regex(_choice(grammar.text))
        case GrammarKind.LARK:
            return LLMatcher.grammar_from_lark(grammar.text)


def _choice(text: str) -> str:
    """One regular expression for all choices: an automaton follows it; rules would be tried in turn."""
    choices = json.loads(text)
    if not isinstance(choices, list) or not choices or not all(isinstance(one, str) for one in choices):
        raise ValueError("a choice is an array of strings")
    return "|".join(map(_literally, choices))


def _literally(text: str) -> str:
    plain = (one if one.isascii() and one.isalnum() else f"\\x{{{ord(one):x}}}" for one in text)
    return "".join(plain)


def _shortened(why: str) -> str:
    if why.startswith("NoExtensionBias"):
        return "no text fits it"
    return " ".join(why.replace("<non-verbose/>", "").split())[:240]
