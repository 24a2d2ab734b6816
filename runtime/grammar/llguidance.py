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
from dataclasses import dataclass
from itertools import count, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ...kvstore.system_limits import roam
from ..errors import GrammarInvalid
from ..model.files import files_of
from ..verbs import Grammar, GrammarKind
from .json_schema import loosened
from .json_strings import JsonString
from .limits import check

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from llguidance._lib import JsonCompileOptions

TOKENIZER = "tokenizer.json"
ANY_TOKEN = 0
"""The number of a grammar that allows every token; warm-up steps use it."""

KEPT = 256
"""The most compiled grammars in the cache; the least recently used is dropped first."""

KEPT_BYTES = 8 << 20
"""The most bytes of text of all cached grammars together."""

WORKERS = 4
NICENESS = 10
"""Niceness of the compiling threads, so that steps go first; used where each thread has its own niceness."""

AT_ONCE = 64
"""A matcher of a cached grammar that has to take at most this many tokens of the reply is made within the call,
on the caller's thread; one with more, on another thread."""

LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 200_000,
    "step_lexer_fuel": 50_000,  # 3.5 ms of a step, at worst
    "step_max_items": 20_000,
    "max_grammar_size": 100_000,
    "max_lexer_states": 50_000,
    "verbose_errors": False,
}

