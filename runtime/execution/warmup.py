"""Warm-up steps, run before the engine serves: they compile kernels, touch memory and teach the watchdog the
pace.

Without them a slow first step could not be told from a hung one for two minutes, and on a GPU each kernel would
be compiled during the first step that needs it. Knows plans; what is computed is thrown away.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain

import msgspec
import numpy as np

from ..errors import EngineDied
from ..grammar.llguidance import ANY_TOKEN
from ..plan import NO_SEQUENCE, NOTHING_MORE, BlockCopy, PlanRow, RowAsks, Runner, plan_of
from ..settings import StepSize
from ..verbs import MAX_LOGPROBS, Sampling

FIRST_STEP = -1000
"""The number of the first warm-up step: a scheduler's numbers are higher."""

GREEDY = Sampling()
DRAWN = (
    Sampling(temperature=1.0),
    Sampling(temperature=1.0, typical_p=0.9),
    Sampling(repetition_penalty=1.1, frequency_penalty=0.1, presence_penalty=0.1),
    Sampling(logit_bias=((0, 1.0),), bad_words=((0, 1),), logprobs=0),
    Sampling(logprobs=20),
    Sampling(logprobs=100),
)
"""Sampling parameters that together need each sampling kernel."""

LONG_PAST = 8192
"""How many tokens each row of the largest steps has, if the context holds them: what penalties need grows
with that."""


def rehearse(
    runner: Runner,
    block_tokens: int,
    max_context: int,
    *,
    kernels: bool = False,
    largest: StepSize | None = None,
) -> list[Exception]:
    """Run warm-up steps: a prompt within one block, and one token behind it, in block 0, which holds nothing
    yet.

    ``kernels``: also run steps that compile each kernel that a later step may need. They read block 0, and
    write block 0 and, if ``max_context`` reaches there, block 1. ``largest``: before all others, run the
    largest steps there can be, which take the most memory, and smaller ones by powers of two. Returns the
    errors of steps that failed: such a step fails again with a sequence, which then ends with the error.
    Raises ``EngineDied``.
    """
    large = _large(block_tokens, max_context, largest) if largest else ()
    plans = _steps(block_tokens, max_context)
    more = _kernels(block_tokens, max_context) if kernels else ()
    errors = list[Exception]()
    for step, (rows, copies) in enumerate(chain(large, plans, more), FIRST_STEP):
        try:
            runner.launch(plan_of(step, rows, copies=copies)).tokens()
        except EngineDied:
            raise
        except Exception as error:
            errors.append(error)
    return errors


Step = tuple[tuple[PlanRow, ...], tuple[BlockCopy, ...]]


def _steps(block_tokens: int, max_context: int) -> Iterator[Step]:
    prompt = max(1, min(block_tokens, max_context) - 1)
    yield (_row(0, prompt, block_tokens),), ()
    if prompt < min(block_tokens, max_context):
        yield (_row(prompt, 1, block_tokens),), ()


def _kernels(block_tokens: int, max_context: int) -> Iterator[Step]:
    """Yield steps (rows, block copies) that together need each kernel: single tokens at each order of context
    length, rows with a chunk, each way to sample, a copy."""
    first = 1
    while first < max_context - 1:
        yield (_row(first, 1, block_tokens),), ()
        first *= 2
    yield (_row(max_context - 1, 1, block_tokens),), ()
    short = min(block_tokens, max_context) - 1
    yield (_row(short, 1, block_tokens), _row(0, 1, block_tokens), _row(0, short or 1, block_tokens)), ()
    for sampling in DRAWN:
        yield (_row(short, 1, block_tokens, sampling), _row(0, 1, block_tokens, sampling)), ()
    yield (_row(short, 1, block_tokens, grammar=ANY_TOKEN),), ()
    if max_context > block_tokens:  # then there are two blocks
        yield (), (BlockCopy(0, 1),)


def _large(block_tokens: int, max_context: int, largest: StepSize) -> Iterator[Step]:
    """Yield the largest steps: all rows drawn in each way, a prompt with log probabilities. Then, by powers of
    two, fewer tokens in as many rows, and fewer rows of one token, of which one has the longest context."""
    past = min(LONG_PAST, max_context) - 1
    for one in DRAWN:
        sampling = msgspec.structs.replace(one, logprobs=MAX_LOGPROBS)
        yield (_row(past, 1, block_tokens, sampling),) * largest.rows, ()
    prompt = _row(0, min(largest.tokens, max_context), block_tokens)
    scores = RowAsks(scored=prompt.tokens, scored_top=MAX_LOGPROBS)
    yield (replace(prompt, asks=scores),), ()
    for tokens in _halves(largest.tokens):
        each, more = divmod(tokens, min(tokens, largest.rows))
        counts = [min(max_context, each + (row < more)) for row in range(min(tokens, largest.rows))]
        yield tuple(_row(0, count, block_tokens, DRAWN[0]) for count in counts), ()
    for rows in _halves(largest.rows):
        yield (_row(max_context - 1, 1, block_tokens), *[_row(0, 1, block_tokens)] * (rows - 1)), ()


def _halves(most: int) -> Iterator[int]:
    """``most``, then the powers of two below it, down to 1."""
    yield most
    for power in reversed(range((most - 1).bit_length())):
        yield 1 << power


def _row(
    first: int, count: int, block_tokens: int, sampling: Sampling = GREEDY, grammar: int | None = None
) -> PlanRow:
    tokens = np.zeros(count, dtype=np.int64)
    table = np.zeros(-(-(first + count) // block_tokens), dtype=np.int32)
    past = np.zeros(first + count - 1, dtype=np.int32)
    asks = NOTHING_MORE if grammar is None else RowAsks(grammar=grammar)
    return PlanRow(NO_SEQUENCE, 0, first, count, tokens, table, sampling, past=past, asks=asks)