JSON_STYLE: JsonCompileOptions = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON has the white space that chat templates write. If any were allowed, a model could write it forever."""


def available() -> bool:
    """Whether the library llguidance is installed."""
    return importlib.util.find_spec("llguidance") is not None


class Compiler:
    """Compiles grammars for one model on other threads, while steps run. ``model``: its folder or GGUF file.
    ``eos_ids``: its end tokens."""

    threads = WORKERS
    """How many grammars are compiled at the same time; more calls of `compile` wait."""

    def __init__(self, model: Path, vocab_size: int, eos_ids: tuple[int, ...]) -> None:
        self._files = files_of(model)
        self._vocab_size = vocab_size
        self._eos_ids = eos_ids
        self._tokenizer: LLTokenizer | None = None
        self._quotes: NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        self._loading = threading.Lock()
        self._workers = ThreadPoolExecutor(WORKERS, "holdfast-grammar", _step_back)
        self._kept: OrderedDict[Grammar, LLMatcher] = OrderedDict()
        self._bytes = 0
        self._books = threading.Lock()
        self._compiled = self._hits = self._refused = 0
        self._seconds = 0.0

    @property
    def warm(self) -> bool:
        """Whether the tokenizer is loaded. The first grammar loads it, so its compile time is no measure."""
        return self._tokenizer is not None

    def knows(self, grammar: Grammar) -> bool:
        """Whether the compiled grammar is cached."""
        return grammar in self._kept

    def compile(
        self, grammar: Grammar, stop_ids: tuple[int, ...], said: NDArray[np.int32]
    ) -> Future[Matcher]:
        """The future of a matcher for ``grammar`` that has taken ``said``: the tokens that the reply has when
        this is called, int32 ``[tokens]``.

        The future is done when this returns if the grammar is cached and ``said`` has at most ``AT_ONCE``
        tokens. ``stop_ids``: tokens that end the reply. End-of-sequence and other special tokens among them are
        allowed exactly where the grammar accepts; tokens of plain text are allowed where the grammar allows
        that text. The future raises `GrammarInvalid`.
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
        """Of grammars: how many are cached now, and since the start how many were compiled, found in the cache
        and refused, and the seconds spent compiling."""
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
        # If the files name no end token, the library chooses one.
        own = frozenset(self._eos_ids).union(tokenizer.eos_tokens)
        ends = frozenset(token for token in stop_ids if token in own or tokenizer.is_special_token(token))
        string = JsonString(grammar.string_bytes) if grammar.string_bytes else None
        special = [(token // 8, 1 << token % 8, token in ends) for token in own | ends]
        halts = own.union(stop_ids)
        made = Matcher(matcher, special, halts, self._vocab_size, string, tokenizer, self._quotes)
        made.read(tokens)
        return made

    def _beginning_with_quotes(self, tokenizer: LLTokenizer) -> NDArray[np.int64]:
        """The tokens that begin with a quote: int64 ``[words]``, a bit for each token."""
        bits = np.zeros(-(-self._vocab_size // 64) * 64, dtype=np.uint8)
        size = min(self._vocab_size, tokenizer.vocab_size)
        bits[[token for token in range(size) if tokenizer.decode_bytes([token])[:1] == b'"']] = 1
        return np.packbits(bits, bitorder="little").view(np.int64)

    def _loaded(self) -> LLTokenizer:
        with self._loading:
            if self._tokenizer is None:
                from llguidance import LLTokenizer

                try:
                    text = (self._files.content(TOKENIZER) or b"").decode()
                    eos = list(self._eos_ids) or None
                    try:
                        tokenizer = LLTokenizer(text, n_vocab=self._vocab_size, eos_token=eos)
                    except Exception:  # it may have more tokens than the model
                        tokenizer = LLTokenizer(text, eos_token=eos)
                except Exception as error:  # the library raises many kinds
                    raise GrammarInvalid(f"{self._files.where(TOKENIZER)}: {error}") from None
                self._quotes = self._beginning_with_quotes(tokenizer)
                self._tokenizer = tokenizer
            return self._tokenizer

    def _compile(self, grammar: Grammar, tokenizer: LLTokenizer) -> LLMatcher:
        began = time.perf_counter()
        made = _compiled(grammar, tokenizer)
        if isinstance(made, GrammarInvalid):
            looser = loosened(grammar, lambda one: not isinstance(_compiled(one, tokenizer), GrammarInvalid))
            made = made if looser == grammar else _compiled(looser, tokenizer)
        with self._books:
            self._seconds += time.perf_counter() - began
            if isinstance(made, GrammarInvalid):
                self._refused += 1
                raise made
            self._compiled += 1
            if self._kept.setdefault(grammar, made) is made:
                self._bytes += len(grammar.text)
            while self._kept and (len(self._kept) > KEPT or self._bytes > KEPT_BYTES):
                oldest, _ = self._kept.popitem(last=False)
                self._bytes -= len(oldest.text)
        return made


@dataclass(eq=False)
class Matcher:
    """The state of one reply in its grammar. It advances with the reply's tokens and never goes back.

    ``special``: of each special token that ends a reply its byte and its bit in a mask, and whether it ends
    this reply: it is allowed exactly where the grammar accepts, else never. ``halts``: these and all other stop
    ids of the reply; one that is plain text is allowed where the grammar allows its text. ``size``: how many
    tokens the model has; the tokenizer may have more. ``string``: bounds the length of strings in a JSON reply,
    None: no bound; ``tokenizer``: gives it the tokens' text; ``quotes``: the tokens that begin with a quote,
    int64 ``[words]``, one bit per token.
    """

    _matcher: LLMatcher
    _special: list[tuple[int, int, bool]]
    _halts: frozenset[int]
    _size: int
    _string: JsonString | None
    _tokenizer: LLTokenizer
    _quotes: NDArray[np.int64]

    @property
    def complete(self) -> bool:
        """Whether only an end token may come next."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    @property
    def fault(self) -> str:
        """Why the grammar allows no token any more; empty while it allows some."""
        return _shortened(self._matcher.get_error()) if self._matcher.is_error() else ""

    def take(self, token: int) -> None:
        """Advance by ``token``, which must not end the reply."""
        self._matcher.consume_token(token)
        self.read([token])

    def read(self, tokens: list[int]) -> None:
        """Track by the tokens that come next in the reply which string is open, and how long it is."""
        if self._string is not None:
            self._string.take(self._tokenizer.decode_bytes(tokens))

    def go_on(self, most: int) -> list[int]:
        """Take the tokens that the grammar forces next, at most ``most``, and return them. None of them ends
        the reply.

        The text is split into tokens as the tokenizer would split it. The result depends only on the tokens
        taken before; it is empty if the next token is a choice. Taking the same tokens one by one, or as the
        ``said`` of `Compiler.compile`, leads to the same state.
        """
        if most < 1 or self._matcher.is_error():
            return []
        forced = self._matcher.compute_ff_tokens()[:most]
        ids = list(takewhile(lambda token: token < self._size and token not in self._halts, forced))
        if not ids or not self._matcher.consume_tokens(ids):
            return []
        self.read(ids)
        return ids

    def fill(self, mask: NDArray[np.int64]) -> None:
        """Set the bits of all tokens that may come next in ``mask``, and clear the other bits.

        If the open string is full, these are the tokens that end it, unless there are none, as within a
        character of several bytes.

        ``mask``: contiguous int64 ``[words]``, little-endian: token t is bit ``t % 8`` of byte ``t // 8``.
        """
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        octets = mask.view(np.uint8)
        octets[: len(bits)], octets[len(bits) :] = bits[: len(octets)], 0
        if self._matcher.is_error():
            mask[:] = 0
            return
        accepts = self._matcher.is_accepting()
        for octet, bit, ends in self._special:
            others = int(octets[octet]) & ~bit
            octets[octet] = others | bit if accepts and ends else others
        if self._string is not None and self._string.full:
            closing = mask & self._quotes
            if closing.any():
                mask[:] = closing


class Matchers:
    """The matchers of all turns that follow a grammar, by number: a plan names them so."""

    def __init__(self) -> None:
        self._matchers: dict[int, Matcher] = {}
        self._numbers = count(ANY_TOKEN + 1)

    def __getitem__(self, grammar: int) -> Matcher:
        return self._matchers[grammar]

    def add(self, matcher: Matcher) -> int:
        """Add a turn's matcher; returns its number. Numbers are never reused."""
        grammar = next(self._numbers)
        self._matchers[grammar] = matcher
        return grammar

    def drop(self, grammar: int | None) -> None:
        """Remove the matcher of a turn that is over. ``grammar``: its number; None: the turn had no grammar."""
        if grammar is not None:
            del self._matchers[grammar]

    def fill(self, grammar: int, mask: NDArray[np.int64]) -> None:
        """Write the tokens that the grammar with the number ``grammar`` allows next into ``mask``, int64
        ``[words]``, one bit per token; all tokens if its turn is over, and for the number `ANY_TOKEN`, which
        warm-up steps use."""
        matcher = self._matchers.get(grammar)
        if matcher is None:
            mask.fill(-1)
        else:
            matcher.fill(mask)

    def fault(self, grammar: int) -> str:
        """Why the grammar with the number ``grammar`` allows no token any more; empty while it allows some,
        and if its turn is over."""
        matcher = self._matchers.get(grammar)
        return "" if matcher is None else matcher.fault


def _step_back() -> None:
    roam()
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # a sandbox may forbid it
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


def _compiled(grammar: Grammar, tokenizer: LLTokenizer) -> LLMatcher | GrammarInvalid:
    """The grammar, compiled, or why it cannot be."""
    from llguidance import LLMatcher, LLParserLimits

    try:
        check(grammar)
        matcher = LLMatcher(tokenizer, _source(grammar), log_level=0, limits=LLParserLimits(**LIMITS))
        trial = matcher.deep_copy()
        trial.consume_tokens(trial.compute_ff_tokens())
        trial.compute_bitmask()  # what is only found out in its first step is found out here
    except GrammarInvalid as fault:
        return fault
    except (ValueError, RecursionError) as error:
        return GrammarInvalid(_shortened(str(error)))
    return GrammarInvalid(_shortened(trial.get_error())) if trial.is_error() else matcher


def _source(grammar: Grammar) -> str:
    """The grammar in llguidance's own form. Raises ``ValueError`` if its text is not valid."""
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
    """A JSON array of strings as one regular expression, which becomes one automaton. Rules would be tried
    one by one."""
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
